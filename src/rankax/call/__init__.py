# SPDX-License-Identifier: MIT
"""Call: bind the arguments of a call, then plan, trace, fit and run it (`run.py` is the path)."""
