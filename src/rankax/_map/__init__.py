# SPDX-License-Identifier: MIT
"""Map: a plan and arrays -> a program."""
