# SPDX-License-Identifier: MIT
"""Time kernels of many fields beside what an expert writes by hand.

    python benchmarks/by_hand.py [NAME ...] [--rounds 9] [--write]

prints, for each kernel and for its gradient, milliseconds of `jax.vmap`, of a loop by hand in
chunks or blocks of as many items (`jax.lax.map` or `jax.lax.scan`, with `jax.checkpoint`), and of
rankax with its defaults; their temporaries; and how long rankax takes beside the better of the
first two. Where it takes longest comes first. Gradients are of half the sum of the
squares of all results. One core; processor times in turns, the median of all rounds. ``--write``
stores the table.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import page
from once import timed
from rankax import auto_vmap

RESULTS = page.RESULTS / "by_hand.md"
R = np.random.default_rng(0)
HEAD = """# Many fields, beside by hand

Written by `python benchmarks/by_hand.py --write`. One core, JAX {jax}, float32. Processor
time in ms, the median of some turns, and temporaries in MB. Gradients are of half the sum of the
squares of all results. Where rankax takes longest comes first. In {count} rows, rankax takes
{median:.2f} of the time of the better of `jax.vmap` and the loop by hand in the median, and
{worst:.2f} at worst. `jax.vmap` stores what its reverse pass needs of all items, and the others
evaluate them again.

