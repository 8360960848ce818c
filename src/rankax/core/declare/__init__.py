# SPDX-License-Identifier: MIT
"""Declare: a kernel, its ranks and annotations -> one `Declaration`."""
