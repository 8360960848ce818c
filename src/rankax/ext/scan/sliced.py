# SPDX-License-Identifier: MIT
"""``sliced_scan``: a scan that stores some of its outputs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax.core.base.arrays import has_tangent, index_dtype, scalar, zeros_of
from rankax.core.base.messages import check_bool, function_location
from rankax.core.loop.loop import widen, write_chunk
from rankax.core.plan.schedule import Chunks, Level
from rankax.core.reduce.protocol import Outputs
from rankax.core.reduce.run import Reductions, trace_reduced
from rankax.core.trace.programs import with_shape
from rankax.ext.reductions.read import read_reductions
from rankax.ext.runs import RunStates, reduce_row
from rankax.ext.scan.checkpointed import scan_checkpointed
from rankax.ext.scan.loops import Loop, kept_indices, run_scan, scan_call

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def sliced_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    start: int | None = None,
    stop: int | None = None,
    step: int | None = None,
    save_at: Sequence[int] | np.ndarray | jax.Array | None = None,
    reduce: Any = None,
    checkpoint: bool = False,
    progress: bool | str | Callable[[int, int], object] = False,
) -> tuple[Carry, Y]:
    r"""Scan, and keep only the outputs ``ys[start:stop:step]``, or ``ys[save_at]``.

    Equivalent to ::

        carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)
        kept = range(length)[start:stop:step]  # or save_at
        ys = jax.tree.map(lambda y: y[np.asarray(kept)], ys)

    except that the other ``ys`` are never stored. Values that only they need are not computed
    either, as far as the compiler can tell. With ``reduce``, equivalent to (for ``"mean"``) ::

        carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)
        if reverse:  # in the order of execution
            ys = jax.tree.map(lambda y: y[::-1], ys)
            kept = [length - 1 - step for step in kept]


        def window(end):  # the steps after the one kept before it, up to and including it
            start = max([step + 1 for step in kept if step < end], default=0)
            return jax.tree.map(lambda y: y[start : end + 1].mean(0), ys)


        ys = jax.tree.map(lambda *means: jnp.stack(means), *map(window, kept))

    Parameters
    ----------
    f : callable
        The scan body: takes a carry and one slice of ``xs``, returns a pair ``(carry, y)``.
    init : pytree
        The first carry. Its leaves keep their shapes and dtypes.
    xs : pytree, optional
        Arrays of one length along axis 0, looped over. Skipped steps read their slices too.
    length : int, optional
        Number of steps; needed only without ``xs``.
    reverse : bool, default False
        Run from the last step to the first. The slice still counts from the first.
    unroll : int or bool, default 1
        How many steps to put in one iteration of the compiled loop; True (or 0) for all of them.
    start, stop, step : int, optional
        The slice of ``ys``, with Python's meaning: negative numbers count from the end, numbers
        out of range are clipped, a negative step reverses the order.
    save_at : sequence of int, optional
        The steps to keep, in place of a slice: a list, a range or a NumPy array, in any order.
        Negative numbers count from the end; a repeated one repeats the output. They must be known
        while tracing.
    reduce : str, Reduction, or a pytree prefix of those, optional
        Reduce each output, or each subtree of outputs, over the steps of a window instead of
        keeping its last one: ``"mean"``, ``"max"``, ``"sum"`` or another name that `chunked_reduce`
        knows, or an object from `rankax.reductions`. ``"last"`` and None keep the output of the
        kept step. The window of a kept step begins after the step that was kept before it, in the
        order of execution, or with the first step. Indices, as of ``"argmax"``, count
        from there. Steps after the last kept one belong to no window.
    checkpoint : bool, default False
        Let the reverse pass store one carry per kept step, and recompute the stretch from one to
        the next. With ``reduce``, or steps that do not form a range: recompute the same number of
        stretches, all of one length.
    progress : bool, str or callable, default False
        Show a bar of the steps (a string is its label), or call a function with ``(done, total)``,
        as in `auto_vmap`. Counting takes at least a quarter of a microsecond per step. Ignored
        under `jax.disable_jit`.

    Returns
    -------
    carry : pytree
        The carry after all steps, skipped ones included.
    ys : pytree
        The kept outputs, stacked along axis 0, with dtypes as `jax.lax.scan` gives them.

    Raises
    ------
    TypeError
        An argument has the wrong type, or ``save_at`` is combined with a slice.
    TypeError
        ``f`` does not return a pair, or the carry it returns differs from ``init`` in structure,
        shape or dtype.
    ValueError
        ``step`` is 0, or an index of ``save_at`` is out of range.
    ValueError
        No reduction has this name, or an output cannot be reduced this way.
    ValueError
        ``length`` is negative, missing or contradicts ``xs``.
    ValueError
        The leaves of ``xs`` differ in length, or have no axis.

    See Also
    --------
    checkpoint_chunked_scan : Checkpoints that do not depend on which outputs are kept.

    Notes
    -----
    *Traces.* ``f`` is traced once, whatever the length and the slice, also under `jax.grad`; twice
    where `jax.lax.scan` does so, to give a weakly typed ``init`` the dtype that ``f`` returns. The
    compiled program holds between one and six copies of it.

    *Memory.* For ``n`` steps of which ``k`` are kept, besides inputs and outputs:

    * Forward, one step. ``xs`` is read in place. The ``k`` outputs are copied once if ``step`` is
      negative, or if the slice leaves no room for the last block, as ``ys[::3]`` of 10 does; once
      or twice with ``reduce``, or with steps that do not form a range.
    * In a derivative, ``xs`` is copied at most once, and not at all if the kept steps divide it
      evenly.
    * In the reverse pass, what ``f`` needs to be differentiated, for ``n`` steps. With
      ``checkpoint``: ``k`` carries, and what ``f`` needs for the longest stretch without a kept
      step. With steps that do not form a range, a gradient without ``checkpoint`` may store twice
      what ``f`` needs, as a `jax.lax.cond` does.

    *Time.* That of `jax.lax.scan`; with ``checkpoint``, one more evaluation of each step in the
    reverse pass.

    *Derivatives.* With ``reduce``, as in `chunked_reduce`: among equal items, the first gets
    the whole derivative of ``"max"``. A step that is left out by ``Sum(where="ok")`` gets a
    cotangent of 0, but it was run, so an infinite derivative of its output with respect to the
    carry still gives NaN.

    Examples
    --------
    Keep every 250th of the 1000 steps of a spring:

    >>> import jax, jax.numpy as jnp
    >>> from rankax import sliced_scan
    >>> def leapfrog(state, dt):
    ...     position, velocity = state
    ...     velocity = velocity - dt * position
    ...     position = position + dt * velocity
    ...     return (position, velocity), position
    >>> init, dts = (jnp.array(1.0), jnp.array(0.0)), jnp.full(1000, 0.01)
    >>> carry, ys = sliced_scan(leapfrog, init, dts, start=249, step=250)
    >>> ys.shape
    (4,)
    >>> bool(ys[-1] == carry[0])
    True

    Or keep three of them, or the mean over each of four windows:

    >>> sliced_scan(leapfrog, init, dts, save_at=[0, 9, -1])[1].shape
    (3,)
    >>> _, means = sliced_scan(leapfrog, init, dts, start=249, step=250, reduce="mean")
    >>> means.round(1)
    Array([ 0.2, -0.6,  0.8, -0.6], dtype=float32)
    """
    call = scan_call("sliced_scan", f, init, xs, length, reverse, unroll, progress)
    check_bool(checkpoint, call.site, "checkpoint")
    kept = kept_indices(call.site, call.length, save_at, start=start, stop=stop, step=step)
    reductions = read_window_reductions(reduce, call.site)
    even = kept if isinstance(kept, range) else as_range(kept)
    if even is not None and reductions is None:
        layout = find_kept_steps(call.length, even, reverse=reverse)

        def schedule(loop: Loop, carry: Any, items: Any) -> tuple[Any, Any]:
            carry, ys = _scan_kept(loop, carry, items, layout, checkpoint=checkpoint)
            ys = loop.y_tree.unflatten(ys)
            return carry, jax.tree.map(lambda y: lax.rev(y, (0,)), ys) if even.step < 0 else ys

        in_place = layout.blocks < call.length
        key = layout, even.step < 0, checkpoint
    else:
        windows = find_windows(call.length, kept, reverse=reverse)
        fold = None if reductions is None else (reductions, function_location(f))
        schedule = functools.partial(
            _scan_windows, windows=windows, reduce=fold, checkpoint=checkpoint
        )
        in_place = True
        is_ordered = reductions is not None and reductions.are_ordered
        key = None if is_ordered else (windows, fold, checkpoint)

    def of_all(ys: Any) -> Any:
        if reductions is None:
            return jax.tree.map(lambda y: y[np.asarray(kept, int)], ys)
        with jax.disable_jit(False):
            return sliced_scan(_echo, 0, ys, call.length, reverse, save_at=kept, reduce=reduce)[1]

    return run_scan(call, lambda *_: (schedule, in_place, key), of_all)


class KeptSteps(NamedTuple):
    """The kept steps of a loop, in the order of execution.

    First come ``lead`` skipped steps. Then come ``blocks`` blocks of ``stride`` steps, in each of
    which the step after the first ``before`` is kept. If ``partial``, another block follows that
    ends with its kept step. All other steps are skipped.
    """

    lead: int
    blocks: int
    before: int
    stride: int
    partial: bool


def as_range(kept: Sequence[int]) -> range | None:
    """Return indices as a range; None if they are not one."""
    step = kept[1] - kept[0] if len(kept) > 1 else 1
    even = range(kept[0], kept[0] + step * len(kept), step) if kept and step else range(0)
    return even if list(kept) == list(even) else None


def find_kept_steps(length: int, kept: range, *, reverse: bool) -> KeptSteps:
    """Find the ``kept`` steps of a loop that runs up, or down if ``reverse``.

    The blocks begin as early as possible, so that they tile the loop if the stride divides its
    length and no block is left out.
    """
    if kept.step < 0:
        kept = kept[::-1]
    if not kept:
        return KeptSteps(length, 0, 0, 1, False)
    first = length - 1 - kept[-1] if reverse else kept[0]
    stride = kept.step if len(kept) > 1 else 1
    before = min(first, stride - 1)
    lead = first - before
    blocks = min(len(kept), (length - lead) // stride)
    return KeptSteps(lead, blocks, before, stride, partial=blocks < len(kept))


def _echo(carry: Any, y: Any) -> tuple[Any, Any]:
    return carry, y


def _scan_kept(
    loop: Loop, carry: Any, items: Any, kept: KeptSteps, *, checkpoint: bool
) -> tuple[Any, Any]:
    """Run the stretches and blocks of `KeptSteps` in turn; only kept steps have outputs."""
    if kept.blocks == loop.length and not checkpoint:
        return loop.run(carry, items, kept.blocks)
    wrap = jax.checkpoint if checkpoint else lambda fun: fun

    def up_to_kept(carry: Any, items: Any) -> tuple[Any, Any]:
        carry = loop.skip(carry, items, 0, kept.before)
        last = loop.cut(items, kept.before, kept.before + 1)
        return loop.step(carry, jax.tree.map(lambda leaf: leaf[0], last))

    def block(carry: Any, items: Any) -> tuple[Any, Any]:
        carry, y = up_to_kept(carry, items)
        return loop.skip(carry, items, kept.before + 1, kept.stride), y

    at = kept.lead + kept.blocks * kept.stride
    carry = loop.skip(carry, items, 0, kept.lead, checkpoint=checkpoint)
    blocks = loop.cut(items, kept.lead, at)
    carry, ys = loop.blocks(wrap(block), carry, blocks, kept.blocks, kept.stride)
    if kept.partial:
        end = at + kept.before + 1
        carry, y = wrap(up_to_kept)(carry, loop.cut(items, at, end))
        ys = loop.join(ys, jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), y))
        at = end
    return loop.skip(carry, items, at, loop.length, checkpoint=checkpoint), ys


# Kept steps at any distance from each other, and reductions of the steps between them.


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
    """The reduction of the steps in each window; a state is a list of arrays.

    A window is reduced like a row whose items are on several devices (`rankax.core.reduce.run`):
    each step is a run of one item, and its state is merged into that of the window.
    """

    reductions: Reductions
    site: str
    windows: Windows
    y_tree: Any

    def state(self, leaves: Sequence[Any], *steps: int) -> tuple[tuple[Outputs, ...], list[Any]]:
        """Return the outputs of a step, and the state of one step, or of several on axis 0."""
        specs = [
            Level(Chunks(n, n, 1), (0,) * len(leaves), is_loop=False, reduced=True) for n in steps
        ]
        total = min(self.windows.sizes, default=1)
        reductions, unflatten = self.reductions.for_runs(total), self.y_tree.unflatten
        types = [with_shape(jax.typeof(leaf), leaf.shape[len(steps) :]) for leaf in leaves]
        item = trace_reduced(lambda *ys: unflatten(ys), types, reductions, total, self.site)
        return item.outputs, reduce_row(item, leaves, specs, reductions)

    def start(self, avals: Sequence[Any]) -> tuple[tuple[Outputs, ...], list[Any]]:
        """Return the outputs of a step, and the state of none; an output that is kept is zero."""
        outputs, none = self.state([zeros_of(aval, (0, *aval.shape)) for aval in avals], 0)
        pairs = zip(
            self.reductions.entries, self._runs(outputs).renumber(none, (0,), (0,)), strict=True
        )
        return outputs, [
            jax.tree.map(lambda x: zeros_of(x, x.shape[1:]), value) if entry.is_kept else value
            for entry, value in pairs
        ]

    def step(self, held: list[Any], ys: Sequence[Any], place: jax.Array) -> tuple[Any, list[Any]]:
        """Add the step at a place of the window to what is held; return that, and its states."""
        outputs, new = self.state(ys)
        runs = self._runs(outputs)
        held = runs.add(held, runs.renumber(new, (1,), (place,)))
        return held, jax.tree.leaves(runs.total(held))

    def begin(self, outputs: tuple[Outputs, ...], none: list[Any]) -> list[Any]:
        """Return what is held before the first step of a window."""
        return self._runs(outputs).begin(none)

    def _runs(self, outputs: tuple[Outputs, ...]) -> RunStates:
        return RunStates(self.reductions, outputs, (max(self.windows.sizes, default=1),))

    def results(self, outputs: tuple[Outputs, ...], states: Any) -> Any:
        """Return the results of windows, whose states are on axis 0."""
        sizes = self.windows.sizes

        def finished(size: Any, states: Any, batch: int = 0) -> list[Any]:
            return RunStates(self.reductions, outputs, (size,)).finish(states, batch)

        if len(set(sizes)) <= 1:
            values = finished(max(sizes, default=1), states, 1)
        else:
            counts = jax.device_put(np.asarray(sizes, index_dtype(self.windows.steps)))
            values = jax.vmap(finished)(counts, states)
        return self.reductions.assembled(outputs, values)


def _scan_windows(
    loop: Loop, carry: Any, items: Any, windows: Windows, *, reduce: Any, checkpoint: bool
) -> tuple[Any, Any]:
    """Run the steps of all windows; return the tree of outputs, one for each window.

    One loop runs all steps up to the last kept one, so the program does not grow with the number of
    outputs. It carries the rows of the outputs. Each step *adds* to the row of its window: the
    output if the step is kept, otherwise zeros. The transpose of a sum only reads the cotangent.
    The transpose of a write would also clear the row, and XLA:CPU copies all rows in every step to
    do that.

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
    fold, outputs = None, ()
    empty, begin = [zeros_of(aval, aval.shape) for aval in avals], []
    if reduce is not None:
        reductions, site = reduce
        fold = _WindowFold(reductions, site, windows, tree)
        outputs, values = fold.start(avals)
        begin = fold.begin(outputs, values)
        empty, tree = jax.tree.flatten(values)
    rows = [widen(zeros_of(x, (count, *x.shape))) for x in empty]
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
            held, row = fold.step(held, ys, at - starts[window])
            row = [jnp.where(is_end, x, zeros_of(x, x.shape)) for x in row]
            held = jax.tree.map(lambda x, y: jnp.where(is_end, x, y), begin, held)
        rows = [_add(*both, window) for both in zip(rows, row, strict=True)]
        return (carry, held, rows, (at + 1, window + is_end.astype(dtype))), None

    if count:
        size = -(-windows.steps // count)
        state = carry, begin, rows, (scalar(0, dtype), scalar(0, dtype))
        stepping, inside = dataclasses.replace(loop, step=step), loop.cut(items, 0, windows.steps)
        sizes = (size,) if checkpoint else ()
        state, _ = scan_checkpointed(stepping, state, inside, windows.steps, sizes)
        carry, _, rows, _ = state
    carry = loop.skip(carry, items, windows.steps, loop.length, checkpoint=checkpoint)
    pairs = zip(rows, empty, strict=True)
    rows = [x if x.dtype == like.dtype else x.astype(like.dtype) for x, like in pairs]
    ys = tree.unflatten(rows)
    ys = fold.results(outputs, ys) if fold else ys
    order = jax.device_put(np.asarray(windows.of_output, dtype))
    return carry, jax.tree.map(lambda y: y[order], ys)


def _add(rows: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
    """Add to a row, which is zero; or replace it, where that has no transpose."""
    if not has_tangent(rows):
        return write_chunk(rows, lax.expand_dims(row, (0,)), at, 0)
    return rows.at[at].add(row.astype(rows.dtype), mode="promise_in_bounds")
