# SPDX-License-Identifier: MIT
"""Time pair kernels whose arguments have work of their own, or multiply, beside plain JAX.

    python benchmarks/once.py [NAME ...] [--points 1000] [--rounds 5] [--write]

prints, for sums over pairs (``reduce="sum", reduce_axis=-1``) and for maps in chunks of 10,000
pairs, forward and gradient, milliseconds of `jax.vmap`, of `jax.lax.map` of 64 rows, and of rankax,
and how long rankax takes beside the better of them. One core; processor times in turns, the least
of all rounds. ``--write`` stores the table.
"""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import page
from rankax import auto_vmap

RESULTS = page.RESULTS / "once.md"
R = np.random.default_rng(0)


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
    return TABLE[(jnp.abs(x[0]) * 100).astype(jnp.int32) % 512]


# Each has the length of its points, and the kernel of a pair.
KERNELS: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "net 3-64-64-3": (3, lambda x, y: jnp.exp(-jnp.sum((net(SMALL, x) - net(SMALL, y)) ** 2))),
    "net 3-256-16": (3, lambda x, y: jnp.exp(-jnp.sum((net(WIDE, x) - net(WIDE, y)) ** 2))),
    "tangent kernel": (3, lambda x, y: gradient(x) @ gradient(y)),
    "one-sided products": (3, lambda x, y: jnp.cos(x[0]) * jnp.sin(y[1]) + jnp.exp(y.sum()) * x[2]),
    "Gaussian, nothing to move": (3, lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2))),
    "exp(a @ b), 16": (16, lambda x, y: jnp.exp(x @ y / 16)),
    "exp(a @ b), 64": (64, lambda x, y: jnp.exp(x @ y / 64)),
    "attention": (16, lambda x, y: jnp.exp((x @ Q) @ (y @ K) / 16)),
    "splines": (3, lambda x, y: jnp.sum(spline(x) * spline(y))),
    "a factorisation for each x": (3, lambda x, y: jnp.sin(factor(x) @ y)),
    "encoders, decoder of pairs": (
        3,
        lambda x, y: net(DECODER, jnp.concatenate([net(ENCODER, x), net(ENCODER, y)]))[0],
    ),
    "rotations before distances": (
        3,
        lambda x, y: jnp.sqrt(1e-3 + jnp.sum((rotated(x) - rotated(y)) ** 2)),
    ),
    "log-densities": (3, lambda x, y: jnp.tanh(density(x) - density(y))),
    "harmonics": (3, lambda x, y: harmonics(x) @ harmonics(y)),
    "tables": (3, lambda x, y: jnp.exp(-jnp.sum((looked_up(x) - looked_up(y)) ** 2))),
    "fixed points": (3, lambda x, y: jnp.exp(-jnp.sum((fixed_point(x) - y) ** 2))),
    "cosine similarity": (
        16,
        lambda x, y: (x @ y) / (jnp.linalg.norm(x) * jnp.linalg.norm(y) + 1e-3),
    ),
    "squared distance by products": (16, lambda x, y: jnp.exp(-(x @ x + y @ y - 2 * x @ y) / 16)),
    "gravity": (3, lambda x, y: jnp.sum(x - y) / (1e-2 + jnp.sum((x - y) ** 2)) ** 1.5),
    "sigmoid of a bilinear form": (16, lambda x, y: jax.nn.sigmoid(x @ Q @ y / 16)),
}


def ways(f: Any, *, summed: bool) -> dict[str, Any]:
    def row(x: Any, y: Any) -> Any:
        outs = jax.vmap(lambda y: f(x, y))(y)
        return jnp.sum(outs) if summed else outs

    options = {"reduce": "sum", "reduce_axis": -1} if summed else {"chunk_size": 10_000}
    kernel = auto_vmap(1, 1, **options)(f)
    return {
        "jax.vmap": lambda x, y: jax.vmap(lambda x: row(x, y))(x),
        "lax.map": lambda x, y: jax.lax.map(lambda x: row(x, y), x, batch_size=64),
        "rankax": lambda x, y: kernel(x[:, None], y),
    }


def timed(functions: dict[str, Any], args: tuple[Any, ...], rounds: int) -> dict[str, float]:
    """Return the least milliseconds of each function, which take turns."""
    compiled = {name: jax.jit(f).lower(*args).compile() for name, f in functions.items()}
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds + 1):
        for name, f in compiled.items():
            begin = time.process_time()
            jax.block_until_ready(f(*args))
            best[name] = min(best[name], 1e3 * (time.process_time() - begin))
    return best


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(KERNELS))
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if unknown := set(given.names) - KERNELS.keys():
        parser.error(f"no kernel {min(unknown)!r}: the kernels are {', '.join(KERNELS)}")
    os.sched_setaffinity(0, {0})
    lines = [
        "| kernel | | `jax.vmap` | `lax.map` | rankax | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name in given.names or KERNELS:
        size, f = KERNELS[name]
        args = tuple(
            jnp.asarray(R.normal(size=(given.points, size)), jnp.float32) for _ in range(2)
        )
        for kind in ("sum", "map"):
            own = ways(f, summed=kind == "sum")
            gradients = {
                way: jax.grad(lambda x, y, h=h: jnp.sum(jnp.sin(h(x, y))), (0, 1))
                for way, h in own.items()
            }
            for mode, functions in ((kind, own), (f"{kind}, gradient", gradients)):
                t = timed(functions, args, given.rounds)
                ratio = t["rankax"] / min(t["jax.vmap"], t["lax.map"])
                shown = " | ".join(f"{t[way]:.2f}" for way in own)
                lines.append(f"| {name} | {mode} | {shown} | {ratio:.2f} |")
                page.progress(lines[-1])
    head = "# Work that belongs to one side\n\nWritten by `python benchmarks/once.py --write`.\n\n"
    page.finish(RESULTS, head + "\n".join([*lines, ""]), write=given.write)


if __name__ == "__main__":
    main()
