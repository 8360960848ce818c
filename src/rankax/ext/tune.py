# SPDX-License-Identifier: MIT
"""``kernel.tune``: time a few sets of options on this machine, and choose the fastest.

Each candidate is compiled with `jax.jit`, whether or not the kernel has ``jit=True``, because that
is how a fast program runs it, and is run once. Those that were not slow then take turns until the
time is up, to which everything counts.

A tuned kernel is an object of its own, which shares its compiled programs with the kernel that
`with_options` returns for the same options. So its measurements are not seen by code that merely
asks for equal options.
"""

import dataclasses
import itertools
import math
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from rankax.call.kernels import KernelCall, bind, is_array
from rankax.core.base.arrays import has_tangent, is_staged
from rankax.core.base.messages import check_bool, table
from rankax.core.protocols import NO_RULES
from rankax.ext.bucket import filled, filling_of
from rankax.ext.memory.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax.ext.memory.limit import free_bytes
from rankax.ext.xla_cpu.library import IS_TUNED, OPTION, PRODUCTS_ONLY

_SIZES = (4096, 256, 64, 16, 4, 1)
_TRYING = 0.7  # the share of the time in which candidates are tried; the rest is for turns
_STEP = 1e-4  # seconds that a step may take besides its work, while nothing is known
_SLOW = 2  # times as slow as the fastest: not worth a turn
_WORTH = 0.97  # what is chosen takes less than this share of the time of the first ones
_TURNS = 32
_NOT_TRIED = "not tried"


@dataclasses.dataclass
class Candidate:
    """One set of options, and its measurements.

    Attributes
    ----------
    options : dict
        For ``with_options``.
    tile : int
        The number of items evaluated at once.
    seconds : float or None
        The measured time per item: the median of its runs; None if it was not run.
    temporaries : int or None
        The bytes that the call needs besides arguments and results, as compiled; None if it was not
        compiled.
    note : str
        Why it was not run or failed; ``"not tried"`` if time ran out.
    """

    options: dict[str, Any]
    tile: int
    seconds: float | None = None
    temporaries: int | None = None
    note: str = _NOT_TRIED


@dataclasses.dataclass(frozen=True, repr=False)
class Tuning:
    """The result of ``kernel.tune(...)``, which ``print(kernel.tuning)`` shows as a table.

    Attributes
    ----------
    measured_for : str
        The kernel, the types of its arguments, the device and the version of JAX.
    candidates : tuple of Candidate
        The first has the options that the kernel had.
    chosen : int
        The position of the fastest candidate.
    """

    measured_for: str
    candidates: tuple[Candidate, ...]
    chosen: int

    @property
    def options(self) -> dict[str, Any]:
        """The chosen options, for ``kernel.with_options(**kernel.tuning.options)``."""
        return dict(self.candidates[self.chosen].options)

    def __repr__(self) -> str:
        left = sum(candidate.note == _NOT_TRIED for candidate in self.candidates)
        more = f"; {left} not tried, for which pass more seconds=" if left else ""
        header = "items at once", "options", "time per item", "temporaries", ""
        rows = [
            (
                str(c.tile),
                ", ".join(f"{name}={value!r}" for name, value in c.options.items()),
                "-" if c.seconds is None else _shown_time(c.seconds),
                "-" if c.temporaries is None else shown_bytes(c.temporaries),
                c.note,
            )
            for c in self.candidates
        ]
        return f"{self.measured_for}{more}\n{table(header, rows, {self.chosen})}"


def _shown_time(seconds: float) -> str:
    units = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")]
    size, unit = next((u for u in units if seconds >= u[0]), (1e-9, "ns"))
    return f"{seconds / size:.3g} {unit}"


