# SPDX-License-Identifier: MIT
"""``kernel.tune``: time sets of options on this machine, and choose the fastest.

Everything counts towards ``seconds``: tracing, compiling and running. The options that the kernel
has come first, then plain `jax.vmap` unless a bound forbids it; these two are always measured. The
other candidates follow, the most promising first: a few sizes far apart, then those closest to the
fastest so far. Each is tried only if the time left is enough to compile it and to run it twice; the
table lists the others as "not tried". In the time that remains, the fastest candidates are run in
turns.

A run cannot be interrupted, so it has to be short. A few items are timed first; they tell how many
items run in a small share of the time, and this slice is what all candidates run. If it is less
than the whole batch, the winner is compared with the first two on all items, if time is left.

A tuned kernel is an object of its own, which shares its compiled programs with the kernel that
`with_options` returns for the same options. So its measurements are not seen by code that merely
asks for equal options.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from rankax._base.checks import check_bool
from rankax._call.arguments import KernelSpec
from rankax._call.run import plan_of
from rankax._fit.memory import free_bytes
from rankax._options import Options
from rankax._plan.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax._plan.levels import Level
from rankax._tune.table import Candidate, Tuning, measured_for
from rankax._tune.workload import Workload

_ORDER = (256, 16, 4096, 64, 4, 1024, 1)  # chunk sizes, the most promising first
_FEW_ITEMS = (16, 1024)  # of the slices that show how long an item takes
_RELIABLE = 0.01  # seconds, from which on the time of a run is reliable
_RUN = 1 / 60  # the share of the time that one run may take
_PROBES = 1 / 4  # after this share of the time, a second slice is not compiled
_TRIALS = 0.7  # the share of the time in which candidates are tried, before those run in turns
_COMPARISON = 0.4  # the largest share of the time for a comparison on all items, after the slice
_MOST_RUNS = 32  # of a candidate in a round
_WORTH = 0.97  # a candidate must take less than this share of the time of those before it


def tuned(
    kernel: KernelSpec,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    memory_limit: int | str | None,
    gradient: bool,
    seconds: Any,
) -> Tuning:
    """Measure the candidates.

    Parameters
    ----------
    kernel : KernelSpec
    fun : callable
        The decorated kernel.
    memory_limit, gradient, seconds
        As ``kernel.tune`` takes them.
    """
    begin = time.perf_counter()
    where = f"{kernel.name}.tune"
    explicit = checked_limit(memory_limit, where)
    limit = explicit or kernel.options().memory_limit
    limit = None if limit is None else limit_in_bytes(limit, free_bytes)
    check_bool(gradient, where, "gradient")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"{where}: seconds must be a positive number, got {seconds!r}")
    # The argument replaces the kernel's chunk size; the option memory_limit stands beside it.
    bound = kernel.options().chunk_size if explicit is None else None
    workload = Workload(kernel, args, kwargs, bound, gradient, where)
    search = _Search(workload, limit, begin, seconds)
    winner = search.winner()
    if winner is None:
        least = min(t.temporaries for t in search.trials if t.temporaries is not None)
        raise ValueError(
            f"{where}: no chunk size keeps to the memory_limit of {shown_bytes(limit or 0)}; the "
            f"smallest one tried needs {shown_bytes(least)} besides arguments and results"
        )
    candidates: list[Candidate] = []
    for trial in search.trials:
        seconds = trial.shortest / search.items if trial.times else None
        changes = workload.changes(trial.options)
        candidates.append(Candidate(changes, trial.tile, seconds, trial.temporaries, trial.note))
    facts = measured_for(fun, args, kwargs, gradient=gradient)
    return Tuning(facts, tuple(candidates), search.trials.index(winner))


@dataclasses.dataclass(eq=False)
class _Trial:
    """A candidate, and what has been measured."""

    options: Options
    tile: int
    note: str = "not tried"
    levels: tuple[Level, ...] | None = None  # of its plan, once it is tried
    temporaries: int | None = None
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def shortest(self) -> float:
        """The shortest time: other work of the machine can only add to a time."""
        return min(self.times, default=math.inf)

    @property
    def variant(self) -> tuple[Any, ...]:
        options = self.options
        lanes = None if options.lockstep else options.chunk_size  # which levels do not say
        return options.compiler_options, options.checkpoint, options.devices, lanes


class _Search:
    """The candidates for one workload, tried until time is up."""

    def __init__(self, workload: Workload, limit: int | None, begin: float, seconds: float) -> None:
        self.workload, self.limit = workload, limit
        self.begin, self.seconds = begin, seconds
        self.program = functools.cache(workload.compiled)
        self.trials = [
            _Trial(o, min(o.chunk_size or workload.items, workload.items))
            for o in workload.candidates()
        ]
        self.default = self.trials[0]
        self._choose_slice()
        for trial in self.baselines:
            if trial is self.default or self._is_distinct(trial):
                self._try(trial)
        cost = self._cost_on_all_items(1 + len(self.baselines), self.default)
        self.until = 1 - cost if self.is_slice and cost < _COMPARISON else 1.0
        others = [t for t in self.trials if t not in self.baselines]
        for trial in sorted(others, key=self._promise):
            if self._is_worth_trying(trial):
                self._try(trial)
        self._halve()

    @property
    def baselines(self) -> list[_Trial]:
        """The options that the kernel has, and `jax.vmap` unless a bound forbids it."""
        plain = self.workload.with_chunk(None) if self.workload.bound is None else None
        return [t for t in self.trials if t is self.default or t.options == plain]

    @property
    def is_slice(self) -> bool:
        return self.items < self.workload.items

    def winner(self) -> _Trial | None:
        """Return the first candidate that is hardly slower than the fastest; None without any."""
        timed = [t for t in self.trials if t.times]
        fastest = min((t.shortest for t in timed), default=0.0)
        best = next((t for t in timed if fastest > _WORTH * t.shortest), None)
        return self._compared_on_all_items(best) if best and self.is_slice else best

    def _elapsed(self) -> float:
        """Return the share of the time that has passed."""
        return (time.perf_counter() - self.begin) / self.seconds

    def _time(self, run: Callable[[], Any], until: float) -> float:
        """Return the shortest of up to three times, because a first run may take longer."""
        times = [_timed(run)]
        while len(times) < 3 and self._elapsed() + times[-1] / self.seconds < until:
            times.append(_timed(run))
        return min(times)

    def _size(self, trial: _Trial) -> int:
        """Return the chunk size of a candidate in a slice."""
        return min(trial.options.chunk_size or self.items, self.items)

    def _choose_slice(self) -> None:
        """Choose how many items are run: all, or as many as take a small share of the time."""
        self.few_seconds = seconds = math.inf
        for few in _FEW_ITEMS:
            before = time.perf_counter()
            self.items = self.workload.rounded(few)
            _, run = self.program(self.default.options, self.items)
            self.compile_seconds = time.perf_counter() - before
            seconds = self._time(run, _PROBES)
            self.few_seconds = min(self.few_seconds, seconds)
            if not self.is_slice or seconds > _RELIABLE or self._elapsed() > _PROBES:
                break
        affordable = _RUN * self.seconds * self.items / max(seconds, 1e-9)
        # If the last slice is about as long, it will do.
        if self._elapsed() < 1 and not self.items / 2 < affordable < self.items:
            self.items = self.workload.rounded(max(int(affordable), _FEW_ITEMS[0]))

    def _try(self, trial: _Trial) -> None:
        """Compile a candidate and run it, unless it exceeds the limit or does what another does."""
        before, compiled = time.perf_counter(), self.program.cache_info().misses
        plan = plan_of(self.workload.call, trial.options)
        if any(t.levels == plan.levels and t.variant == trial.variant for t in self.trials):
            self.trials.remove(trial)
            return
        trial.levels, trial.tile, trial.note = plan.levels, plan.in_flight, ""
        if (self.limit is not None or not self.is_slice) and not self._is_within_limit(trial):
            return
        _, run = self.program(trial.options, self.items)
        if self.program.cache_info().misses > compiled:
            self.compile_seconds = time.perf_counter() - before
        trial.times = [self._time(run, 1)]

    def _is_within_limit(self, trial: _Trial) -> bool:
        """Compile a candidate for all items, and note how much memory it needs."""
        whole, _ = self.program(trial.options, self.workload.items)
        trial.temporaries = needed = whole.memory_analysis().temp_size_in_bytes
        if self.limit is None or needed <= self.limit:
            return True
        trial.note = f"above the limit of {shown_bytes(self.limit)}"
        return False

    def _promise(self, trial: _Trial) -> float:
        """Return a key that puts the most promising candidate first."""
        size = trial.options.chunk_size
        if size is None or not trial.options.lockstep:  # by other means
            return 0.5
        is_variant = trial.variant[:2] != self.default.variant[:2]  # but other devices
        place = _ORDER.index(size) if size in _ORDER else len(_ORDER)
        return place + len(_ORDER) * is_variant

    def _is_worth_trying(self, trial: _Trial) -> bool:
        if any(t.times for t in self.trials):
            return self._is_distinct(trial) and self._is_affordable(trial)
        tried = [self._size(t) for t in self.trials if t.levels]
        return self._elapsed() < 1 or self._size(trial) < min(tried)  # to keep to the limit

    def _is_distinct(self, trial: _Trial) -> bool:
        """Whether the slice, which may fit into one chunk, can tell a candidate from others."""
        key = self._size(trial), trial.variant
        return not self.is_slice or all(
            key != (self._size(t), t.variant) for t in self.trials if t.times
        )

    def _is_affordable(self, trial: _Trial) -> bool:
        """Whether the time left is enough to compile a candidate and to run it twice."""
        size = self._size(trial)
        tried = [(min(t.tile, self.items), t.shortest) for t in self.trials if t.times]
        # A smaller step takes no longer than a larger one, or than a run of a few items.
        estimates = [seconds * max(4, n / size) for n, seconds in tried]
        steps = -(-self.items // size)
        estimates.append(min(seconds for _, seconds in tried) + self.few_seconds * steps)
        cost = self.compile_seconds + 2 * min(estimates)
        return self._elapsed() + cost / self.seconds < _TRIALS * self.until

    def _halve(self) -> None:
        """Time the faster half twice as often, again and again; the default is never dropped.

        Candidates take turns, so that slow moments of the machine affect all.
        """
        alive, runs = [t for t in self.trials if t.times], 1
        while len(alive) > 1 and runs <= _MOST_RUNS:
            for trial in alive * runs:
                if self._elapsed() + trial.shortest / self.seconds > self.until:
                    return
                _, run = self.program(trial.options, self.items)
                trial.times.append(_timed(run))
            faster = sorted(alive, key=lambda t: t.shortest)[: len(alive) // 2]
            for trial in set(alive).difference(faster, [self.default]):
                trial.note = "given up early"
                alive.remove(trial)
            runs *= 2

    def _cost_on_all_items(self, count: int, like: _Trial) -> float:
        """Return the share of the time that it takes to compare ``count`` candidates."""
        run = like.shortest * self.workload.items / self.items
        return count * (self.compile_seconds + 2 * run) / self.seconds

    def _compared_on_all_items(self, best: _Trial) -> _Trial:
        """Return the faster of a candidate and the baselines on all items, if time is left."""
        finalists = [t for t in dict.fromkeys([*self.baselines, best]) if not t.levels or t.times]
        cost = self._cost_on_all_items(len(finalists), best)
        if len(finalists) < 2 or self._elapsed() + cost > 1:
            return best
        times: dict[_Trial, float] = {}
        for trial in filter(self._is_within_limit, finalists):
            _, run = self.program(trial.options, self.workload.items)
            times[trial] = min(_timed(run), _timed(run))
            if not trial.times:
                trial.times = [times[trial] * self.items / self.workload.items]
                trial.note = ""
        fastest = next(t for t, s in times.items() if min(times.values()) > _WORTH * s)
        if fastest is not best:
            best.note = "slower on all items"
        return fastest


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin
