# SPDX-License-Identifier: MIT
"""Words, checks, names and trees: what every stage uses, and what knows nothing of them."""
