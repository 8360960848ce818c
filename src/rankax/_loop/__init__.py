# SPDX-License-Identifier: MIT
"""Loop: one scan over the chunks of a batch, and how arrays enter and leave it."""
