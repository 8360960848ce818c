# SPDX-License-Identifier: MIT
"""Words, checks, names and trees: helpers that every other room uses."""
