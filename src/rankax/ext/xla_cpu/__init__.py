# SPDX-License-Identifier: MIT
"""Rules for XLA on a CPU: what is done to work around this compiler, and nothing else.

No rule changes an operation or its operands: the same primitives, in other tiles, with copies and
barriers between them. All were measured with JAX 0.12; before, only those for tiles and extremes
hold. A call asks for a rule through a method of `Rules` (`core/protocols.py`), whose answer without
rules leaves the program alone; `XlaCpu` overrides it.

A rule stays if a kernel that it was not made for gains a tenth, if it fits a paragraph, and if a
test on a compiled program (``tests/xla_cpu``) fails when the compiler no longer needs it. With a
new JAX, run ``tests/xla_cpu``, ``tests/trace/test_cpu_math.py`` and ``benchmarks/tile_sizes.py``,
and delete the rules whose tests fail because the compiler learned.

=================  ==============================================================================
`rules`            when the rules hold; how many items are evaluated at once, and which sums of a
                   tile a library computes
`kept_values`      values that several loops read are stored, inputs of some functions copied, and
                   small vectors that a reduction reads again stored by component
`kept_residuals`   so is what a reverse pass reads again
`extremes`         extremes compare less, or one tile later
`library`          which sums of a call without chunks a library computes
=================  ==============================================================================
"""