def tune(
    kernel: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    memory_limit: int | str | None,
    gradient: bool,
    seconds: Any,
) -> Tuning:
    """Measure the candidates for a decorated kernel; see ``kernel.tune``."""
    begin = time.perf_counter()
    site, options = f"{kernel.spec.name}.tune", kernel.spec.options()
    explicit = checked_limit(memory_limit, site)
    check_bool(gradient, site, "gradient")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ValueError(f"{site}: seconds must be a positive number, got {seconds!r}")
    # The argument replaces the kernel's chunk size; the option memory_limit stands beside it.
    limit = limit_in_bytes(explicit or options.memory_limit or "100%", free_bytes)
    bound = options.most if explicit is None else None
    kernel = kernel.with_options(memory_limit=None)  # no plan of a candidate measures
    call = bind(kernel.spec, args, kwargs)
    _check_values(call, gradient, site)

    def plan(**changes: Any) -> Any:
        return kernel.with_options(**changes).plan(*args, **kwargs)

    batch = plan().batch_shape
    if not batch or 0 in batch:
        raise ValueError(
            f"{site}: the arguments have {'an empty batch' if batch else 'no batch axes'}, so "
            "there is nothing to tune; pass arguments as large as those of the calls that should "
            "be fast"
        )
    if not call.structure.nodes and (filling := filling_of(call, options)):
        call = dataclasses.replace(filled(call, filling), lengths={})  # copies cost what items cost

    def start(trial: Candidate) -> Callable[[], Any]:
        program, inputs = _compiled(kernel.with_options(**trial.options), call, gradient)
        trial.temporaries = needed = int(program.memory_analysis().temp_size_in_bytes)
        trial.note = f"above the limit of {shown_bytes(limit)}" if needed > limit else ""
        trial.tile = plan(**trial.options).in_flight
        return lambda: program(*inputs)

    items = math.prod(batch)
    trials = _trials(options.chunk_size, bound, items, _kinds(call, bound, gradient, plan))
    first = 1 + (bound != options.chunk_size)
    with jax.disable_jit(False):  # which the caller may have set; compiled programs are timed
        _measure(trials, first, items, start, begin, seconds)
    timed = {i: t.seconds for i, t in enumerate(trials) if t.seconds}
    if not timed:
        least = min((t.temporaries for t in trials if t.temporaries), default=0)
        raise ValueError(
            f"{site}: no chunk size keeps to the memory_limit of {shown_bytes(limit)}; the "
            f"smallest one tried needs {shown_bytes(least)} besides arguments and results"
        )
    best = min(timed, key=timed.__getitem__)
    close = [i for i in timed if i < first and _WORTH * timed[i] <= timed[best]]
    chosen, *_ = *close, best
    gain = f", {timed[0] / timed[best]:.3g} times as fast" if chosen and 0 in timed else ""
    trials[chosen].note = f"chosen{gain}"
    what = "value and gradient" if gradient else "value"
    types = [f"{path} {jax.typeof(x)}" for path, x in zip(call.paths, call.leaves, strict=True)]
    where = f"on {jax.devices()[0].device_kind} with JAX {jax.__version__}"
    title = f"{kernel.spec.name}: {what} for {', '.join(types)}, {where}"
    return Tuning(title, tuple(trials), chosen)


def _check_values(call: KernelCall, gradient: bool, site: str) -> None:
    if is_staged() or any(isinstance(x, core.Tracer) for x in call.split()[0]):
        raise TypeError(
            f"{site}: it runs the kernel to time it, so it cannot be called inside jax.jit, "
            "jax.vmap, jax.grad or a scan; call it before, and use the kernel that it returns"
        )
    if gradient and not any(has_tangent(call.leaves[i]) for i in call.ranked):
        raise TypeError(
            f"{site}: gradient=True, but no argument with a rank holds floating-point numbers"
        )


def _kinds(
    call: KernelCall, bound: int | None, gradient: bool, plan: Callable[..., Any]
) -> Iterator[tuple[tuple[int | None, ...], dict[str, Any]]]:
    """Yield chunk sizes, and the options to try them with, where the call allows those."""
    options = call.kernel.options()
    flags = dict(options.compiler_options or ())
    yield _SIZES, {}
    # What chunks store grows with the batch, which a bound on chunks is meant to prevent.
    if gradient and options.checkpoint is not False and bound is None:
        yield (256, 4096), {"checkpoint": False}
    holds = IS_TUNED and options.jit and options.rules is not NO_RULES
    if holds and OPTION not in flags:
        yield (bound, 256, 16), {"compiler_options": {**flags, **PRODUCTS_ONLY}}
    # What is committed to one device is meant to stay there.
    is_free = not any(getattr(x, "committed", False) for x in call.split()[0])
    if options.devices is None and jax.local_device_count() > 1 and is_free:
        yield (bound, 256, 4096), {"devices": "all"}
    if options.lockstep and not gradient and not options.batched:
        lanes = plan(lockstep=False, chunk_size=1)
        if lanes.ends or any(part.ends for _, part in lanes.parts):
            yield (256, 64), {"lockstep": False}


