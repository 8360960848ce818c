# SPDX-License-Identifier: MIT
"""Calls that evaluate many items at once: which sums XLA:CPU leaves to a library.

XLA:CPU hands sums, maxima, minima and dot products of 4096 numbers or more to a library
(``__ynn_fusion`` in a compiled program), which needs its operand stored and sums long rows fast.
For a few numbers in each result, a loop of XLA is up to seven times as fast. An option of the
compiler leaves products to the library only. It is one of a whole program, so it is set where this
library compiles (``jit=True``, eager calls), and if what gains outweighs what loses. In chunks, the
tiles are too small for the library, but see `_joined` in `rules.py`.

Of 82 random kernels for which `pays_to_sum_in_loops`, none took longer than 1.03 times as long, and
the mean took 0.40.

Test: ``tests/xla_cpu/test_library.py``.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from rankax.ext.equations import FUNCTIONS, SUMS, operations
from rankax.ext.xla_cpu.kept_values import computes_again

# The other rules were measured with this compiler, too. Newer ones get them: they change no value,
# and a program must not become slow on the day of a release.
IS_TUNED = jax.__version_info__ >= (0, 12)
OPTION = "xla_cpu_experimental_ynn_fusion_type"  # what the library computes
PRODUCTS_ONLY = {OPTION: "LIBRARY_FUSION_TYPE_DOT"}
LIBRARY_FROM = 4096  # numbers of an operand; found by compiling
_SHORT = 8  # numbers for each result, up to which a loop is faster than the library


def jit(fun: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return ``jax.jit(fun)``, in which XLA:CPU sums in loops of its own where this is faster.

    ``fun`` is traced for ``args``, and JAX keeps the trace.
    """
    jitted = jax.jit(fun, compiler_options=dict(options) or None)
    config: Any = jax.config
    leaves = jax.tree.leaves(args)
    is_chosen = OPTION in options or OPTION in os.environ.get("XLA_FLAGS", "")
    # JAX refuses to transform a function with compiler options.
    is_transformed = any(isinstance(x, core.Tracer) for x in leaves)
    if is_chosen or is_transformed or config.jax_disable_jit:
        return jitted
    jaxpr = jitted.trace(*args).jaxpr.jaxpr
    # Tracers that the function closes over are inputs, too.
    is_closed = len(jaxpr.invars) == len(leaves)
    if not is_closed or not pays_to_sum_in_loops(jaxpr):
        return jitted
    return jax.jit(fun, compiler_options={**options, **PRODUCTS_ONLY})


def pays_to_sum_in_loops(jaxpr: Any) -> bool:
    """Whether the program of a batch is faster if the library computes products only.

    Loops are faster for short sums, and slower for long rows. They evaluate functions such as
    `sin` number by number, and compute again what the library stores. Products with a matrix that
    all items share gain nothing.
    """
    short = long = 0
    for name, eqn, times, *_ in operations(jaxpr):
        if name in FUNCTIONS:
            return False
        if name not in (*SUMS, "dot_general"):
            continue
        operand, out = eqn.invars[0].aval, eqn.outvars[0].aval
        if name == "dot_general":
            _, (batch, _) = eqn.params["dimension_numbers"]
            if not batch:
                return False
            if len(batch) < out.ndim:  # of matrices, one for each item
                continue
        is_float = jnp.issubdtype(out.dtype, jnp.floating)
        if is_float and operand.size >= LIBRARY_FROM and operand.size > out.size:
            if operand.size <= _SHORT * out.size:
                short += operand.size * times
            elif name == "dot_general" or operand.ndim - 1 in eqn.params["axes"]:
                long += operand.size * times
    return short > long and not jaxpr.effects and not computes_again(jaxpr, LIBRARY_FROM)
