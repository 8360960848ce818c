# SPDX-License-Identifier: MIT
"""Kept steps at any distance from each other, and reductions of the steps between them.

One loop runs all steps up to the last kept one, so the program does not grow with the number of
outputs. It carries the rows of the outputs. Each step *adds* to the row of its window: the output
if the step is kept, otherwise zeros. The transpose of a sum only reads the cotangent. The transpose
of a write would also clear the row, and XLA:CPU copies all rows in every step to do that.

A window is reduced like a row whose items are on several devices (`rankax._reduce.merge`): each
step is a run of one item, and its state is merged into that of the window.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax._base.arrays import has_tangent, index_dtype, scalar, zeros
from rankax._loop.access import widen, write_chunk
from rankax._loop.spec import LoopSpec
from rankax._plan.chunks import Chunks
from rankax._reduce.merge import RunStates
from rankax._reduce.passes import item_types, reduce_row
from rankax._reduce.run import Reduced, Reductions, read_reductions, trace_reduced
from rankax._scan.checkpointed import scan_checkpointed
from rankax._scan.loops import Loop


@dataclasses.dataclass(frozen=True)
class Windows:
    """The steps of a loop up to the last kept one, cut after each kept step.

    ``ends`` are the kept steps, each once, in the order of execution; ``of_output`` is the window
    of each output.
    """

    ends: tuple[int, ...]
    of_output: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The steps of all windows."""
        return self.ends[-1] + 1 if self.ends else 0

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of each window."""
        return (0, *(end + 1 for end in self.ends))[: len(self.ends)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of steps in each window."""
        return tuple(end + 1 - start for start, end in zip(self.starts, self.ends, strict=True))


def find_windows(length: int, kept: Sequence[int], *, reverse: bool) -> Windows:
    """Find the windows of a loop that runs up, or down if ``reverse``, with an output per index."""
    places = [length - 1 - index for index in kept] if reverse else kept
    ends, of_output = np.unique(np.asarray(places, int), return_inverse=True)
    return Windows(tuple(ends.tolist()), tuple(of_output.tolist()))


def read_window_reductions(value: Any, site: str) -> Reductions | None:
    """Read ``reduce``; None if it holds nothing but None and ``"last"``, which mean the same."""
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda node: node is None)
    entries = [None if isinstance(leaf, str) and leaf == "last" else leaf for leaf in leaves]
    if all(entry is None for entry in entries):
        return None
    return read_reductions(structure.unflatten(entries), site)


@dataclasses.dataclass(frozen=True)
class _WindowFold:
    """The reduction of the steps in each window; a state is a list of arrays."""

    reductions: Reductions
    site: str
    windows: Windows
    y_tree: Any

    def state(self, leaves: Sequence[Any], *steps: int) -> Reduced:
        """Return the state of one step, or of several, whose outputs are on axis 0."""
        specs = [
            LoopSpec(Chunks(n, n, 1), (0,) * len(leaves), is_loop=False, reduced=True)
            for n in steps
        ]
        total = min(self.windows.sizes, default=1)
        reductions, unflatten = self.reductions.for_runs(total), self.y_tree.unflatten
        types = item_types(leaves, specs)
        item = trace_reduced(lambda *ys: unflatten(ys), types, reductions, total, self.site)
        return reduce_row(item, leaves, specs, reductions)

    def runs(self, reduced: Reduced, size: Any) -> RunStates:
        """Return the protocol of windows of ``size`` steps."""
        return RunStates(self.reductions, reduced.outputs, (size,))

    def start(self, avals: Sequence[Any]) -> Reduced:
        """Return the state of no steps; an output that is kept is zero."""
        none = self.state([zeros((0, *aval.shape), aval.dtype) for aval in avals], 0)
        values = self.runs(none, max(self.windows.sizes, default=1)).renumber(
            none.values, (0,), (0,)
        )
        pairs = zip(jax.tree.leaves(values), none.is_kept, strict=True)
        return none.with_arrays(
            [zeros(x.shape[1:], x.dtype) if is_kept else x for x, is_kept in pairs]
        )

    def step(self, state: list[Any], ys: Sequence[Any], place: jax.Array) -> list[Any]:
        """Merge the step at a place of the window into its state; a kept output is replaced."""
        new = self.state(ys)
        runs = self.runs(new, max(self.windows.sizes))
        values = jax.tree.leaves(runs.renumber(new.values, (1,), (place,)))
        both = [jnp.stack(two) for two in zip(state, values, strict=True)]
        merged = jax.tree.leaves(runs.merge(new.with_arrays(both).values))
        triples = zip(new.is_kept, values, merged, strict=True)
        return [value if is_kept else both for is_kept, value, both in triples]

    def results(self, rows: Reduced) -> Any:
        """Return the results of windows, whose states are on axis 0."""
        sizes = self.windows.sizes
        if len(set(sizes)) <= 1:
            values = self.runs(rows, max(sizes, default=1)).finish(rows.values, 1)
        else:
            counts = jax.device_put(np.asarray(sizes, index_dtype(self.windows.steps)))
            of_window = jax.vmap(lambda size, row: self.runs(rows, size).finish(row))
            values = of_window(counts, rows.values)
        return self.runs(rows, 1).assemble(values, values)