def _trials(
    chunk_size: Any, bound: int | None, items: int, kinds: Iterable[Any]
) -> list[Candidate]:
    """Return what to compare: the kernel as it is, plain `jax.vmap`, then each kind in turn."""
    by_kind = [
        [(n, changes) for n in sizes if n == bound or (n and n < min(items, bound or items))]
        for sizes, changes in kinds
    ]
    in_turn = filter(None, itertools.chain(*itertools.zip_longest(*by_kind)))
    trials: list[Candidate] = []
    for size, changes in [(chunk_size, {}), (bound, {}), *in_turn]:
        most = min(size, items) if isinstance(size, int) else items
        trial = Candidate({"chunk_size": size, **changes}, most)
        trials += [] if trial in trials else [trial]
    return trials


def _compiled(kernel: Any, call: KernelCall, gradient: bool) -> tuple[Any, tuple[Any, ...]]:
    """Compile the call of a kernel; return the program and its inputs."""
    options, (values, shell) = kernel.spec.options(), call.split()
    bare = kernel.with_options(jit=False, bucket=False, compiler_options=None)
    traced = [i for i, x in enumerate(values) if i in call.ranked or (options.jit and is_array(x))]
    floats = {i: values[i] for i in call.ranked if gradient and has_tangent(values[i])}
    arrays = {i: values[i] for i in traced if i not in floats}

    def outputs(floats: Any, arrays: Any) -> Any:
        given = {**arrays, **floats}
        again = shell.call(bare.spec, [given.get(i, x) for i, x in enumerate(values)])
        return bare.run(dataclasses.replace(again, cut=call.cut))

    # The scale of the cotangents is an argument, because XLA would fold a constant.
    def value(floats: Any, arrays: Any, scale: Any) -> Any:
        outs = filter(has_tangent, jax.tree.leaves(outputs(floats, arrays)))
        return sum((jnp.sum(x).real.astype(scale.dtype) * scale for x in outs), scale * 0)

    inputs = floats, arrays
    if not gradient:
        return options.compiled(outputs, inputs).lower(*inputs).compile(), inputs
    inputs = *inputs, jnp.float32(1)
    flags = dict(options.compiler_options or ())
    jitted = jax.jit(jax.value_and_grad(value), compiler_options=flags)
    return jitted.lower(*inputs).compile(), inputs


def _measure(
    trials: list[Candidate],
    first: int,
    items: int,
    start: Callable[[Candidate], Callable[[], Any]],
    begin: float,
    seconds: float,
) -> None:
    """Try candidates while there is time, the first ones always; then let them take turns."""
    runs, times, compiling = dict[int, Callable[[], Any]](), dict[int, list[float]](), 0.0

    def timed(i: int) -> float:
        before = time.perf_counter()
        jax.block_until_ready(runs[i]())
        return (time.perf_counter() - before) / items

    for i, trial in enumerate(trials):
        # A smaller step takes no longer than a larger one.
        tiles = {j: trials[j].tile for j in times}
        longest = [times[j][0] * max(1, n / trial.tile) for j, n in tiles.items() if n < items]
        least = min((laps[0] for laps in times.values()), default=0) + _STEP / trial.tile
        before = time.perf_counter()
        end = before + compiling + 2 * items * min(longest, default=least)
        if times and i >= first and end > begin + _TRYING * seconds:
            continue
        try:
            runs[i] = start(trial)
            compiling = time.perf_counter() - before
            if not trial.note:
                times[i] = [timed(i)]
        except jax.errors.JaxRuntimeError as error:
            trial.note = f"failed: {textwrap.shorten(str(error), 80)}"
    fastest = min((laps[0] for laps in times.values()), default=0)
    alive = [i for i, laps in times.items() if i < first or laps[0] < _SLOW * fastest]
    turn, shuffled = items * sum(times[i][0] for i in alive), random.Random(0)
    for _ in range(_TURNS):
        if time.perf_counter() + turn < begin + seconds:
            # In one order, each would find the cache and the memory as the same one left them.
            for i in shuffled.sample(alive, len(alive)):
                times[i].append(timed(i))
    for i, laps in times.items():
        trials[i].seconds = statistics.median(laps[1:] or laps)  # a first run may take longer
