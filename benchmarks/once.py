# SPDX-License-Identifier: MIT
"""Time pair kernels whose arguments have work of their own, or multiply, beside plain JAX.

    python benchmarks/once.py [NAME ...] [--points 2000] [--rounds 9] [--write]

prints, for sums over pairs (``reduce="sum", reduce_axis=-1``) and for maps in chunks of 64 rows,
forward and gradient, milliseconds of `jax.vmap`, of `jax.lax.map` of 64 rows, of the same
with the work of each point outside (by hand), and of rankax. Then how long rankax takes beside the
better of the first two, and beside the third; where it takes longest comes first. One core;
processor times in turns, the median of all rounds. ``--write`` stores the table.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import page
from rankax import auto_vmap

RESULTS = page.RESULTS / "once.md"
R = np.random.default_rng(0)
HEAD = """# Work that belongs to one side

Written by `python benchmarks/once.py --write`. One core, JAX {jax}, float32;
{points:,} x {points:,} pairs. Processor time in ms, the median of some turns. Where
rankax takes longest comes first. In a map, it has 64 rows of pairs at once, as `lax.map` has;
`jax.vmap` has all pairs, and writes each number once. A loop fills its output with zeros, and
copies each chunk into it: where a pair is one product of 16 numbers, that is half of the time.

