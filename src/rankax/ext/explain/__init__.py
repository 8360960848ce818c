# SPDX-License-Identifier: MIT
"""Explain: what ``plan`` prints."""
