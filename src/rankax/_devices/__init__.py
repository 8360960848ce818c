# SPDX-License-Identifier: MIT
"""Devices: a sharded axis -> parts that devices walk side by side."""
