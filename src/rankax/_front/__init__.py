# SPDX-License-Identifier: MIT
"""Front ends: the functions that users call."""
