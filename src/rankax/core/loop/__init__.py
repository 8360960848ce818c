# SPDX-License-Identifier: MIT
"""Loop: one scan over the chunks of an axis, how arrays enter and leave it, and what is kept."""
