# SPDX-License-Identifier: MIT
"""What a reduction over all pairs costs: rankax, KeOps, plain `jax.numpy`, and `lax.map` over rows.

    python -m tox -e bench -- benchmarks/reductions.py            # 10,000 x 10,000 points
    python -m tox -e bench -- benchmarks/reductions.py --large    # and 100,000 x 100,000, once

Points in three dimensions, float32. The contestants take turns in one process, in another order in
each round; the table has medians. What a contestant compiles first is timed apart. KeOps
(https://www.kernel-operations.io) has no figure for temporaries, for nothing reports it. Writes
`benchmarks/results/reductions.md`.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shown
import stamp
from rankax import auto_vmap

CHUNK = 2**16
ALL = 'rankax, devices="all"'


def gauss(x, y, w):
    return w * jnp.exp(-jnp.sum((x - y) ** 2))


def square(x, y):
    return jnp.sum((x - y) ** 2)


def minus_square(x, y):
    return -square(x, y)


def rows(kernel: Callable[..., Any], reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Row after row by `lax.map`, each checkpointed: what people write today."""

    def call(x, *others):
        over = jax.vmap(kernel, (None, *(0 for _ in others)))
        return lax.map(jax.checkpoint(lambda row: reduce(over(row, *others))), x)

    return call


def whole(kernel: Callable[..., Any], reduce: Callable[..., Any]) -> Callable[..., Any]:
    def call(x, *others):
        over = jax.vmap(kernel, (None, *(0 for _ in others)))
        return reduce(jax.vmap(over, (0, *(None for _ in others)))(x, *others), axis=-1)

    return call


def ours(
    kernel: Callable[..., Any], reduce: str, devices: int | str | None = None
) -> Callable[..., Any]:
    ranks = {name: 0 if name == "w" else 1 for name in ("x", "y", "w")}
    ranks = dict(list(ranks.items())[: kernel.__code__.co_argcount])
    options = {"reduce": reduce, "reduce_axis": -1, "chunk_size": CHUNK, "devices": devices}
    mapped = auto_vmap(**ranks, **options)(kernel)
    return lambda x, *others: mapped(x[:, None], *others)


def keops(task: str) -> Callable[..., Any]:
    """The formulas of KeOps; a gradient is one formula for each input."""
    from pykeops.numpy import Genred

    x, y, w = "x = Vi(3)", "y = Vj(3)", "w = Vj(1)"
    formula = "w * Exp(-SqDist(x,y))"
    if task == "sum":
        run = Genred(formula, [x, y, w], reduction_op="Sum", axis=1)
        return lambda x, y, w: run(x, y, w[:, None], backend="CPU")[:, 0]
    if task == "argmin":
        run = Genred("SqDist(x,y)", [x, y], reduction_op="ArgMin", axis=1)
        return lambda x, y: run(x, y, backend="CPU")[:, 0]
    if task == "logsumexp":
        run = Genred("-SqDist(x,y)", [x, y], reduction_op="LogSumExp", axis=1)
        return lambda x, y: run(x, y, backend="CPU")[:, 0]
    variables, one = [x, y, w], np.ones((1,), np.float32)
    grads = [
        Genred(
            f"Grad({formula}, {name}, g)", [*variables, "g = Pm(1)"], reduction_op="Sum", axis=axis
        )
        for name, axis in (("x", 1), ("y", 0), ("w", 0))
    ]
    return lambda x, y, w: tuple(
        np.squeeze(grad(x, y, w[:, None], one, backend="CPU")) for grad in grads
    )


TASKS: dict[str, tuple[Callable[..., Any], str, Callable[..., Any]]] = {
    "sum": (gauss, "sum", jnp.sum),
    "argmin": (square, "argmin", jnp.argmin),
    "logsumexp": (minus_square, "logsumexp", jax.nn.logsumexp),
    "gradient of sum": (gauss, "sum", jnp.sum),
}


def contestants(task: str, args: tuple[Any, ...], most_bytes: float) -> dict[str, Any]:
    """Compile all; return by name a call and what is known of it.

    Of the large case only those that were made for it: the others take as long for each pair as
    in the small one, which is a quarter of an hour.
    """
    kernel, name, reduce = TASKS[task]
    found: dict[str, Any] = {}
    functions = {
        "rankax": ours(kernel, name),
        ALL: ours(kernel, name, "all"),
        "rows by lax.map": rows(kernel, reduce),
        "whole, jax.numpy": whole(kernel, reduce),
    }
    if len(args[0]) > 20_000:
        functions = {who: functions[who] for who in ("rankax", ALL)}
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    for who, fun in functions.items():
        if task.startswith("gradient"):
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
    fun = keops(task)
    small = tuple(x[:64] for x in args)
    fun(*small)
    found["KeOps"] = (lambda: fun(*args), time.perf_counter() - begin, None)
    return found


def measure(task: str, count: int, rounds: int, most_bytes: float) -> list[str]:
    rng = np.random.default_rng(0)
    args = tuple(
        rng.normal(size=size).astype(np.float32)
        for size in ((count, 3), (count, 3), (count,))[: TASKS[task][0].__code__.co_argcount]
    )
    found = contestants(task, args, most_bytes)
    runners = {who: run for who, (run, *_) in found.items() if run is not None}
    times: dict[str, list[float]] = {who: [] for who in runners}
    results: dict[str, Any] = {}
    for who, run in runners.items():
        begin = time.perf_counter()
        results[who] = run()
        times[who].append(time.perf_counter() - begin)
    check_agreement(task, results)
    for turn in range(rounds - 1):
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


HEAD = """# Reductions over all pairs

Written by `python -m tox -e bench -- benchmarks/reductions.py{flag}`. {machine}, JAX {jax},
{cores} cores; rankax with `chunk_size={chunk}`. Medians of {rounds} rounds in turns, but a single
round of 100,000 points; the ratio is to rankax. KeOps and `devices="all"` (a CPU device for each
core) compute on all cores; KeOps computes a gradient by one pass for each of the three inputs.

| task | points on each side | contestant | ms | times rankax | temporaries, MB | compile, s |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="100,000 points too, once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=10_000)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(2, len(os.sched_getaffinity(0))))
    lines = []
    for task in TASKS:
        lines += measure(task, options.count, options.rounds, 4e9)
        print("\n".join(lines[-5:]), flush=True)
    if options.large:
        for task in TASKS:
            lines += measure(task, 100_000, 1, 4e9)
            print("\n".join(lines[-3:]), flush=True)
    head = HEAD.format(
        flag=" --large" if options.large else "",
        machine=platform.processor() or platform.machine(),
        jax=jax.__version__,
        cores=len(os.sched_getaffinity(0)),
        chunk=CHUNK,
        rounds=options.rounds,
    )
    path = Path(__file__).parent / "results" / "reductions.md"
    stamp.write(path, head + "\n".join(lines))
    print(f"wrote {path.name}")
    shown.main()


if __name__ == "__main__":
    main()
