# SPDX-License-Identifier: MIT
"""What a reduction over all pairs costs: rankax, KeOps, plain `jax.numpy`, and `lax.map` over rows.

    python benchmarks/reductions.py            # 10,000 x 10,000 points, in five minutes
    python benchmarks/reductions.py sum        # one task
    python benchmarks/reductions.py --large    # and 100,000 x 100,000, once
    python benchmarks/reductions.py --labels   # sums by label alone

Points in three dimensions, float32. The contestants take turns in one process, in another order in
each round; the table has medians. What a contestant compiles first is timed apart. KeOps
(https://www.kernel-operations.io) takes part if it is installed. It has no figure for temporaries,
because nothing reports them.
"""

from __future__ import annotations

import inspect
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import page
import shown
from rankax import auto_vmap, chunked_reduce
from rankax.reductions import ByLabel, Histogram

CHUNK = 2**16
ALL = 'rankax, devices="all"'
MATH = "rankax, cpu_math=True"
WITH_POWERS = "Biot-Savart"  # the other kernels have no function that the option is for
SOFT = 1e-2  # keeps a body from pulling itself without bound


def gauss(x, y, w):
    return w * jnp.exp(-jnp.sum((x - y) ** 2))


def square(x, y):
    return jnp.sum((x - y) ** 2)


def minus_square(x, y):
    return -square(x, y)


def gravity(x, y, w):
    return -w / jnp.sqrt(jnp.sum((x - y) ** 2) + SOFT)


def biot_savart(x, y, j):
    away = x - y
    return jnp.cross(j, away) / (jnp.sum(away**2) + SOFT) ** 1.5


class Task(NamedTuple):
    """A kernel, its reduction in rankax and in `jax.numpy`, and the same in KeOps."""

    kernel: Callable[..., Any]
    reduce: str
    plain: Callable[..., Any]
    formula: str
    operation: str = "Sum"

    def sizes(self, count: int) -> list[tuple[int, ...]]:
        """Points are rows of three numbers, and so are currents; a weight is a number."""
        return [(count,) if name == "w" else (count, 3) for name in self.names()]

    def names(self) -> list[str]:
        return list(inspect.signature(self.kernel).parameters)


_CROSS = "Concat(Concat({}, {}), {})".format(
    *(f"Elem(j,{a}) * Elem(x-y,{b}) - Elem(j,{b}) * Elem(x-y,{a})" for a, b in ("12", "20", "01"))
)
_SOFT = f"(SqDist(x,y) + IntInv({round(1 / SOFT)}))"
TASKS = {
    "sum": Task(gauss, "sum", jnp.sum, "w * Exp(-SqDist(x,y))"),
    "argmin": Task(square, "argmin", jnp.argmin, "SqDist(x,y)", "ArgMin"),
    "min": Task(square, "min", jnp.min, "SqDist(x,y)", "ArgMin"),
    "logsumexp": Task(minus_square, "logsumexp", jax.nn.logsumexp, "-SqDist(x,y)", "LogSumExp"),
    "gravity": Task(gravity, "sum", jnp.sum, f"-w * Rsqrt({_SOFT})"),
    "Biot-Savart": Task(biot_savart, "sum", jnp.sum, f"{_CROSS} * Rsqrt({_SOFT}) * Inv({_SOFT})"),
}
GRADIENT = "gradient of "
LARGE = ("sum", "argmin", "logsumexp", GRADIENT + "sum")
MEASURED = [
    *("sum", "argmin", "logsumexp", "gravity", "Biot-Savart"),
    *(GRADIENT + name for name in ("sum", "min", "gravity", "Biot-Savart")),
]


def rows(task: Task) -> Callable[..., Any]:
    """Row after row by `lax.map`, each checkpointed: what people write today."""

    def call(x, *others):
        over = jax.vmap(task.kernel, (None, *(0 for _ in others)))
        return lax.map(jax.checkpoint(lambda row: task.plain(over(row, *others), axis=0)), x)

    return call


def whole(task: Task) -> Callable[..., Any]:
    def call(x, *others):
        over = jax.vmap(task.kernel, (None, *(0 for _ in others)))
        return task.plain(jax.vmap(over, (0, *(None for _ in others)))(x, *others), axis=1)

    return call


