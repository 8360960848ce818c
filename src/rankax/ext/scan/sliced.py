# SPDX-License-Identifier: MIT
"""``sliced_scan``: a scan that stores some of its outputs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax.core.base.arrays import has_tangent, index_dtype, scalar, zeros_of
from rankax.core.base.messages import check_bool, function_location
from rankax.core.loop.loop import widen, write_chunk
from rankax.core.plan.schedule import Chunks, Level
from rankax.core.reduce.run import Reductions, trace_reduced
from rankax.ext.progress import ProgressOption
from rankax.ext.reductions.read import read_reductions
from rankax.ext.runs import RunStates, reduce_row
from rankax.ext.scan.checkpointed import scan_checkpointed
from rankax.ext.scan.loops import Loop, Step, kept_steps, run_scan, scan_call

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
    progress: ProgressOption = False,
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
    progress : bool, str, callable or observer, default False
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
      negative, or if the slice leaves no room for the last block, as ``ys[::3]`` of 10 does; up
      to twice with ``reduce``, or with steps that do not form a range.
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
    kept = kept_steps(call, save_at, start=start, stop=stop, step=step)
    reductions = read_window_reductions(reduce, call.site)
    body = function_location(f)

    def schedule(loop: Loop, carry: Any, items: Any) -> tuple[Any, Any]:
        if reductions is not None:
            return _scan_windows(loop, carry, items, kept, reductions, body, checkpoint=checkpoint)
        scan = _scan_range if isinstance(kept, range) else _scan_any
        carry, ys = scan(loop, carry, items, kept, checkpoint=checkpoint)
        return carry, loop.y_tree.unflatten(ys)

    def of_all(ys: Any) -> Any:
        ys = jax.tree.map(lambda y: y[::-1], ys) if reverse else ys
        if reductions is None:
            return jax.tree.map(lambda y: y[np.asarray(kept, int)], ys)
        with jax.disable_jit(False):
            return sliced_scan(_echo, 0, ys, save_at=kept, reduce=reduce)[1]

    in_place = not (reductions is None and isinstance(kept, range) and len(kept) == call.length)
    is_ordered = reductions is not None and reductions.are_ordered
    key = None if is_ordered else (kept, reductions, reductions and body, checkpoint)
    return run_scan(call, lambda *_: (schedule, in_place, key), of_all)


def _echo(carry: Any, y: Any) -> tuple[Any, Any]:
    return carry, y


def find_chunks(length: int, kept: range) -> tuple[int, int, int, int]:
    """Divide a loop into chunks with one kept step each.

    After ``lead`` skipped steps come chunks of ``stride`` steps, in each of which the step after
    the first ``before`` is kept. The last chunk may be shorter. From ``end`` on, steps are skipped.

    The chunks begin as early as possible, so that they tile the loop if the stride divides its
    length and no chunk is left out.

    Parameters
    ----------
    length : int
    kept : range
        The kept steps, in any direction, counted in the order of execution.

    Returns
    -------
    lead, before, stride, end : int
    """
    if not kept:
        return length, 0, 1, length
    first = min(kept[0], kept[-1])
    stride = abs(kept.step) if len(kept) > 1 else 1
    before = min(first, stride - 1)
    lead = first - before
    return lead, before, stride, min(length, lead + len(kept) * stride)


def _scan_range(
    loop: Loop, carry: Any, items: Any, kept: Any, *, checkpoint: bool
) -> tuple[Any, list[Any]]:
    """Run the stretches and chunks of `find_chunks` in turn; only kept steps have outputs."""
    if (kept.step < 0) != loop.reverse:  # a scan in reverse stores its outputs in reverse
        carry, ys = _scan_range(loop, carry, items, kept[::-1], checkpoint=checkpoint)
        return carry, [lax.rev(y, (0,)) for y in ys]
    if len(kept) == loop.length and not checkpoint:
        return loop.run(carry, items, loop.length)
    lead, before, stride, end = find_chunks(loop.length, kept)

    def chunk(size: int) -> Step:
        def run(carry: Any, items: Any) -> tuple[Any, Any]:
            carry = loop.skip(carry, items, 0, before)
            at = loop.cut(items, before, before + 1)
            carry, y = loop.step(carry, jax.tree.map(lambda leaf: leaf[0], at))
            y = jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), y)
            return loop.skip(carry, items, before + 1, size), y

        return jax.checkpoint(run) if checkpoint else run

    carry = loop.skip(carry, items, 0, lead, checkpoint=checkpoint)
    inside = loop.cut(items, lead, end)
    carry, ys = loop.in_chunks(chunk, carry, inside, end - lead, stride)
    return loop.skip(carry, items, end, loop.length, checkpoint=checkpoint), ys


def _scan_any(
    loop: Loop, carry: Any, items: Any, kept: Any, *, checkpoint: bool
) -> tuple[Any, list[Any]]:
    """Keep steps at any distance from each other.

    One loop runs all steps up to the last kept one, so the program does not grow with the number of
    outputs. It carries the rows of the outputs. Each step *adds* to the row of the next kept step:
    the output if it is this one, otherwise zeros. The transpose of a sum only reads the cotangent.
    The transpose of a write would also clear the row, and XLA:CPU copies all rows in every step to
    do that.
    """
    ends, order = np.unique(np.asarray(kept, int), return_inverse=True)
    steps, dtype = int(max(ends, default=-1)) + 1, index_dtype(loop.length)
    empty = [zeros_of(aval, aval.shape) for aval in loop.y_avals]
    # After the last kept step comes one that is never reached.
    stops = jax.device_put(np.asarray([*ends, steps], dtype))

    def step(state: Any, x: Any) -> tuple[Any, None]:
        carry, rows, (at, row) = state
        is_kept = at == stops[row]
        choose = functools.partial(jnp.where, is_kept)
        if loop.restart is None:
            skip = lambda carry, x: (loop.step(carry, x)[0], empty)  # noqa: E731
            carry, ys = lax.cond(is_kept, loop.step, skip, carry, x)
        else:
            carry, ys = loop.step(carry, x)
            carry, ys = jax.tree.map(choose, (loop.restart(carry), ys), (carry, empty))
        rows = [_add(*both, row) for both in zip(rows, ys, strict=True)]
        return (carry, rows, (at + 1, row + is_kept.astype(dtype))), None

    rows = [widen(zeros_of(x, (len(ends), *x.shape))) for x in empty]
    if steps:
        state = carry, rows, (scalar(0, dtype), scalar(0, dtype))
        sizes = (-(-steps // len(ends)),) if checkpoint else ()
        stepping, inside = dataclasses.replace(loop, step=step), loop.cut(items, 0, steps)
        (carry, rows, _), _ = scan_checkpointed(stepping, state, inside, steps, sizes)
    pairs = zip(rows, empty, strict=True)
    rows = [x if x.dtype == like.dtype else x.astype(like.dtype) for x, like in pairs]
    carry = loop.skip(carry, items, steps, loop.length, checkpoint=checkpoint)
    if [*order] == [*range(len(ends))]:
        return carry, rows
    order = jax.device_put(np.asarray(order, dtype))
    return carry, [x[order] for x in rows]


def _add(rows: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
    """Add to a row, which is zero; or replace it, where that has no transpose."""
    if not has_tangent(rows):
        return write_chunk(rows, lax.expand_dims(row, (0,)), at, 0)
    return rows.at[at].add(row.astype(rows.dtype), mode="promise_in_bounds")


# Reductions of the steps between kept ones.


def read_window_reductions(value: Any, site: str) -> Reductions | None:
    """Read ``reduce``; None if it holds nothing but None and ``"last"``, which mean the same."""
    leaves, structure = jax.tree.flatten(value, is_leaf=lambda node: node is None)
    entries = [None if isinstance(leaf, str) and leaf == "last" else leaf for leaf in leaves]
    if all(entry is None for entry in entries):
        return None
    return read_reductions(structure.unflatten(entries), site)


def _scan_windows(
    loop: Loop,
    carry: Any,
    items: Any,
    kept: Sequence[int],
    reductions: Reductions,
    body: str,
    *,
    checkpoint: bool,
) -> tuple[Any, Any]:
    """Run all steps; return the tree of results, one for each window, which a kept step ends.

    A window is reduced like a row whose items are on several devices (`rankax.core.reduce.run`):
    each step is a run of one item, and its state is merged into what the loop carries, which begins
    anew after a kept step. ``body`` is the scan body, for errors.
    """
    ends, order = np.unique(np.asarray(kept, int), return_inverse=True)
    sizes, steps = np.diff(ends, prepend=-1), int(max(ends, default=-1)) + 1
    least, most = int(min(sizes, default=1)), int(max(sizes, default=1))
    unflatten = loop.y_tree.unflatten
    item = trace_reduced(lambda *ys: unflatten(ys), loop.y_avals, reductions, least, body)
    runs = RunStates(reductions, item.outputs, (most,))
    of_run = reductions.for_runs(least)

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        carry, held, place = state
        carry, ys = loop.step(carry, x)
        new = runs.renumber(reduce_row(item, ys, (), of_run), (1,), (place,))
        held = runs.add(held, new)
        return (carry, held, place + 1), jax.tree.leaves(runs.total(held))

    nothing = [zeros_of(aval, (0, *aval.shape)) for aval in loop.y_avals]
    level = Level(Chunks(0, 0, 1), (0,) * len(nothing), is_loop=False, reduced=True)
    none = runs.renumber(reduce_row(item, nothing, (level,), of_run), (0,), (0,))
    # An output that is not reduced is zero before there is one.
    none = [
        jax.tree.map(lambda x: zeros_of(x, x.shape[1:]), own) if entry.is_kept else own
        for entry, own in zip(reductions.entries, none, strict=True)
    ]
    begin = runs.begin(none), scalar(0, index_dtype(most))
    leaves, tree = jax.tree.flatten(none)
    folding = dataclasses.replace(
        loop,
        length=steps,
        y_avals=list(map(jax.typeof, leaves)),
        step=step,
        restart=lambda state: (state[0], *begin),
    )
    inside = loop.cut(items, 0, steps)
    state, states = _scan_any(folding, (carry, *begin), inside, kept, checkpoint=checkpoint)
    carry = loop.skip(state[0], items, steps, loop.length, checkpoint=checkpoint)
    counts = jax.device_put(np.asarray(sizes[order], index_dtype(steps)))
    values = jax.vmap(lambda size, own: RunStates(reductions, item.outputs, (size,)).finish(own))(
        counts, tree.unflatten(states)
    )
    return carry, reductions.assembled(item.outputs, values)
