# SPDX-License-Identifier: MIT
"""``kernel.tune``: time sets of options on this machine, and take the best."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core

from rankax._base.arrays import is_staged
from rankax._base.checks import check_bool
from rankax._call.arguments import check_method, is_array
from rankax._call.bind import BoundKernel, bind, rebind
from rankax._call.kernel import Kernel
from rankax._call.run import plan_of, run
from rankax._fit.cpu import NO_LIBRARY, tiles_matter
from rankax._fit.memory import free_bytes
from rankax._options import Options
from rankax._plan.batch import BatchPlan
from rankax._plan.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax._tune.table import Candidate, Tuning, measured_for

__all__ = ["tuned"]

_SIZES = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 16384)  # of chunks
_SIZES_ALONE = (16, 256)  # of chunks without the library, beside all items at once
_SIZES_STORED = (256, 1024, 4096)  # of chunks whose intermediates a gradient stores
_FEW_ITEMS, _SOME_ITEMS = 16, 1024  # of the slices that tell how long an item takes
_LONG = 0.01  # seconds, for which few items are enough to tell
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 50
_GIVE_UP = (
    4.0,
    2.0,
    2.0,
    1.5,
)  # times the best, after so many rounds; the first one does not count
_WORTH = 0.97  # of the time with the options as they are, or with a smaller chunk, or these stay


class _Measured(NamedTuple):
    """One candidate: its options, the plan, and the compiled programs."""

    options: Options
    plan: BatchPlan
    temporaries: int
    run: Callable[[], Any] | None  # on the slice; None where it exceeds the limit


def tuned(
    kernel: Kernel,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    memory_limit: int | str | None,
    gradient: bool,
    seconds: Any,
) -> Tuning:
    """Measure, and say what was found.

    Parameters
    ----------
    kernel : Kernel
    fun : callable
        The decorated kernel.
    memory_limit, gradient, seconds
        As ``kernel.tune`` takes them.
    """
    where = f"{kernel.name}.tune"
    check_method(kernel, "tune", args, kwargs)
    given = checked_limit(memory_limit, where)
    limit = given or kernel.options().memory_limit
    limit = None if limit is None else limit_in_bytes(limit, free_bytes)
    check_bool(gradient, where, "gradient")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"{where}: seconds must be a positive number, got {seconds!r}")
    call = bind(kernel, args, kwargs)
    if is_staged() or any(
        isinstance(x, core.Tracer) for x in [*call.leaves, *jax.tree.leaves(_others(call))]
    ):
        raise TypeError(
            f"{where}: it runs the kernel to time it, so it cannot be called inside jax.jit, "
            "jax.vmap, jax.grad or a scan; call it before, and use the kernel that it returns"
        )
    # A limit that is given takes the place of the kernel's chunk size; its own stands beside it.
    bound = kernel.options().chunk_size if given is None else None
    measure = _Measure(kernel, call, bound, gradient=gradient, where=where)
    programs = measure.programs(limit, seconds)
    times = _in_turns([p.run for p in programs], seconds)
    candidates = [
        Candidate(
            _as_given(p.options, kernel.options()),
            p.plan.in_flight,
            min(found) / measure.items if found else None,
            p.temporaries,
            _note(p, found, max(map(len, times)), limit),
        )
        for p, found in zip(programs, times, strict=True)
    ]
    facts = measured_for(fun, args, kwargs, gradient=gradient)
    return Tuning(facts, tuple(candidates), _best(candidates, where, limit))


def _note(program: _Measured, times: Sequence[float], rounds: int, limit: int | None) -> str:
    if program.run is None:
        return f"above the limit of {shown_bytes(limit or 0)}"
    return "given up early" if len(times) < rounds else ""


def _best(candidates: Sequence[Candidate], where: str, limit: int | None) -> int:
    """Return the position of the first that is hardly slower than the fastest."""
    timed = [(c.seconds, i) for i, c in enumerate(candidates) if c.seconds is not None]
    if not timed:
        least = min(c.temporaries for c in candidates)
        raise ValueError(
            f"{where}: no chunk size keeps to the memory_limit of {shown_bytes(limit or 0)}; the "
            f"least that was found needs {shown_bytes(least)} besides arguments and results"
        )
    fastest, _ = min(timed)
    return next(i for seconds, i in timed if fastest > _WORTH * seconds)


def _as_given(options: Options, own: Options) -> dict[str, Any]:
    """Return what differs by candidate, as `with_options` takes it."""
    given: dict[str, Any] = {"chunk_size": options.chunk_size}
    if options.checkpoint != own.checkpoint:
        given["checkpoint"] = options.checkpoint
    if options.compiler_options != own.compiler_options:
        given["compiler_options"] = dict(options.compiler_options or ())
    return given


def _others(call: BoundKernel) -> dict[str, Any]:
    """Return the arguments without a rank."""
    return {name: v for name, v in call.arguments.arguments.items() if name not in call.names}


class _Measure:
    """The programs of one kernel for arguments like these, and the slice that they are run on."""

    def __init__(
        self, kernel: Kernel, call: BoundKernel, bound: int | None, *, gradient: bool, where: str
    ) -> None:
        self.kernel, self.call, self.bound, self.gradient = kernel, call, bound, gradient
        self.own = dataclasses.replace(kernel.options(), memory_limit=None)
        self.others, self.others_tree = jax.tree.flatten(_others(call))
        ranks = call.structure.ranks
        self.traced = [
            i
            for i, leaf in enumerate([*call.leaves, *self.others])
            if (i < len(ranks) and ranks[i] is not None) or (kernel.preset.jit and is_array(leaf))
        ]
        self.floating = [
            i for i, rank in enumerate(ranks) if rank is not None and _is_floating(call.leaves[i])
        ]
        self.batch = call.plan(self.with_(None)).plan.batch_shape
        self.items = math.prod(self.batch)
        if not self.items or not self.batch:
            what = "no batch axes" if not self.batch else "an empty batch"
            raise ValueError(
                f"{where}: there is nothing to tune, for the arguments have {what}; pass arguments "
                "as large as those of the calls that are to be fast"
            )
        if gradient and not self.floating:
            raise TypeError(
                f"{where}: gradient=True, but no argument with a rank holds floating numbers"
            )

    def programs(self, limit: int | None, seconds: float) -> list[_Measured]:
        """Compile every candidate for all items, and for a slice that is run in the time given."""
        chosen = self.candidates()
        leaves = self.slice_for(chosen[0], seconds / (len(chosen) * 2 * _FEWEST_ROUNDS))
        programs: list[_Measured] = []
        for options in chosen:
            plan = plan_of(self.call, options)
            whole = self.compiled(options, self.call.leaves)
            bytes_needed = whole.memory_analysis().temp_size_in_bytes
            run = None
            if limit is None or bytes_needed <= limit:
                run = self.runner(options, leaves, whole)
            programs.append(_Measured(options, plan, bytes_needed, run))
        return programs

    def candidates(self) -> list[Options]:
        """Return the options as they are, then others; of those that do the same, one."""
        bound = self.bound
        most = min(bound or self.items, self.items - 1)
        sizes = [self.own.chunk_size, *(n for n in _SIZES if n <= most), bound]
        found: dict[Any, Options] = {}
        for options in [self.with_(size) for size in sizes]:
            plan = plan_of(self.call, options)
            found.setdefault((plan.levels, options.compiler_options), options)
        if self.own.jit and tiles_matter(dict(self.own.compiler_options or ())):
            for size in dict.fromkeys([bound, *(n for n in _SIZES_ALONE if n <= most)]):
                found[size] = self.with_(size, **{NO_LIBRARY: ""})
        # What chunks store grows with the batch, so not for someone who bounds chunks, not memory.
        if self.gradient and self.own.checkpoint and bound is None:
            for size in (n for n in _SIZES_STORED if n <= most):
                found["stored", size] = dataclasses.replace(self.with_(size), checkpoint=False)
        return list(found.values())

    def with_(self, chunk_size: int | None, **compiler: str) -> Options:
        options = dataclasses.replace(self.own, chunk_size=chunk_size)
        if not compiler:
            return options
        both = {**dict(self.own.compiler_options or ()), **compiler}
        return dataclasses.replace(options, compiler_options=tuple(sorted(both.items())))

    def slice_for(self, options: Options, seconds: float) -> list[Any]:
        """Return leaves with the first part of the longest batch axis, that take so long."""
        found = 0.0
        for items in (_FEW_ITEMS, _SOME_ITEMS):
            run = self.runner(options, self.sliced(items), None)
            found = min(_timed(run) for _ in range(_FEWEST_ROUNDS))
            if found > _LONG:
                break
        return self.sliced(max(_FEW_ITEMS, int(seconds * self.items / found)))

    def sliced(self, items: int) -> list[Any]:
        """Return leaves with about so many items, and count them."""
        length = max(self.batch)
        axis = self.batch.index(length) - len(self.batch)
        others = math.prod(self.batch) // length
        part = min(length, -(-items // others))
        self.items = part * others
        return [
            _first(leaf, rank.rank, axis, length, part) if rank is not None else leaf
            for leaf, rank in zip(self.call.leaves, self.call.structure.ranks, strict=True)
        ]

    def runner(self, options: Options, leaves: Sequence[Any], whole: Any) -> Callable[[], Any]:
        is_whole = all(a is b for a, b in zip(leaves, self.call.leaves, strict=True))
        compiled = whole if is_whole and whole is not None else self.compiled(options, leaves)
        arrays = self.inputs(leaves)
        return lambda: compiled(*arrays)

    # The program. It takes a number for the cotangents, lest they are constants, and all arrays.

    def inputs(self, leaves: Sequence[Any]) -> list[Any]:
        values = [*leaves, *self.others]
        return [jnp.float32(1), *(values[i] for i in self.traced)]

    def compiled(self, options: Options, leaves: Sequence[Any]) -> Any:
        compiler = None if options.compiler_options is None else dict(options.compiler_options)

        def program(scale: Any, *arrays: Any) -> Any:
            values = [*leaves, *self.others]
            for i, x in zip(self.traced, arrays, strict=True):
                values[i] = x
            return (
                self.gradients(options, scale, values)
                if self.gradient
                else self.run(options, values)
            )

        inputs = self.inputs(leaves)
        return jax.jit(program, compiler_options=compiler).lower(*inputs).compile()

    def run(self, options: Options, values: Sequence[Any]) -> Any:
        count = len(self.call.leaves)
        others = self.others_tree.unflatten(values[count:])
        leaves = list(values[:count])
        return run(rebind(self.kernel, self.call.names, leaves, self.call.treedef, others), options)

    def gradients(self, options: Options, scale: Any, values: Sequence[Any]) -> Any:
        def value(floats: Sequence[Any]) -> Any:
            full = list(values)
            for i, x in zip(self.floating, floats, strict=True):
                full[i] = x
            outs = [x for x in jax.tree.leaves(self.run(options, full)) if _is_floating(x)]
            return sum((jnp.sum(x).astype(scale.dtype) * scale for x in outs), scale * 0)

        return jax.value_and_grad(value)([values[i] for i in self.floating])


def _is_floating(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return jnp.issubdtype(jnp.result_type(leaf) if dtype is None else dtype, jnp.floating)


def _first(leaf: Any, rank: int, axis: int, length: int, part: int) -> Any:
    """Return the first items of a leaf along a batch axis, counted from the last; if it has it."""
    batch = jnp.shape(leaf)[: jnp.ndim(leaf) - rank]
    if part == length or -axis > len(batch) or batch[axis] != length:
        return leaf
    return leaf[(slice(None),) * (len(batch) + axis) + (slice(part),)]


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def _in_turns(runs: Sequence[Callable[[], Any] | None], seconds: float) -> list[list[float]]:
    """Time each in turns, so that a slow moment of the machine falls on all; drop clear losers."""
    times: list[list[float]] = [[] for _ in runs]
    alive = {i: run for i, run in enumerate(runs) if run is not None}
    deadline = time.perf_counter() + seconds
    for turn in range(_MOST_ROUNDS + 1):
        if not alive or (turn > _FEWEST_ROUNDS and time.perf_counter() > deadline):
            break
        for i, timed in alive.items():
            if turn == 1:
                times[i].clear()
            if turn == 0:  # warms up
                timed()
            times[i].append(_timed(timed))
        # The shortest: what else a machine does can only add to a time.
        shortest = {i: min(times[i]) for i in alive}
        most = _GIVE_UP[min(turn, len(_GIVE_UP) - 1)] * min(shortest.values())
        alive = {i: run for i, run in alive.items() if shortest[i] <= most}
    return times
