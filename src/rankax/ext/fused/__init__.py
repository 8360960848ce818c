# SPDX-License-Identifier: MIT
"""Fused: a reduction as one kernel, by NVIDIA Warp, with the numbers of an item in registers."""
