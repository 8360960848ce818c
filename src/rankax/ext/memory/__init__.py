# SPDX-License-Identifier: MIT
"""Memory: choose a chunk size within a limit (`limit`), or without one (`default`)."""
