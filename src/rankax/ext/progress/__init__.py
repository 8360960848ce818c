# SPDX-License-Identifier: MIT
"""Progress: reports from a running loop (`report`), and the bars that show them (`bars`)."""
