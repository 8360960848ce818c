# SPDX-License-Identifier: MIT
"""Eight reductions over all pairs of points, by several ways: for programs that ask about GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rankax import auto_vmap
from rankax.reductions import BottomK, Moments
from reductions import gauss, minus_square, square

ROWS = 64  # of `lax.map`


class Task(NamedTuple):
    """A reduction over pairs, by rankax and by `jax.numpy`."""

    name: str
    kernel: Callable[..., Any]
    reduce: Any
    plain: Callable[..., Any]
    modes: tuple[str, ...] = ("forward", "gradient")

    @property
    def arguments(self) -> int:
        return self.kernel.__code__.co_argcount

    def shapes(self, points: int) -> list[tuple[int, ...]]:
        """Return those of the arguments."""
        return [(points, 3), (points, 3), (points,)][: self.arguments]


def gravity(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
    """The pull on a point, which is a vector."""
    away = y - x
    return w * away / (jnp.sum(away**2) + 1e-2) ** 1.5


def nearest(values: jax.Array) -> Any:
    found, indices = lax.top_k(-values, 5)
    return -found, indices


TASKS = [
    Task("sum", gauss, "sum", jnp.sum),
    Task("gravity, a vector", gravity, "sum", lambda values: jnp.sum(values, axis=0)),
    Task("logsumexp", minus_square, "logsumexp", jax.nn.logsumexp),
    Task("min", square, "min", jnp.min),
    Task("argmin", square, "argmin", jnp.argmin, ("forward",)),
    Task("nearest 5", square, BottomK(5), nearest),
    Task("mean", square, "mean", jnp.mean),
    Task("moments", square, Moments(), lambda values: (jnp.mean(values), jnp.var(values))),
]


def ways(
    task: Task, ours: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the reduction for each of the first points: by `jax.vmap`, by blocks, by rankax.

    ``ours`` has the options of rankax by their name.
    """
    others = (0,) * (task.arguments - 1)

    def row(x: jax.Array, *arrays: Any) -> Any:
        return task.plain(jax.vmap(task.kernel, (None, *others))(x, *arrays))

    def blocks(x: jax.Array, *arrays: Any) -> Any:
        return lax.map(jax.checkpoint(lambda own: row(own, *arrays)), x, batch_size=ROWS)

    yield "`jax.vmap`", lambda x, *arrays: jax.vmap(lambda own: row(own, *arrays))(x)
    yield f"`lax.map` of {ROWS} rows", blocks
    for name, options in ours.items():
        ranks = (1, 1, 0)[: task.arguments]
        call = auto_vmap(*ranks, reduce=task.reduce, reduce_axis=-1, **options)(task.kernel)
        yield name, lambda x, *arrays, f=call: f(x[:, None], *arrays)


def of_squares(fun: Callable[..., Any], mode: str, count: int) -> Callable[..., Any]:
    """Return a reduction, or the gradient of the sum of its squares by all arguments."""
    if mode == "forward":
        return fun

    def total(*arrays: Any) -> jax.Array:
        leaves = jax.tree.leaves(fun(*arrays))
        return sum(jnp.sum(x**2) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

    return jax.grad(total, tuple(range(count)))
