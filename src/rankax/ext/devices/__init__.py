# SPDX-License-Identifier: MIT
"""Devices: find the sharded axes of a batch, and cut them into one part for each device."""
