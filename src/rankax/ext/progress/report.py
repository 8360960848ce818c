# SPDX-License-Identifier: MIT
"""What a loop reports from inside a program: how many of its items are done.

It reports before each step, or every few steps, and after the last one. The number is the index at
which the chunk starts, which the loop carries, times the number of devices that the batch is cut
over (set by `core/call/run.py`). The total is the length of the loop times that number. Lanes count
the items that have ended instead (`ext/lanes/call.py`). A pass makes about 50 reports at most, and
only the outermost loop reports.

Only data dependencies order the reports, and the final count does not depend on the loop's work. So
the last report also takes a number from the outputs, and cannot come early.

The primitive ``rankax_report`` becomes a `jax.debug.callback` when it is lowered. Used directly, a
debug callback would report once per lane of a `jax.vmap` around the loop, and again where a
`jax.checkpoint` around the loop recomputes it.

The reverse pass of a gradient does not report. A report there would have to be part of the
transposed program, which takes a second primitive with rules for batching, tangents, transposition
and dead code.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from rankax.ext.progress.bars import Progress, show

# Of one loop. A debug callback costs 0.2 to 0.7 ms on a CPU whose caches hold a chunk's data, up to
# 1 ms at worst. So a pass spends at most 50 ms on its reports: 1 % or less where 500 chunks take
# 10 ms each. A loop of fewer steps reports each of them, because its steps may take minutes.
_MOST_REPORTS = 50


@dataclasses.dataclass(frozen=True)
class Reports:
    """The reports of a loop over ``length`` items, which takes ``size`` items in each step."""

    progress: Progress
    length: int
    size: int
    steps: int

    def step(self, done: jax.Array) -> None:
        """Report from a step, before which ``done`` items are done."""
        _report.bind(done, reports=self, is_end=False)

    def end(self, done: jax.Array, outputs: Any) -> None:
        """Report the end of the loop, which returned ``done`` and ``outputs``."""
        _report.bind(done, *_one_number(jax.tree.leaves(outputs)), reports=self, is_end=True)

    def show(self, done: Any) -> None:
        """Show on the host that ``done`` items are done, on each device."""
        parts = self.progress.parts
        show(self.progress.target, int(done) * parts, self.length * parts)


def _one_number(leaves: Sequence[jax.Array]) -> list[jax.Array]:
    """Return a number that depends on a leaf; nothing if all leaves are empty."""
    for x in leaves:
        if x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return [_first(x, *range(x.ndim))]
    return []


def _first(x: jax.Array, *axes: int) -> jax.Array:
    """Return what is first along some axes.

    On a mesh with explicit axes it is a sum, because such an array cannot be sliced.
    """
    if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return jnp.sum(x, axes)
    ends = [1 if axis in axes else n for axis, n in enumerate(x.shape)]
    return lax.squeeze(lax.slice(x, (0,) * x.ndim, ends), axes)


_report = jax.extend.core.Primitive("rankax_report")
_report.multiple_results = True


@_report.def_effectful_abstract_eval
def _(*_: Any, **__: Any) -> tuple[list[Any], Any]:
    return [], _effects()


@functools.cache
def _effects() -> Any:
    """Return the effects of an unordered debug callback, whose type JAX does not export."""
    return jax.make_jaxpr(lambda: jax.debug.callback(print))().effects


@_report.def_impl
def _call_back(done: Any, *after: Any, reports: Reports, is_end: bool) -> list[Any]:
    if is_end:
        jax.debug.callback(lambda *_: reports.show(reports.length), done, *after)
        return []
    every = -(-reports.steps // _MOST_REPORTS) * reports.size
    if every == reports.size:
        jax.debug.callback(reports.show, done)
    else:
        number = done.dtype.type
        is_due = done % number(every) < number(reports.size)
        lax.cond(is_due, functools.partial(jax.debug.callback, reports.show), lambda _: None, done)
    return []


def _report_once(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Report once for all lanes of a `jax.vmap`, which run together."""
    pairs = list(zip(args, dims, strict=True))
    if all(dim is None or x.shape[dim] for x, dim in pairs):
        _report.bind(*(x if dim is None else _first(x, dim) for x, dim in pairs), **params)
    return [], []


def _report_primals(primals: Sequence[Any], _: Sequence[Any], **params: Any) -> Any:
    _report.bind(*primals, **params)
    return [], []


mlir.register_lowering(_report, mlir.lower_fun(_call_back, multiple_results=True))
batching.primitive_batchers[_report] = _report_once
ad.primitive_jvps[_report] = _report_primals
