# SPDX-License-Identifier: MIT
"""Lockstep: items that end by themselves, in lanes that then take the next item."""
