# SPDX-License-Identifier: MIT
"""The engine: declare, plan, trace, loop, reduce, walk. It imports no feature, and knows none."""