def scan_windows(
    loop: Loop,
    carry: Any,
    items: Any,
    windows: Windows,
    *,
    reduce: tuple[Reductions, str] | None,
    checkpoint: bool,
) -> tuple[Any, Any]:
    """Run the steps of all windows; return the tree of outputs, one for each window.

    Parameters
    ----------
    loop : Loop
    carry, items : pytree
    windows : Windows
    reduce : (Reductions, str), optional
        How to reduce the steps of a window, and the body for errors. None: keep its last output.
    checkpoint : bool
        Whether the reverse pass stores about one carry for each window.
    """
    avals, tree, count = loop.y_avals, loop.y_tree, len(windows.ends)
    dtype = index_dtype(windows.steps)
    fold = none = None
    empty = [_zeros(aval) for aval in avals]
    if reduce is not None:
        fold = _WindowFold(*reduce, windows, tree)
        none = fold.start(avals)
        empty = none.arrays
    rows = [widen(_zeros(x, count)) for x in empty]
    # After the last window comes one that no step reaches.
    starts, ends = (
        jax.device_put(np.asarray([*numbers, windows.steps], dtype))
        for numbers in (windows.starts, windows.ends)
    )

    def skip(carry: Any, x: Any) -> tuple[Any, Any]:
        return loop.step(carry, x)[0], empty

    def step(state: Any, x: Any) -> tuple[Any, None]:
        carry, held, rows, (at, window) = state
        is_end = at == ends[window]
        if fold is None:
            carry, row = lax.cond(is_end, loop.step, skip, carry, x)
        else:
            carry, ys = loop.step(carry, x)
            held = fold.step(held, ys, at - starts[window])
            row = [jnp.where(is_end, x, _zeros(x)) for x in held]
            held = [jnp.where(is_end, a, b) for a, b in zip(empty, held, strict=True)]
        rows = [_add(*both, window) for both in zip(rows, row, strict=True)]
        return (carry, held, rows, (at + 1, window + is_end.astype(dtype))), None

    if count:
        size = -(-windows.steps // count)
        state = carry, empty if fold else (), rows, (scalar(0, dtype), scalar(0, dtype))
        (carry, _, rows, _), _ = scan_checkpointed(
            dataclasses.replace(loop, step=step),
            state,
            loop.cut(items, 0, windows.steps),
            windows.steps,
            (size,) if checkpoint else (),
        )
    carry = loop.skip(carry, items, windows.steps, loop.length, checkpoint=checkpoint)
    pairs = zip(rows, empty, strict=True)
    rows = [x if x.dtype == like.dtype else x.astype(like.dtype) for x, like in pairs]
    ys = fold.results(none.with_arrays(rows)) if fold and none else tree.unflatten(rows)
    order = jax.device_put(np.asarray(windows.of_output, dtype))
    return carry, jax.tree.map(lambda y: y[order], ys)


def _zeros(like: Any, *count: int) -> jax.Array:
    """Return zeros of the type of an array, which may be weak."""
    shape = (*count, *like.shape)
    if getattr(like, "weak_type", False):
        return lax.full(shape, like.dtype.type(0).item())
    return zeros(shape, like.dtype)


def _add(rows: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
    """Add to a row, which is zero; or replace it, where that has no transpose."""
    if not has_tangent(rows):
        return write_chunk(rows, lax.expand_dims(row, (0,)), at, 0)
    return rows.at[at].add(row.astype(rows.dtype), mode="promise_in_bounds")
