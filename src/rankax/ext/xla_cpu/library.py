# SPDX-License-Identifier: MIT
"""Which sums XLA:CPU leaves to a library.

XLA:CPU hands sums, maxima, minima and dot products of 4096 numbers or more to a library
(``__ynn_fusion`` in a compiled program), which needs its operand stored and sums long rows fast.
For a few numbers in each result, a loop of XLA is up to seven times as fast. An option of the
compiler leaves products to the library only. It is one of a whole program, so it is set where this
library compiles (``jit=True``, eager calls), and if what gains outweighs what loses. In chunks, the
tiles are too small for the library.

A loop is different where each tile is a product of matrices. The library computes that and, if the
slots of the tile are joined at once, all that follows, down to their sum; otherwise the product is
stored, and a loop of XLA adds it to the slots. So `joined` joins them. With JAX 0.12, sums of six
of eleven such kernels take 0.67 to 0.86 times as long, of two with a function that XLA evaluates
number by number 0.09 and 0.33, and of three that are cheap 1.2 times, as long as by `jax.vmap`.

The library has sines and cosines in vectors, which XLA:CPU calls from C for each number. So sums of
what they make of numbers are joined, too, in tiles that are long enough for the library: they take
0.11 to 0.21 times as long, gradients 0.56 to 0.63. Where no tile divides the axis, items that were
counted before are left out by a choice, which the library does not make.

Of 82 random kernels for which `pays_to_sum_in_loops`, none took longer than 1.03 times as long, and
the mean took 0.40.

Test: ``tests/xla_cpu/test_library.py``.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.extend.core import Jaxpr

from rankax.core.reduce.row import Accumulation, Elementwise
from rankax.ext.equations import FUNCTIONS, SUMS, operations
from rankax.ext.reductions.accumulators import LogSumExpOf
from rankax.ext.xla_cpu.kept_values import computes_again

# The other rules were measured with this compiler, too. Newer ones get them: they change no value,
# and a program must not become slow on the day of a release.
IS_TUNED = jax.__version_info__ >= (0, 12)
OPTION = "xla_cpu_experimental_ynn_fusion_type"  # what the library computes
PRODUCTS_ONLY = {OPTION: "LIBRARY_FUSION_TYPE_DOT"}
LIBRARY_FROM = 4096  # numbers of an operand; found by compiling
_FUNCTIONS = {"cos", "sin"}  # which XLA evaluates number by number, and the library many at once
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


def joined(step: Accumulation, jaxpr: Jaxpr, moving: set[Any]) -> Accumulation:
    """Return a sum that joins the slots of each tile, if the library then computes more.

    A tile is a product of matrices, one of which the row shares, or all items do; or it has sines.
    """
    is_sum = isinstance(step.accumulator, Elementwise | LogSumExpOf) and step.accumulator.drifts
    found = operations(jaxpr, moving) if is_sum else []
    pays = any(each.name == "dot_general" and sum(each.varying) == 1 for each in found)
    pays = pays or (is_sum and has_functions(jaxpr, of_numbers=True))
    return dataclasses.replace(step, joins=True) if pays else step


def has_functions(jaxpr: Any, *, of_numbers: bool = False) -> bool:
    """Whether an item calls functions that the library has in vectors; ``of_numbers``: only.

    Then it computes numbers alone, and chooses none, which the library does not.
    """
    found = [each.eqn for each in operations(jaxpr)]
    values = [v.aval for eqn in found for v in (*eqn.invars, *eqn.outvars)]
    is_plain = not any(getattr(aval, "shape", ()) for aval in values)
    if of_numbers and not (is_plain and all(eqn.primitive.name != "select_n" for eqn in found)):
        return False
    own = [eqn.outvars[0].aval for eqn in found if eqn.primitive.name in _FUNCTIONS]
    return IS_TUNED and any(aval.dtype == jnp.float32 for aval in own)


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
