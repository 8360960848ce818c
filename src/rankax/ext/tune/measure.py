# SPDX-License-Identifier: MIT
"""``kernel.tune``: time sets of options on this machine, and choose the fastest.

Everything counts towards ``seconds``: tracing, compiling and running.

1. A few items show how long an item takes, and so how many items run in a small share of the time,
   because a run cannot be interrupted. This slice of the batch is what all candidates run.
2. Each candidate is compiled and run. The options that the kernel has come first, then plain
   `jax.vmap` unless a bound forbids it; these two are always measured. The others follow, the most
   promising first, if the time left is enough; the table lists the others as "not tried".
3. The candidates take turns; the slower half is dropped, and the rest take twice as many. The first
   two are never dropped.
4. They and the fastest candidate take turns once more, on all items if there is time. The options
   that the kernel has win a tie, and `jax.vmap` against others. If there was time for a few items
   only, so that a run tells how long a call takes, most are ties.

Programs are compiled with `jax.jit` whether or not the kernel has ``jit=True``, because that is how
a fast program runs it.

A tuned kernel is an object of its own, which shares its compiled programs with the kernel that
`with_options` returns for the same options. So its measurements are not seen by code that merely
asks for equal options.
"""

import dataclasses
import functools
import math
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rankax._options import Options
from rankax.call.kernels import bind
from rankax.core.base.messages import check_bool
from rankax.ext.memory.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax.ext.memory.limit import free_bytes
from rankax.ext.tune.table import NOT_TRIED, Candidate, Tuning, measured_for
from rankax.ext.tune.workload import RaggedWorkload, Workload

_FEW_ITEMS = 16  # of the first slice
_RUN = 1 / 60  # the share of the time that one run may take
_TRIED, _HALVED = 0.6, 0.8  # the shares of the time after which the second and third stage end
_COMPARISON = 0.15  # the share that the last stage may take in any case: some runs of a few
_TURNS = 4  # of each candidate before the slower half is dropped for the first time
_CALL = 2e-4  # seconds by which runs of a slice may differ because of what a call takes
_WORTH = 0.97  # what is chosen takes less than this share of the time of the first ones


def tuned(
    kernel: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    memory_limit: int | str | None,
    gradient: bool,
    seconds: Any,
) -> Tuning:
    """Measure the candidates for a decorated kernel; ``kernel.tune`` says what the others are."""
    begin = time.perf_counter()
    site, options = f"{kernel.spec.name}.tune", kernel.spec.options()
    explicit = checked_limit(memory_limit, site)
    check_bool(gradient, site, "gradient")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"{site}: seconds must be a positive number, got {seconds!r}")
    # The argument replaces the kernel's chunk size; the option memory_limit stands beside it.
    limit = limit_in_bytes(explicit or options.memory_limit or "100%", free_bytes)
    bound = options.most if explicit is None else None
    call = bind(kernel.spec, args, kwargs, takes_nodes=True)
    kind = RaggedWorkload if call.structure.nodes else Workload
    workload = kind(call, bound, gradient, site)
    search = _Search(workload, limit, begin, seconds)
    chosen = search.chosen()
    if chosen is None:
        least = min((t.temporaries for t in search.trials if t.temporaries is not None), default=0)
        raise ValueError(
            f"{site}: no chunk size keeps to the memory_limit of {shown_bytes(limit)}; the "
            f"smallest one tried needs {shown_bytes(least)} besides arguments and results"
        )
    candidates = tuple(
        Candidate(workload.changes(t.options), t.tile, t.seconds, t.temporaries, t.note)
        for t in search.trials
    )
    facts = measured_for(kernel, args, kwargs, gradient=gradient)
    return Tuning(facts, candidates, search.trials.index(chosen))


@dataclasses.dataclass(eq=False)
class _Trial:
    """A candidate, and what has been measured."""

    options: Options
    tile: int
    note: str = NOT_TRIED
    levels: Any = None  # of its plan, once it is tried
    temporaries: int | None = None
    items: int = 0  # of the slice that was run
    times: list[float] = dataclasses.field(default_factory=list)  # per item

    @property
    def seconds(self) -> Any:
        """The time per item. Not the shortest, which hides what memory costs a large step."""
        return statistics.median(self.times) if self.times else None

    @property
    def variant(self) -> Options:
        """What levels do not say: that includes how many lanes there are."""
        options = self.options
        return options.replace(chunk_size=None) if options.lockstep else options


