# SPDX-License-Identifier: MIT
"""Words, checks, names and trees: helpers used by every other subpackage."""