def ours(task: Task, **changes: Any) -> Callable[..., Any]:
    ranks = {name: 0 if name == "w" else 1 for name in task.names()}
    options = {"reduce": task.reduce, "reduce_axis": -1, "chunk_size": CHUNK, **changes}
    mapped = auto_vmap(**ranks, **options)(task.kernel)
    return lambda x, *others: mapped(x[:, None], *others)


def keops(task: Task, *, gradient: bool) -> Callable[..., Any]:
    """The formulas of KeOps; a gradient is one formula for each input."""
    if gradient and task.operation == "ArgMin":
        return keops_nearest(task)
    from pykeops.numpy import Genred

    kinds = {"x": "Vi(3)", "y": "Vj(3)", "w": "Vj(1)", "j": "Vj(3)"}
    variables = [f"{name} = {kinds[name]}" for name in task.names()]

    def columns(args):
        return [x.reshape(len(x), -1) for x in args]

    if not gradient:
        run = Genred(task.formula, variables, reduction_op=task.operation, axis=1)

        def reduced(*args):
            out = run(*columns(args), backend="CPU")
            return out[:, 0] if out.shape[1] == 1 else out

        return reduced
    one = np.ones(3 if task.kernel is biot_savart else 1, np.float32)
    grads = [
        Genred(
            f"Grad({task.formula}, {name}, g)",
            [*variables, f"g = Pm({len(one)})"],
            reduction_op="Sum",
            axis=1 if name == "x" else 0,
        )
        for name in task.names()
    ]
    return lambda *args: tuple(
        grad(*columns(args), one, backend="CPU").reshape(x.shape)
        for grad, x in zip(grads, args, strict=True)
    )


def keops_nearest(task: Task) -> Callable[..., Any]:
    """KeOps has no derivative of a minimum: find the nearest points, then two lines of NumPy."""
    nearest = keops(task, gradient=False)

    def call(x, y):
        index = nearest(x, y).astype(int)
        away = 2 * (x - y[index])
        back = np.zeros_like(y)
        np.subtract.at(back, index, away)
        return away, back

    return call


def contestants(name: str, args: tuple[Any, ...], most_bytes: float) -> dict[str, Any]:
    """Compile all; return by name a call and what is known of it.

    Of the large case only those that were made for it: the others take as long for each pair as
    in the small one, which is a quarter of an hour.
    """
    task, gradient = TASKS[name.removeprefix(GRADIENT)], name.startswith(GRADIENT)
    found: dict[str, Any] = {}
    functions = {
        "rankax": ours(task),
        ALL: ours(task, devices="all"),
        "rows by lax.map": rows(task),
        "whole, jax.numpy": whole(task),
    }
    if name.endswith(WITH_POWERS):
        functions[MATH] = ours(task, cpu_math=True)
    if len(args[0]) > 20_000:
        functions = {who: functions[who] for who in ("rankax", ALL)}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    for who, fun in functions.items():
        if gradient:
            fun = jax.grad(lambda *args, fun=fun: fun(*args).sum(), tuple(range(len(args))))
        begin = time.perf_counter()
        compiled = jax.jit(fun).lower(*shapes).compile()
        seconds = time.perf_counter() - begin
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        arrays = [jnp.asarray(x) for x in args]
        run = None
        if temporaries <= most_bytes:

            def run(compiled=compiled, arrays=arrays):
                return jax.block_until_ready(compiled(*arrays))

        found[who] = (run, seconds, temporaries)
    begin = time.perf_counter()
    try:
        fun = keops(task, gradient=gradient)
    except ImportError as error:
        page.progress(f"not installed: {error.name}")
        return found
    small = tuple(x[:64] for x in args)
    fun(*small)
    found["KeOps"] = (lambda: fun(*args), time.perf_counter() - begin, None)
    return found


def measure(task: str, count: int, rounds: int, most_bytes: float) -> list[str]:
    rng = np.random.default_rng(0)
    sizes = TASKS[task.removeprefix(GRADIENT)].sizes(count)
    args = tuple(rng.normal(size=size).astype(np.float32) for size in sizes)
    found = contestants(task, args, most_bytes)
    runners = {who: run for who, (run, *_) in found.items() if run is not None}
    times: dict[str, list[float]] = {who: [] for who in runners}
    results: dict[str, Any] = {}
    for who, run in runners.items():
        begin = time.perf_counter()
        results[who] = run()
        times[who].append(time.perf_counter() - begin)
    check_agreement(task, results)
    for turn in page.turns(rounds - 1):
        for who in random.Random(turn).sample(sorted(runners), len(runners)):
            begin = time.perf_counter()
            runners[who]()
            times[who].append(time.perf_counter() - begin)
    medians = {who: statistics.median(values) for who, values in times.items()}
    lines = []
    for who, (run, seconds, temporaries) in found.items():
        memory = "?" if temporaries is None else f"{temporaries / 1e6:.2f}"
        took = "not run" if run is None else f"{medians[who] * 1e3:.0f}"
        ratio = "" if run is None else f"{medians[who] / medians['rankax']:.2f}"
        lines.append(f"| {task} | {count} | {who} | {took} | {ratio} | {memory} | {seconds:.1f} |")
    return lines


