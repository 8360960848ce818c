# SPDX-License-Identifier: MIT
"""Features, which `rankax.pipeline` asks in turn, and tools, which make calls of their own."""
