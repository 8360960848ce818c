# SPDX-License-Identifier: MIT
"""A call: declare, plan, trace, walk, fold. It knows no extension; they register here."""