def check_agreement(task: str, results: dict[str, Any]) -> None:
    expected = [np.asarray(x) for x in jax.tree.leaves(results["rankax"])]
    for who, result in results.items():
        leaves = [np.asarray(x) for x in jax.tree.leaves(result)]
        for got, want in zip(leaves, expected, strict=True):
            if task == "argmin":
                # Two points may be as near as rounding can tell.
                assert np.mean(got == want) > 0.999, who
            else:
                np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3, err_msg=who)


# Sums by label: of stored values, and of pairs that nobody stores.

LABELLED = "a million values, {} bins"
BINS = 10, 64, 1000, 100_000
SHELLS, FAR = 64, 1.8  # bins of the distances of points in a cube of side 1


def of_values(
    bins: int, rng: Any, core: tuple[int, ...] = (), *, gradient: bool = False
) -> tuple[dict[str, Callable[..., Any]], tuple[Any, ...]]:
    reduced = chunked_reduce(lambda *item: item, ByLabel(0, bins), CHUNK)
    values = rng.integers(0, bins, 10**6).astype(np.int32), rng.normal(size=(10**6, *core))
    functions: dict[str, Callable[..., Any]] = {
        "rankax": lambda labels, x: reduced(labels, x)[1],
        "jax.ops.segment_sum": lambda labels, x: jax.ops.segment_sum(x, labels, bins),
    }

    def slope(fun: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda labels, x: jnp.sum(fun(labels, x) ** 2), 1)

    return {who: slope(fun) if gradient else fun for who, fun in functions.items()}, values


def of_shells(count: int, rng: Any) -> tuple[dict[str, Callable[..., Any]], tuple[Any, ...]]:
    shells = Histogram(SHELLS, "sum", range=(0, FAR), by="r")

    @auto_vmap(x=1, y=1, v=0, w=0, reduce=shells, chunk_size=CHUNK)
    def pair(x, y, v, w):
        return {"r": jnp.sqrt(square(x, y)), "w": v * w}

    def by_row(add: Callable[..., Any]) -> Callable[..., Any]:
        def row(x, w, total, i):
            distance = jnp.sqrt(jnp.sum((x[i] - x) ** 2, axis=1))
            return total + add(distance, w[i] * w), None

        return lambda x, w: lax.scan(
            lambda total, i: row(x, w, total, i), jnp.zeros(SHELLS), jnp.arange(count)
        )[0]

    def histogram(distance, weight):
        return jnp.histogram(distance, jnp.linspace(0, FAR, SHELLS + 1), weights=weight)[0]

    def segments(distance, weight):
        labels = (distance * (SHELLS / FAR)).astype(int)
        return jax.ops.segment_sum(weight, labels, SHELLS)

    return {
        "rankax": lambda x, w: pair(x[:, None], x, w[:, None], w)["w"],
        "rows, jnp.histogram": by_row(histogram),
        "rows, jax.ops.segment_sum": by_row(segments),
    }, (rng.uniform(size=(count, 3)), rng.uniform(size=count))


def measure_labels(name: str, rounds: int, made: Any) -> list[str]:
    """Return a row of each contestant: its time, beside that of rankax, and its memory."""
    functions, args = made
    args = [jnp.asarray(x, jnp.float32 if x.dtype == float else x.dtype) for x in args]
    compiled = {who: jax.jit(fun).lower(*args).compile() for who, fun in functions.items()}
    times: dict[str, list[float]] = {who: [] for who in compiled}
    results = {who: np.asarray(run(*args)) for who, run in compiled.items()}
    for result in results.values():
        # A pair may be on an edge; plain sums drift.
        np.testing.assert_allclose(result, results["rankax"], rtol=1e-2, atol=1e-1)
    for turn in page.turns(rounds):
        for who in random.Random(turn).sample(sorted(compiled), len(compiled)):
            begin = time.process_time()
            jax.block_until_ready(compiled[who](*args))
            times[who].append(time.process_time() - begin)
    medians = {who: statistics.median(values) for who, values in times.items()}
    return [
        f"| {name} | {who} | {medians[who] * 1e3:.1f} | {medians[who] / medians['rankax']:.2f} | "
        f"{run.memory_analysis().temp_size_in_bytes / 1e6:.2f} |"
        for who, run in compiled.items()
    ]