class _Search:
    """The candidates for one workload, tried until time is up."""

    def __init__(self, workload: Workload, limit: int, begin: float, seconds: float) -> None:
        self.workload, self.limit = workload, limit
        self.begin, self.seconds = begin, seconds
        self.compile_seconds = 0.0  # of the last program
        self.program = functools.cache(self._compiled)
        self.trials = [_Trial(o, o.most or workload.items) for o in workload.candidates()]
        plain = workload.with_chunk(workload.bound)
        self.baselines = [t for i, t in enumerate(self.trials) if i == 0 or t.options == plain]
        self._choose_slice()
        for trial in tuple(self.trials):
            if trial in self.baselines or self._is_worth_trying(trial):
                self._try(trial)
        self._halve()

    def chosen(self) -> _Trial | None:
        """Return the fastest candidate that keeps to the limit; None if none does."""
        while measured := self._measured():
            alive = [t for t in measured if not t.note] or measured
            best = min(alive, key=lambda t: t.seconds)
            finalists = [t for t in alive if t is best or t in self.baselines]
            finalists = self._compared(finalists)
            if not finalists:
                continue
            shortest = min(t.seconds for t in finalists)
            tie = shortest + (_CALL / self.items if self.items < self.workload.items else 0)
            found = next(t for t in finalists if _WORTH * t.seconds <= tie)  # the first
            if self._fits(found, self.workload.items):
                if best is not found and best.times:
                    is_tie = _WORTH * found.seconds > best.seconds
                    best.note = "too few items to tell" if is_tie else "no faster in the end"
                return found
            found.times = []
        return None

    def _measured(self) -> list[_Trial]:
        return [t for t in self.trials if t.times]

    def _elapsed(self) -> float:
        """Return the share of the time that has passed."""
        return (time.perf_counter() - self.begin) / self.seconds

    def _compiled(self, options: Options, items: int) -> tuple[Any, Callable[[], Any]]:
        before = time.perf_counter()
        options = options.replace(chunk_size=self._chunk_size(options, items))
        compiled = self.workload.compiled(options, items)
        self.compile_seconds = time.perf_counter() - before
        return compiled

    def _chunk_size(self, options: Options, items: int) -> int | str | None:
        """Return the chunk size for so many items; if all have several chunks, a slice has two."""
        size = options.chunk_size
        if items == self.workload.items or not isinstance(size, int) or size < items:
            return size
        return max(1, items // 2)

    def _choose_slice(self) -> None:
        """Choose how many items are run: all, or as many as take a small share of the time."""
        self.items, self.few_seconds = 0, math.inf
        items: float = _FEW_ITEMS
        while self.items < self.workload.items:
            items = self.workload.rounded(int(items))
            compiled, run = self.program(self.trials[0].options, items)
            if self.items and compiled.memory_analysis().temp_size_in_bytes > free_bytes():
                break
            self.items, seconds = items, _timed(run, patience=_RUN * self.seconds)
            self.few_seconds = min(self.few_seconds, seconds)
            growth = _RUN * self.seconds / max(seconds, 1e-9)
            if growth < 4 or self._elapsed() + 2 * self.compile_seconds / self.seconds > 1:
                break  # there is no time to compile this and another program
            items *= growth

    def _try(self, trial: _Trial) -> None:
        """Compile a candidate and run it, unless it does what another one does."""
        levels, in_flight = self.workload.levels(trial.options)
        if any(t.levels == levels and t.variant == trial.variant for t in self.trials):
            self.trials.remove(trial)
            return
        trial.levels, trial.tile = levels, in_flight
        self._fits(trial, self.items, run=True)

    def _fits(self, trial: _Trial, items: int, *, run: bool = False) -> bool:
        """Compile a candidate, and run it if it keeps to the limit; a note says why not."""
        trial.note = ""
        try:
            compiled, call = self.program(trial.options, items)
            needed = compiled.memory_analysis().temp_size_in_bytes
            share = items / self.workload.items
            if share == 1:
                trial.temporaries = needed
            if needed > self.limit:
                trial.note = f"above the limit of {shown_bytes(self.limit)}"
            elif needed > share * self.limit and not self._fits(trial, self.workload.items):
                return False
            elif run:
                patience = (1 - self._elapsed()) / 2 * self.seconds
                trial.items, trial.times = items, [_timed(call, patience) / items]
        except jax.errors.JaxRuntimeError as error:
            trial.note = f"failed: {textwrap.shorten(str(error), 80)}"
        return not trial.note

    def _size(self, trial: _Trial) -> int:
        """Return how many items of a slice a candidate evaluates at once."""
        size = self._chunk_size(trial.options, self.items)
        return min(size if isinstance(size, int) else self.items, self.items)

    def _is_worth_trying(self, trial: _Trial) -> bool:
        """Whether a slice can tell a candidate from others, and enough time is left."""
        size, timed = self._size(trial), self._measured()
        if not timed:  # to keep to the limit
            return self._elapsed() < 1 or size < min(self._size(t) for t in self.trials if t.levels)
        key = size, trial.variant
        if self.items < self.workload.items and key in [(self._size(t), t.variant) for t in timed]:
            return False
        # A smaller step takes no longer than a larger one, or than a run of a few items.
        estimates = [t.seconds * self.items * max(4, min(t.tile, self.items) / size) for t in timed]
        fastest = min(t.seconds for t in timed)
        estimates.append(fastest * self.items + self.few_seconds * -(-self.items // size))
        cost = self.compile_seconds + 2 * min(estimates)
        return self._elapsed() + cost / self.seconds < _TRIED

    def _halve(self) -> None:
        """Drop the slower half, let the rest run twice as often, and so on until one is left."""
        first = [t for t in self.baselines if t.times]
        others, turns = [t for t in self._measured() if t not in first], _TURNS
        while len(others) > 1:
            self._take_turns([*first, *others], turns, (self._elapsed() + _HALVED) / 2)
            others.sort(key=lambda t: t.seconds)
            for trial in others[len(others) // 2 :]:
                trial.note = "given up early"
            others, turns = others[: len(others) // 2], 2 * turns

    def _compared(self, finalists: list[_Trial]) -> list[_Trial]:
        """Run the last few in turns, on all items if there is time; return those that did run."""
        whole = self.workload.items
        cost = sum(self.compile_seconds + 3 * whole * t.seconds for t in finalists)
        if self._elapsed() + cost / self.seconds < 1:
            self.items = whole
        for trial in finalists:
            if trial.items != self.items:
                trial.times = []
                self._fits(trial, self.items, run=True)
        # The memory that a slice needs does not say what all items need.
        compiling = self.compile_seconds / self.seconds * (self.items < whole)
        until = max(1 - compiling, self._elapsed() + _COMPARISON)
        finalists = [t for t in finalists if t.times]
        self._take_turns(finalists, 8 * _TURNS, until)
        return finalists

    def _take_turns(self, trials: Sequence[_Trial], turns: int, until: float) -> None:
        """Run candidates in turns, so that slow moments of the machine affect all.

        Each turn has another order: what ran before decides what is in the cache, and which memory
        has to be requested again, which may cost a candidate half as much again.
        """
        runs = [self.program(t.options, self.items)[1] for t in trials]
        turn = sum(t.seconds for t in trials) * self.items / self.seconds
        times, shuffled = list[list[float]](), random.Random(0)
        while len(times) < turns and self._elapsed() + turn < until:
            order = shuffled.sample(range(len(runs)), len(runs))
            taken = {i: _timed(runs[i]) / self.items for i in order}
            times.append([taken[i] for i in range(len(runs))])
        for trial, own in zip(trials, zip(*times, strict=True), strict=False):
            trial.times = list(own)


def _timed(run: Callable[[], Any], patience: float = 0) -> float:
    """Return the seconds of a run. If they are few, of a second one: a first may take longer."""
    begin = time.perf_counter()
    jax.block_until_ready(run())
    seconds = time.perf_counter() - begin
    return _timed(run) if seconds < patience else seconds