| kernel | of all pairs | {ways} | beside the better of the first two | beside by hand |
|---|---|---:|---:|---:|---:|---:|---:|"""


def weights(*sizes: int) -> list[Any]:
    shapes = itertools.pairwise(sizes)
    return [jnp.asarray(R.normal(size=s) / np.sqrt(s[0]), jnp.float32) for s in shapes]


def net(ws: list[Any], x: Any) -> Any:
    for w in ws[:-1]:
        x = jnp.tanh(x @ w)
    return x @ ws[-1]


SMALL, WIDE, SCALAR, DECODER = (
    weights(*sizes) for sizes in ((3, 64, 64, 3), (3, 256, 16), (3, 32, 32, 1), (8, 16, 1))
)
ENCODER, Q, K = weights(3, 64, 4), *(weights(16, 16)[0] for _ in range(2))
TABLE = jnp.asarray(R.normal(size=(512, 8)), jnp.float32)
KNOTS = jnp.linspace(-3, 3, 16)


def gradient(x: Any) -> Any:
    return jax.grad(lambda x: net(SCALAR, x)[0])(x)


def spline(x: Any) -> Any:
    return jnp.exp(-((x[:, None] - KNOTS) ** 2)).sum(-1)


def rotated(x: Any) -> Any:
    s, c = jnp.sin(x), jnp.cos(x)
    return jnp.array([c[0] * s[1], s[0] * c[2], c[1] * s[2]])


def harmonics(x: Any) -> Any:
    n = jnp.arange(1, 9)
    return jnp.concatenate([jnp.cos(n * x[0]), jnp.sin(n * x[1])])


def density(x: Any) -> Any:
    return -0.5 * jnp.sum(x * x) - jax.nn.logsumexp(jnp.sin(x[0] * KNOTS))


def fixed_point(x: Any) -> Any:
    return jax.lax.fori_loop(0, 20, lambda _, z: jnp.tanh(z + x) / 2, x)


def factor(x: Any) -> Any:
    return jnp.linalg.solve(4 * jnp.eye(3) + jnp.outer(x, x), x)


def looked_up(x: Any) -> Any:
    return TABLE[(jnp.abs(x[0]) * 100).astype(jnp.int32) % 512] * x[1]


class Pair(NamedTuple):
    """A kernel of two points: what one needs of each alone, and what one does with both."""

    size: int  # of a point
    of_x: Callable[[Any], Any]
    of_y: Callable[[Any], Any]
    rest: Callable[[Any, Any], Any]

    def __call__(self, x: Any, y: Any) -> Any:
        return self.rest(self.of_x(x), self.of_y(y))


def both(size: int, of: Callable[[Any], Any], rest: Callable[[Any, Any], Any]) -> Pair:
    return Pair(size, of, of, rest)


def as_is(x: Any) -> Any:
    return x


def gaussian(x: Any, y: Any) -> Any:
    return jnp.exp(-jnp.sum((x - y) ** 2))


def product(x: Any, y: Any) -> Any:
    return x @ y


# By hand, a product of matrices is one as well: `jax.vmap` makes it of `x @ y`.
KERNELS = {
    "net 3-64-64-3": both(3, partial(net, SMALL), gaussian),
    "net 3-256-16": both(3, partial(net, WIDE), gaussian),
    "tangent kernel": both(3, gradient, product),
    "one-sided products": Pair(
        3,
        lambda x: (jnp.cos(x[0]), x[2]),
        lambda y: (jnp.sin(y[1]), jnp.exp(y.sum())),
        lambda x, y: x[0] * y[0] + y[1] * x[1],
    ),
    "Gaussian, nothing to move": both(3, as_is, gaussian),
    "exp(a @ b), 16": both(16, as_is, lambda x, y: jnp.exp(x @ y / 16)),
    "exp(a @ b), 64": both(64, as_is, lambda x, y: jnp.exp(x @ y / 64)),
    "attention": Pair(16, lambda x: x @ Q, lambda y: y @ K, lambda x, y: jnp.exp(x @ y / 16)),
    "splines": both(3, spline, lambda x, y: jnp.sum(x * y)),
    "a factorisation for each x": Pair(3, factor, as_is, lambda x, y: jnp.sin(x @ y)),
    "encoders, decoder of pairs": both(
        3, partial(net, ENCODER), lambda x, y: net(DECODER, jnp.concatenate([x, y]))[0]
    ),
    "rotations before distances": both(
        3, rotated, lambda x, y: jnp.sqrt(1e-3 + jnp.sum((x - y) ** 2))
    ),
    "log-densities": both(3, density, lambda x, y: jnp.tanh(x - y)),
    "harmonics": both(3, harmonics, product),
    "tables": both(3, looked_up, gaussian),
    "fixed points": Pair(3, fixed_point, as_is, gaussian),
    "cosine similarity": both(
        16, lambda x: (x, jnp.linalg.norm(x)), lambda x, y: x[0] @ y[0] / (x[1] * y[1] + 1e-3)
    ),
    "squared distance by products": both(
        16, lambda x: (x, x @ x), lambda x, y: jnp.exp(-(x[1] + y[1] - 2 * x[0] @ y[0]) / 16)
    ),
    "gravity": both(3, as_is, lambda x, y: jnp.sum(x - y) / (1e-2 + jnp.sum((x - y) ** 2)) ** 1.5),
    "sigmoid of a bilinear form": Pair(
        16, lambda x: x @ Q, as_is, lambda x, y: jax.nn.sigmoid(x @ y / 16)
    ),
}


def ways(f: Pair, points: int, *, summed: bool) -> dict[str, Any]:
    def row(f: Any, x: Any, ys: Any) -> Any:
        outs = jax.vmap(lambda y: f(x, y))(ys)
        return jnp.sum(outs) if summed else outs

    def by_rows(f: Any, xs: Any, ys: Any) -> Any:
        return jax.lax.map(lambda x: row(f, x, ys), xs, batch_size=64)

    options = {"reduce": "sum", "reduce_axis": -1} if summed else {"chunk_size": 64 * points}
    kernel = auto_vmap(1, 1, **options)(lambda x, y: f(x, y))
    return {
        "`jax.vmap`": lambda x, y: jax.vmap(lambda x: row(f, x, y))(x),
        "`lax.map`": partial(by_rows, f),
        "by hand": lambda x, y: by_rows(f.rest, jax.vmap(f.of_x)(x), jax.vmap(f.of_y)(y)),
        "rankax": lambda x, y: kernel(x[:, None], y),
    }


def timed(functions: dict[str, Any], args: tuple[Any, ...], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each function, which take turns."""
    compiled = {name: jax.jit(f).lower(*args).compile() for name, f in functions.items()}
    spent: dict[str, list[float]] = {name: [] for name in functions}
    for _ in page.turns(rounds + 1):
        for name, f in compiled.items():
            begin = time.process_time()
            jax.block_until_ready(f(*args))
            spent[name].append(1e3 * (time.process_time() - begin))
    return {name: statistics.median(times[1:]) for name, times in spent.items()}


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(KERNELS))
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    if unknown := set(given.names) - KERNELS.keys():
        parser.error(f"no kernel {min(unknown)!r}: the kernels are {', '.join(KERNELS)}")
    os.sched_setaffinity(0, {0})
    rows = list[tuple[float, str]]()
    for name in given.names or KERNELS:
        f = KERNELS[name]
        args = tuple(
            jnp.asarray(R.normal(size=(given.points, f.size)), jnp.float32) for _ in range(2)
        )
        for kind in ("sum", "map"):
            own = ways(f, given.points, summed=kind == "sum")
            gradients = {
                way: jax.grad(lambda x, y, h=h: jnp.sum(jnp.sin(h(x, y))), (0, 1))
                for way, h in own.items()
            }
            for mode, functions in ((kind, own), (f"{kind}, gradient", gradients)):
                plain, rows_at_once, by_hand, mine = timed(functions, args, given.rounds).values()
                times = plain, rows_at_once, by_hand, mine
                ratio, beside = mine / min(plain, rows_at_once), mine / by_hand
                shown = " | ".join(f"{t:.2f}" for t in times)
                row = f"| {name} | {mode} | {shown} | {ratio:.2f} | {beside:.2f} |"
                rows.append((ratio, row))
                page.progress(row)
    head = HEAD.format(points=given.points, jax=jax.__version__, ways=" | ".join(own))
    lines = [row for _, row in sorted(rows, reverse=True)]
    page.finish(RESULTS, "\n".join([head, *lines, ""]), write=given.write)


if __name__ == "__main__":
    main()