LABELS_HEAD = """# Sums by label

Written by `python benchmarks/reductions.py --labels --write`. {machine}, JAX {jax},
{cores} cores. Medians of the CPU time of {rounds} rounds in turns; the ratio is to rankax. Vectors
have three numbers; a gradient is that of the sum of the squares of all bins. Pairs are those of
10,000 points, or 20,000, each with a weight, in 64 bins of their distance.

| task | contestant | ms | times rankax | temporaries, MB |
|---|---|---:|---:|---:|
"""


def compare_labels(rounds: int, *, write: bool) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for bins in BINS:
        page.progress(f"{bins:,} bins")
        name, slopes = LABELLED.format(f"{bins:,}"), of_values(bins, rng, gradient=True)
        lines += measure_labels(name, rounds, of_values(bins, rng))
        lines += measure_labels(f"{name}, gradient", rounds, slopes)
    for bins in BINS[2:]:
        name = LABELLED.format(f"{bins:,}").replace("values", "vectors")
        lines += measure_labels(name, rounds, of_values(bins, rng, (3,)))
    page.progress("pairs")
    lines += measure_labels("1e8 pairs", rounds, of_shells(10_000, rng))
    functions, args = of_shells(20_000, rng)
    lines += measure_labels("4e8 pairs", 1, ({"rankax": functions["rankax"]}, args))
    head = LABELS_HEAD.format(**setting(), rounds=rounds)
    page.finish(page.RESULTS / "labels.md", head + "\n".join(lines), write=write)


def setting() -> dict[str, Any]:
    """Return where this runs, for the head of a result."""
    return {
        "machine": platform.processor() or platform.machine(),
        "jax": jax.__version__,
        "cores": len(os.sched_getaffinity(0)),
    }


HEAD = """# Reductions over all pairs

Written by `python benchmarks/reductions.py{flag} --write`. {machine}, JAX {jax},
{cores} cores; rankax with `chunk_size={chunk}`. Medians of {rounds} rounds in turns, but a single
round of 100,000 points; the ratio is to rankax. KeOps and `devices="all"` (a CPU device for each
core) compute on all cores; `cpu_math=True` is listed where a kernel has a power. KeOps computes a
gradient by one pass for each input; of "min", by an argmin, and the rest in NumPy.

| task | points on each side | contestant | ms | times rankax | temporaries, MB | compile, s |
|---|---|---|---:|---:|---:|---:|
"""


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(MEASURED))
    parser.add_argument("--large", action="store_true", help="100,000 points too, once")
    parser.add_argument("--labels", action="store_true", help="sums by label alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=10_000)
    options = parser.parse_args()
    if unknown := set(options.tasks) - set(MEASURED):
        parser.error(f"no task {min(unknown)!r}: the tasks are {', '.join(MEASURED)}")
    if options.write and (options.tasks or options.count != parser.get_default("count")):
        parser.error("--write is for all tasks: name none, without --count")
    jax.config.update("jax_num_cpu_devices", max(2, len(os.sched_getaffinity(0))))
    if options.labels:
        compare_labels(options.rounds, write=options.write)
        return
    lines = []
    for task in options.tasks or MEASURED:
        page.progress(f"{task}: compiling")
        lines += measure(task, options.count, options.rounds, 4e9)
        page.progress("\n".join(lines[-5:]))
    if options.large:
        for task in LARGE:
            lines += measure(task, 100_000, 1, 4e9)
            page.progress("\n".join(lines[-3:]))
    head = HEAD.format(
        flag=" --large" if options.large else "",
        **setting(),
        chunk=CHUNK,
        rounds=options.rounds,
    )
    page.finish(page.RESULTS / "reductions.md", head + "\n".join(lines), write=options.write)
    if options.write:
        shown.main()


if __name__ == "__main__":
    main()
