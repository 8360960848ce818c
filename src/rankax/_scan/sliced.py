# SPDX-License-Identifier: MIT
"""``sliced_scan``: a scan that stores some of its outputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax._base.functions import function_location
from rankax._scan.body import kept_indices, scan_call
from rankax._scan.loops import Loop, run_scan
from rankax._scan.windows import find_windows, read_window_reductions, scan_windows

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

    except that the other ``ys`` are never stored. What only they need is not computed either, as
    far as the compiler can tell. With ``reduce``, equivalent to (for ``"mean"``) ::

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
        keeping its last one: ``"mean"``, ``"max"``, ``"sum"`` or another name that
        `chunked_reduce` knows, or an object from `rankax.reductions`. ``"last"`` and None keep the
        output of the kept step. The window of a kept step begins after the step that was kept
        before it, in the order of execution, or with the first step. Indices, as of ``"argmax"``,
        count from there. Steps after the last kept one belong to no window.
    checkpoint : bool, default False
        Let the reverse pass store one carry per kept step, and recompute the stretch from one to
        the next. With ``reduce``, or steps that are no range: recompute as many stretches of one
        length.
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
        An argument has the wrong type, or ``save_at`` comes with a slice.
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
      or twice with ``reduce``, or with steps that are no range.
    * In a derivative, ``xs`` is copied at most once, and not at all if the kept steps divide it
      evenly.
    * In the reverse pass, what ``f`` needs to be differentiated, for ``n`` steps. With
      ``checkpoint``: ``k`` carries, and what ``f`` needs for the longest stretch without a kept
      step. With steps that are no range, a gradient without ``checkpoint`` may store twice what
      ``f`` needs, as a `jax.lax.cond` does.

    *Time.* That of `jax.lax.scan`; with ``checkpoint``, one more evaluation of each step in the
    reverse pass.

    *Derivatives.* With ``reduce``, as those of `chunked_reduce`: of equal items, the first has the
    whole derivative of ``"max"``. A step that is left out by ``Sum(where="ok")`` gets a cotangent
    of 0, but it was run, so an infinite derivative of its output by the carry still gives NaN.

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
    kept = kept_indices(call.site, call.length, save_at, start=start, stop=stop, step=step)
    reductions = read_window_reductions(reduce, call.site)
    even = kept if isinstance(kept, range) else as_range(kept)
    if even is not None and reductions is None:
        blocks = find_kept_steps(call.length, even, reverse=reverse)

        def schedule(loop: Loop, carry: Any, items: Any) -> tuple[Any, Any]:
            carry, ys = _scan_kept(loop, carry, items, blocks, checkpoint=checkpoint)
            ys = loop.y_tree.unflatten(ys)
            return carry, jax.tree.map(lambda y: lax.rev(y, (0,)), ys) if even.step < 0 else ys

        in_place = not blocks.all
        key = blocks, even.step < 0, checkpoint
    else:
        windows = find_windows(call.length, kept, reverse=reverse)
        fold = None if reductions is None else (reductions, function_location(f))
        schedule = functools.partial(
            scan_windows, windows=windows, reduce=fold, checkpoint=checkpoint
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


@dataclasses.dataclass(frozen=True)
class KeptSteps:
    """The kept steps of a loop, in the order of execution.

    First come ``lead`` skipped steps. Then come ``blocks`` blocks, each of ``before`` skipped
    steps, a kept one and ``after`` skipped ones. If ``partial``, another block follows that ends
    with its kept step. Last come ``trail`` skipped steps.
    """

    lead: int
    blocks: int
    before: int
    after: int
    partial: bool
    trail: int

    @property
    def stride(self) -> int:
        """Steps in one block."""
        return self.before + 1 + self.after

    @property
    def all(self) -> bool:
        """Whether no step is skipped."""
        return not self.lead and self.stride == 1 and not self.trail


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
        return KeptSteps(length, 0, 0, 0, False, 0)
    first = length - 1 - kept[-1] if reverse else kept[0]
    stride = kept.step if len(kept) > 1 else 1
    before = min(first, stride - 1)
    lead = first - before
    blocks = min(len(kept), (length - lead) // stride)
    partial = blocks < len(kept)
    trail = length - lead - blocks * stride - (before + 1 if partial else 0)
    return KeptSteps(lead, blocks, before, stride - 1 - before, partial, trail)


def _echo(carry: Any, y: Any) -> tuple[Any, Any]:
    return carry, y


def _scan_kept(
    loop: Loop, carry: Any, items: Any, kept: KeptSteps, *, checkpoint: bool
) -> tuple[Any, Any]:
    """Run the stretches and blocks of `KeptSteps` in turn; only kept steps have outputs."""
    if kept.all and not checkpoint:
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
    return loop.skip(carry, items, at, at + kept.trail, checkpoint=checkpoint), ys
