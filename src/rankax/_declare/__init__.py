# SPDX-License-Identifier: MIT
"""Declare: a kernel, its rank declarations and annotations -> the ranks of its parameters."""