| kernel | `jax.vmap` | by hand | rankax | `jax.vmap`, MB | by hand, MB | rankax, MB | beside the better |
|---|---:|---:|---:|---:|---:|---:|---:|"""  # noqa: E501

OPS = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min}
OPS |= {"logsumexp": jax.nn.logsumexp}


class Row(NamedTuple):
    """A program in three forms, and its arguments."""

    vmap: Callable[..., Any]
    by_hand: Callable[..., Any]
    rankax: Callable[..., Any]
    args: tuple[Any, ...]
    has_gradient: bool = True


def normal(*shape: int) -> Any:
    return jnp.asarray(R.normal(size=shape), jnp.float32)


def a_map(f: Any, *args: Any, chunk: int = 1000, gradient: bool = True) -> Row:
    """A map in chunks over axis 0 of each argument."""

    def by_hand(*args: Any) -> Any:
        return lax.map(jax.checkpoint(lambda own: f(*own)), args, batch_size=chunk)

    kernel = auto_vmap(*(x.ndim - 1 for x in args), chunk_size=chunk)(lambda *own: f(*own))
    return Row(jax.vmap(f), by_hand, kernel, args, gradient)


def a_fold(f: Any, reduce: str, *args: Any, block: int = 1000, gradient: bool = True) -> Row:
    """A reduction over axis 0 of each argument; by hand, of blocks, whose results are reduced."""
    op = OPS[reduce]

    def by_hand(*args: Any) -> Any:
        blocks = [x.reshape(-1, block, *x.shape[1:]) for x in args]
        of_block = jax.checkpoint(lambda own: op(jax.vmap(f)(*own), axis=0))
        return op(lax.map(of_block, tuple(blocks)), axis=0)

    kernel = auto_vmap(*(x.ndim - 1 for x in args), reduce=reduce)(lambda *own: f(*own))
    return Row(lambda *own: op(jax.vmap(f)(*own), axis=0), by_hand, kernel, args, gradient)


def a_pair(f: Any, reduce: str, xs: Any, ys: Any, gradient: bool = True) -> Row:
    """A reduction over y of all pairs; by hand, 64 rows at once."""
    op = OPS[reduce]

    def row(x: Any, ys: Any) -> Any:
        return op(jax.vmap(lambda y: f(x, y))(ys), axis=0)

    def by_hand(xs: Any, ys: Any) -> Any:
        return lax.map(jax.checkpoint(lambda x: row(x, ys)), xs, batch_size=64)

    kernel = auto_vmap(xs.ndim - 1, ys.ndim - 1, reduce=reduce, reduce_axis=1)(lambda x, y: f(x, y))

    def mine(xs: Any, ys: Any) -> Any:
        return kernel(xs[:, None], ys)

    return Row(lambda xs, ys: jax.vmap(lambda x: row(x, ys))(xs), by_hand, mine, (xs, ys), gradient)


def a_column(f: Any, reduce: str, *args: Any, gradient: bool = True) -> Row:
    """A reduction over axis 0 of matrices; by hand, a scan over rows that holds one of results."""
    op = OPS[reduce]
    join = {"sum": jnp.add, "max": jnp.maximum, "logsumexp": jnp.logaddexp}[reduce]

    def by_hand(*args: Any) -> Any:
        def step(held: Any, own: Any) -> tuple[Any, None]:
            return join(held, jax.vmap(f)(*own)), None

        first = jax.vmap(f)(*(x[0] for x in args))
        return lax.scan(jax.checkpoint(step), first, tuple(x[1:] for x in args))[0]

    kernel = auto_vmap(*(0 for _ in args), reduce=reduce, reduce_axis=0)(lambda *own: f(*own))
    plain = jax.vmap(jax.vmap(f))
    return Row(lambda *own: op(plain(*own), axis=0), by_hand, kernel, args, gradient)


def dot3(x: Any, y: Any) -> Any:
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2]


def distance(x: Any, y: Any) -> Any:
    return jnp.sqrt(jnp.sum((x - y) ** 2) + 1e-6)


def lennard_jones(x: Any, y: Any) -> Any:
    s = 1 / (jnp.sum((x - y) ** 2) + 0.1) ** 3
    return s * s - s


def coulomb(x: Any, y: Any) -> Any:
    off = x - y[:3]
    return y[3] * off / (jnp.sum(off**2) + 1e-3) ** 1.5


def haversine(x: Any, y: Any) -> Any:
    a = jnp.sin((x[0] - y[0]) / 2) ** 2 + jnp.cos(x[0]) * jnp.cos(y[0]) * (
        jnp.sin((x[1] - y[1]) / 2) ** 2
    )
    return 2 * jnp.arcsin(jnp.sqrt(jnp.clip(a, 0, 1)))


def escape(c: Any) -> Any:
    def step(_: Any, z: Any) -> Any:
        return jnp.clip(jnp.array([z[0] ** 2 - z[1] ** 2, 2 * z[0] * z[1]]) + c, -9, 9)

    return jnp.sum(lax.fori_loop(0, 32, step, c) ** 2)


def triangle(ray: Any, corners: Any) -> Any:
    origin, direction = ray[:3], ray[3:]
    one, two, three = corners
    p = jnp.cross(direction, three - one)
    det = dot3(two - one, p) + 1e-3
    u = dot3(origin - one, p) / det
    q = jnp.cross(origin - one, two - one)
    v = dot3(direction, q) / det
    hit = (u > 0) & (v > 0) & (u + v < 1)
    return jnp.where(hit, dot3(three - one, q) / det, 1e6)


def rotated(q: Any, v: Any) -> Any:
    t = 2 * jnp.cross(q[1:], v)
    return v + q[0] * t + jnp.cross(q[1:], t)


def black_scholes(p: Any) -> Any:
    spot, strike, time, rate, sigma = jnp.exp(p * 0.1)
    d = (jnp.log(spot / strike) + (rate + sigma**2 / 2) * time) / (sigma * jnp.sqrt(time))
    cdf = jax.scipy.stats.norm.cdf
    return spot * cdf(d) - strike * jnp.exp(-rate * time) * cdf(d - sigma * jnp.sqrt(time))


def runge_kutta(y: Any) -> Any:
    def f(y: Any) -> Any:
        return jnp.stack([y[1], -jnp.sin(y[0])])

    def step(y: Any, _: Any) -> tuple[Any, None]:
        a = f(y)
        b = f(y + 0.025 * a)
        c = f(y + 0.025 * b)
        return y + 0.05 / 6 * (a + 2 * b + 2 * c + f(y + 0.05 * c)), None

    return lax.scan(step, y, None, 64)[0]


def kalman(ys: Any) -> Any:
    def step(state: Any, y: Any) -> tuple[Any, Any]:
        mean, var = state
        gain = (var + 0.1) / (var + 1.1)
        mean, off = mean + gain * (y - mean), y - mean
        return (mean, (1 - gain) * (var + 0.1)), -0.5 * off**2 / (var + 1.1)

    return jnp.sum(lax.scan(step, (0.0, 1.0), ys)[1])


def eigenvalues(m: Any) -> Any:
    half = (m[0, 0] + m[1, 1]) / 2
    root = jnp.sqrt(jnp.abs(half**2 - m[0, 0] * m[1, 1] + m[0, 1] * m[1, 0]))
    return jnp.stack([half - root, half + root])


def inverse(m: Any) -> Any:
    a, b, c = m
    rows = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)], axis=1)
    return rows / (dot3(a, jnp.cross(b, c)) + 3)


def legendre(x: Any) -> Any:
    def step(n: Any, pair: Any) -> Any:
        last, now = pair
        return now, ((2 * n + 1) * x * now - n * last) / (n + 1)

    return lax.fori_loop(1, 12, step, (jnp.ones_like(x), x))[1]


def windows(signal: Any) -> Callable[[Any], Any]:
    taps = normal(32)
    return lambda at: taps @ lax.dynamic_slice(signal, (at,), (32,))


SIGNAL, IMAGE, TABLE = normal(100_032), normal(256, 256), normal(1024)
W_IN, W_OUT, LARGE = normal(32, 64) / 6, normal(64) / 8, normal(1024, 1024) / 32
FREQUENCIES = jnp.linspace(0.1, 9, 400, dtype=jnp.float32)


def net(x: Any) -> Any:
    return jnp.tanh(x @ W_IN) @ W_OUT


def huber(x: Any) -> Any:
    size = jnp.abs(x[0] * 0.3 + x[1] * 0.2 - x[2])
    return jnp.where(size < 1, size**2 / 2, size - 0.5)


def bilinear(p: Any) -> Any:
    at = jnp.clip(jnp.abs(p) * 50, 0, 254)
    i, (u, v) = at.astype(jnp.int32), at - jnp.floor(at)
    a, b = IMAGE[i[0], i[1]], IMAGE[i[0] + 1, i[1]]
    c, d = IMAGE[i[0], i[1] + 1], IMAGE[i[0] + 1, i[1] + 1]
    return (1 - u) * (1 - v) * a + u * (1 - v) * b + (1 - u) * v * c + u * v * d


ROWS: dict[str, Callable[[], Row]] = {
    "sum of (3000, 4000) over axis 0": lambda: a_column(
        lambda a: jnp.exp(-a * a), "sum", normal(3000, 4000)
    ),
    "max over axis 0": lambda: a_column(lambda a: jnp.exp(-a * a), "max", normal(3000, 4000)),
    "logsumexp of (300, 2000) over axis 0": lambda: a_column(
        lambda a: a * 2, "logsumexp", normal(300, 2000)
    ),
    "sum of (400000, 8) over axis 0": lambda: a_column(
        lambda a: jnp.exp(-a * a), "sum", normal(400_000, 8)
    ),
    "weighted sum over axis 0": lambda: a_column(
        lambda a, w: w * jnp.sqrt(1 + a * a), "sum", normal(1000, 4000), normal(1000, 4000)
    ),
    "two layers of 1024": lambda: a_map(
        lambda v: jnp.tanh(LARGE @ jnp.tanh(LARGE @ v)), normal(1000, 1024), chunk=200
    ),
    "eigenvalues of 2 x 2": lambda: a_map(eigenvalues, normal(300_000, 2, 2), chunk=4000),
    "inverse of 3 x 3": lambda: a_map(inverse, normal(100_000, 3, 3), chunk=4000),
    "singular values of 4 x 4": lambda: a_map(
        lambda m: jnp.linalg.svd(m, compute_uv=False), normal(4000, 4, 4), chunk=500
    ),
    "Runge-Kutta, 64 steps": lambda: a_map(runge_kutta, normal(4096, 2), chunk=256),
    "Kalman filter, 100 steps": lambda: a_map(kalman, normal(2000, 100), chunk=200),
    "escape time, 32 steps": lambda: a_map(escape, normal(20_000, 2)),
    "rotations by quaternions": lambda: a_map(
        rotated, normal(200_000, 4), normal(200_000, 3), chunk=10_000
    ),
    "option prices": lambda: a_map(black_scholes, normal(200_000, 5), chunk=10_000),
    "Legendre polynomials": lambda: a_map(legendre, normal(400_000), chunk=10_000),
    "windows of a signal": lambda: a_map(
        windows(SIGNAL), jnp.arange(100_000), chunk=5000, gradient=False
    ),
    "bilinear look-ups in an image": lambda: a_map(bilinear, normal(200_000, 2), chunk=10_000),
    "transforms of 256 numbers": lambda: a_map(
        lambda x: jnp.abs(jnp.fft.rfft(x)) ** 2, normal(4000, 256), chunk=500
    ),
    "sorted rows of 64": lambda: a_map(jnp.sort, normal(10_000, 64)),
    "a small net": lambda: a_map(net, normal(50_000, 32), chunk=5000),
    "gradient of a small net": lambda: a_map(
        jax.grad(lambda x: net(x)), normal(50_000, 32), chunk=5000
    ),
    "softmax of 32": lambda: a_map(jax.nn.softmax, normal(50_000, 32), chunk=5000),
    "norms of 3-vectors": lambda: a_map(
        lambda v: v / jnp.sqrt(v @ v + 1e-3), normal(500_000, 3), chunk=10_000
    ),
    "loss of a small net": lambda: a_fold(lambda x: net(x) ** 2, "mean", normal(100_000, 32)),
    "robust loss": lambda: a_fold(huber, "sum", normal(1_000_000, 3)),
    "log-likelihood of a mixture": lambda: a_fold(
        lambda x: jax.nn.logsumexp(-((x - jnp.arange(8.0)) ** 2)), "sum", normal(200_000)
    ),
    "log of a sum of exponentials": lambda: a_fold(
        lambda v: -jnp.sum(v * v), "logsumexp", normal(1_000_000, 3)
    ),
    "largest of a polynomial": lambda: a_fold(
        lambda x: ((x - 1) * x + 2) * x - x**4, "max", normal(2_000_000)
    ),
    "Monte Carlo integral": lambda: a_fold(
        lambda p: jnp.cos(p[0] * p[1]) * jnp.exp(-(p[2] ** 2)), "mean", normal(500_000, 3)
    ),
    "outer products": lambda: a_fold(lambda v: jnp.outer(v, v), "mean", normal(100_000, 8)),
    "Lennard-Jones energies": lambda: a_pair(
        lennard_jones, "sum", normal(2000, 3), normal(2000, 3)
    ),
    "electric field": lambda: a_pair(coulomb, "sum", normal(1000, 3), normal(2000, 4)),
    "nearest by haversine": lambda: a_pair(haversine, "min", normal(1000, 2), normal(1000, 2)),
    "farthest": lambda: a_pair(distance, "max", normal(2000, 3), normal(2000, 3)),
    "density estimates": lambda: a_pair(
        lambda x, y: -jnp.sum((x - y) ** 2), "logsumexp", normal(2000, 2), normal(2000, 2)
    ),
    "a Sinkhorn step": lambda: a_pair(
        lambda x, y: y[3] - jnp.sum((x - y[:3]) ** 2), "logsumexp", normal(2000, 3), normal(2000, 4)
    ),
    "rays and triangles": lambda: a_pair(triangle, "min", normal(1000, 6), normal(500, 3, 3)),
    "Lomb-Scargle": lambda: a_pair(
        lambda f, p: p[1] * jnp.cos(f * p[0]), "sum", FREQUENCIES, normal(4000, 2)
    ),
    "cosine similarities": lambda: a_pair(
        lambda x, y: x @ y / jnp.sqrt((x @ x) * (y @ y)), "max", normal(2000, 32), normal(2000, 32)
    ),
    "kernel regression": lambda: a_pair(
        lambda x, y: jnp.exp(x @ y[:16] / 16) * y[16:], "sum", normal(2000, 16), normal(2000, 20)
    ),
    "polynomial kernel": lambda: a_pair(
        lambda x, y: (1 + x @ y / 16) ** 3, "sum", normal(2000, 16), normal(2000, 16)
    ),
    "chi squared of models": lambda: a_pair(
        lambda m, d: (d[1] - m[0] * jnp.exp(-(m[1] ** 2) * d[0])) ** 2 * d[2],
        *("sum", normal(500, 2), normal(4000, 3)),
    ),
    "logistic regression of draws": lambda: a_pair(
        lambda w, d: jax.nn.log_sigmoid(w @ d[:8] * d[8]), "sum", normal(500, 8), normal(4000, 9)
    ),
    "Hamming distances": lambda: a_pair(
        lambda x, y: jnp.sum(x != y),
        *("min", jnp.asarray(R.integers(0, 2, (1000, 32)))),
        *(jnp.asarray(R.integers(0, 2, (1000, 32))), False),
    ),
    "interpolation in a table": lambda: a_pair(
        lambda x, y: jnp.interp(jnp.abs(x - y), jnp.arange(1024.0), TABLE, period=None),
        *("sum", normal(300) * 100, normal(1000) * 100),
    ),
}


def loss(f: Any, *args: Any) -> Any:
    # Of squares: XLA:CPU computes a sine number by number, which may take longer than the kernel.
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(f(*args))) / 2


def megabytes(f: Any, args: tuple[Any, ...]) -> float:
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes / 1e6


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    if unknown := set(given.names) - ROWS.keys():
        parser.error(f"no kernel {min(unknown)!r}: the kernels are {', '.join(ROWS)}")
    os.sched_setaffinity(0, {0})
    rows = list[tuple[float, str]]()
    for name in given.names or ROWS:
        row = ROWS[name]()
        forms = {"vmap": row.vmap, "by hand": row.by_hand, "rankax": row.rankax}
        for mode in ("", ", gradient") if row.has_gradient else ("",):
            if mode:
                every = tuple(range(len(row.args)))
                forms = {way: jax.grad(partial(loss, f), every) for way, f in forms.items()}
            plain, by_hand, mine = timed(forms, row.args, given.rounds).values()
            ratio = mine / min(plain, by_hand)
            temporaries = [megabytes(f, row.args) for f in forms.values()]
            shown = " | ".join(f"{x:.2f}" for x in (plain, by_hand, mine, *temporaries, ratio))
            rows.append((ratio, f"| {name}{mode} | {shown} |"))
            page.progress(rows[-1][1])
    ratios = [ratio for ratio, _ in rows]
    median, worst = statistics.median(ratios), max(ratios)
    head = HEAD.format(jax=jax.__version__, count=len(rows), median=median, worst=worst)
    lines = [line for _, line in sorted(rows, reverse=True)]
    page.finish(RESULTS, "\n".join([head, *lines, ""]), write=given.write)


if __name__ == "__main__":
    main()
