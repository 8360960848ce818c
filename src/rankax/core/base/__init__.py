# SPDX-License-Identifier: MIT
"""Words, checks, names, trees, arrays and caches: helpers used by every other subpackage."""
