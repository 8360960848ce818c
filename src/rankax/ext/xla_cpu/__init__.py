# SPDX-License-Identifier: MIT
"""Rules for XLA on a CPU: what is done to work around this compiler, and nothing else.

No rule changes an operation or its operands: the same primitives, in other tiles, with copies and
barriers between them. Each was measured with JAX 0.12; with another version it does nothing
(`rules.py`).

=================  ==============================================================================
`tiles`            how many items are evaluated at once
`kept_values`      values that several loops read are stored, and inputs of some functions copied
`kept_residuals`   so is what a reverse pass reads again
`components`       small vectors that a reduction reads again are stored by component
`extremes`         extremes compare less, or one tile later
`library`          which sums of a call without chunks a library computes
`slow_chunks`      no rule, but a warning of a fault in one version of JAX
=================  ==============================================================================
"""
