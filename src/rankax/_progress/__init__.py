# SPDX-License-Identifier: MIT
"""Progress: what a loop reports, and the bars that show it."""
