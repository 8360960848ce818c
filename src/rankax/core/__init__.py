# SPDX-License-Identifier: MIT
"""A call: declare, plan, trace, loop, reduce. It imports no extension; they register here."""
