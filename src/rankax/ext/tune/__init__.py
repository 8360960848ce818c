# SPDX-License-Identifier: MIT
"""``kernel.tune``: options are timed on this machine, and the results kept as a table."""
