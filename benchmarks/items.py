# SPDX-License-Identifier: MIT
"""What is one item: a row or a pair, a gradient inside or outside, a sample or a bin.

    python benchmarks/items.py            prints the tables
    python benchmarks/items.py --write    writes ``benchmarks/results/items.md``

Processor time of one core, medians of turns; temporary memory is what the compiler reports.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np

import page
from rankax import auto_vmap
from shown import megabytes

RESULTS = Path(__file__).parent / "results" / "items.md"
HEAD = """# What is one item?

Written by `python benchmarks/items.py --write`. {machine}, one core, JAX {jax}, float32.
Processor time, medians of {turns} turns; temporary memory.
"""

Runs = dict[str, Callable[..., Any]]


def term(a: Any, b: Any) -> Any:
    power = 1 / (jnp.sum((a - b) ** 2) + 0.5) ** 3
    return power * power - power


def with_gradients(runs: Runs) -> dict[str, Runs]:
    def gradient_of(run: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda x, *others: jnp.sum(run(x, *others)))

    return {"value": runs, "gradient": {name: gradient_of(run) for name, run in runs.items()}}


def rows() -> tuple[dict[str, Runs], tuple[Any, ...]]:
    def row(x: Any, j: Any, real: Any, points: Any) -> Any:
        return jnp.sum(jax.vmap(lambda j: term(x, points[j]))(j), where=real)

    def pair(x: Any, j: Any, real: Any, points: Any) -> Any:
        return term(x, points[j])

    def plain(points: Any, j: Any, real: Any) -> Any:
        every = jax.vmap(jax.vmap(lambda x, j: term(x, points[j]), (None, 0)))(points, j)
        return jnp.sum(every, where=real)

    by_row = auto_vmap(x="i | 3", j="i | k", real="i | k", reduce="sum")(row)
    by_pair = auto_vmap(x="i | 3", j="i k |", real="i k |", reduce="sum", where="real")(pair)
    runs = {
        "a row": lambda points, j, real: by_row(points, j, real, points),
        "a pair": lambda points, j, real: by_pair(points, j, real, points),
        "`jax.vmap`": plain,
    }
    random = np.random.default_rng(0)
    points = jnp.asarray(random.random((40_000, 3)) * 20, jnp.float32)
    lists = (np.arange(40_000)[:, None] + np.arange(1, 49)) % 40_000
    return with_gradients(runs), (
        points,
        jnp.asarray(lists),
        jnp.asarray(random.random(lists.shape) < 0.7),
    )


def gradients() -> tuple[dict[str, Runs], tuple[Any, ...]]:
    def net(x: Any, weights: Any) -> Any:
        for w in weights[:-1]:
            x = jnp.tanh(w @ x)
        return weights[-1] @ x

    inside = auto_vmap(x=1, chunk_size=1000)(jax.grad(net))
    mapped = auto_vmap(x=1, chunk_size=1000)(net)
    both = auto_vmap(x=1, chunk_size=1000)(jax.value_and_grad(net))

    def total(x: Any, weights: Any) -> Any:
        values = mapped(x, weights)
        return jnp.sum(values), values

    def outside(x: Any, weights: Any) -> Any:
        slopes, values = jax.grad(total, has_aux=True)(x, weights)
        return values, slopes

    slopes = {
        "inside": inside,
        "outside": lambda x, w: outside(x, w)[1],
        "`jax.vmap`": jax.vmap(jax.grad(net), (0, None)),
    }
    values = {
        "inside": both,
        "outside": outside,
        "`jax.vmap`": jax.vmap(jax.value_and_grad(net), (0, None)),
    }
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(keys[0], (64, 16)) / 4, jax.random.normal(keys[1], (64, 64)) / 8]
    weights.append(jax.random.normal(keys[2], (64,)) / 8)
    titled = {"gradient of each item": slopes, "and its value": values}
    return titled, (jax.random.normal(keys[3], (20_000, 16)), weights)


def bins() -> tuple[dict[str, Runs], tuple[Any, ...]]:
    def model(p: Any, f: Any) -> Any:
        rate = jnp.linalg.solve(jnp.eye(6) + jnp.outer(p, p), p)  # belongs to the sample
        return jnp.exp(-rate[0] * f) * jnp.sin(rate[1] * f + rate[2])

    def one_bin(p: Any, f: Any, data: Any) -> Any:
        return (model(p, f) - data) ** 2

    def every_bin(p: Any, f: Any, data: Any) -> Any:
        return jnp.sum(one_bin(p, f, data))

    by_bin = auto_vmap(p="s | 6", f="b |", data="b |", reduce="sum", over="b")(one_bin)
    by_sample = auto_vmap(p="s | 6")(every_bin)
    runs = {
        'sample and bin, `over="b"`': by_bin,
        "a sample, all bins inside": by_sample,
        "a sample, `chunk_size=16`": by_sample.with_options(chunk_size=16),
        "`jax.vmap`": jax.vmap(every_bin, (0, None, None)),
    }
    p = jax.random.normal(jax.random.key(0), (2000, 6))
    f = jnp.linspace(0.0, 3.0, 4000)
    return with_gradients(runs), (p, f, jnp.sin(f))


def measured(runs: Runs, args: tuple[Any, ...], turns: int) -> dict[str, tuple[float, int]]:
    """Time and temporaries of each, whose results are compared with those of the last."""
    programs = {name: jax.jit(run).lower(*args).compile() for name, run in runs.items()}
    want = jax.tree.leaves(programs["`jax.vmap`"](*args))
    for program in programs.values():
        for got, wanted in zip(jax.tree.leaves(program(*args)), want, strict=True):
            scale = float(np.max(np.abs(wanted)))
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3 * scale)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in page.turns(turns):
        for name, program in programs.items():
            begin = time.process_time()
            jax.block_until_ready(program(*args))
            times[name].append(time.process_time() - begin)
    return {
        name: (statistics.median(times[name]), program.memory_analysis().temp_size_in_bytes)
        for name, program in programs.items()
    }


TABLES = {"rows": rows, "gradients": gradients, "bins": bins}


def table(name: str, turns: int) -> str:
    titled, args = TABLES[name]()
    found = [measured(runs, args, turns) for runs in titled.values()]
    lines = [f"| | {' | '.join(titled)} | temporary memory of the latter |"]
    lines.append("|---|" + "---:|" * (len(titled) + 1))
    for run in found[0]:
        cells = [f"{1e3 * each[run][0]:.1f} ms" for each in found]
        lines.append(f"| {run} | {' | '.join(cells)} | {megabytes(found[-1][run][1])} |")
    return "\n".join([f"<!-- {name} -->", *lines, f"<!-- end of {name} -->"])


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tables: list[str] = []
    for name in [given.only] if given.only else TABLES:
        page.progress(name)
        tables.append(table(name, given.turns))
    head = HEAD.format(machine=platform.machine(), jax=jax.__version__, turns=given.turns)
    write = given.write and not given.only
    page.finish(RESULTS, "\n\n".join([head.rstrip(), *tables]), write=write)


if __name__ == "__main__":
    main()
