# SPDX-License-Identifier: MIT
"""Random straight-line kernels of pairs in one kernel (`fused=True`), against the walk by loops.

A kernel is a list of steps, each of which applies an operation to earlier numbers or vectors: of
the row, of the column, or computed. What it sums, and its gradient, must be what loops return.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax import auto_vmap
from rankax.reductions import ByLabel, Moments, Several

KINDS = ("fused",)

# From numbers to a number, and so for each number of a vector. None amplifies rounding much.
ONE = {
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "exp": lambda a: jnp.exp(-jnp.abs(a)),
    "log": lambda a: jnp.log(a * a + 0.5),
    "log1p": lambda a: jnp.log1p(a * a),
    "expm1": lambda a: jnp.expm1(jnp.tanh(a)),
    "sqrt": lambda a: jnp.sqrt(a * a + 0.5),
    "rsqrt": lambda a: lax.rsqrt(a * a + 0.5),
    "cube": lambda a: jnp.tanh(a) ** 3,
    "inverse": lambda a: 1 / (a * a + 0.5),
    "power": lambda a: jnp.power(a * a + 0.5, 0.3),
    "erf": lax.erf,
    "erfc": lax.erfc,
    "atan": jnp.arctan,
    "asinh": jnp.arcsinh,
    "logistic": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "half": lambda a: a.astype(jnp.float16).astype(jnp.float32) * 0 + a,
    "rounded": lambda a: jnp.floor(a * 0 + 1.5) * a,
    "negative": lambda a: -0.5 * a,
    "kept": lax.stop_gradient,
    "compiled": jax.jit(lambda a: jnp.sin(a) * 0.5),
    "remembered": jax.checkpoint(lambda a: jnp.cos(a) * 0.5),
}
TWO = {
    "plus": lambda a, b: 0.5 * (a + b),
    "minus": lambda a, b: 0.5 * (a - b),
    "times": lambda a, b: jnp.tanh(a) * b,
    "over": lambda a, b: a / (b * b + 0.5),
    "max": lambda a, b: jnp.maximum(a, b),
    "min": lambda a, b: jnp.minimum(a, b),
    "atan2": lambda a, b: jnp.arctan2(a, b * b + 0.5),
    "where": lambda a, b: jnp.where(a > b, a, 0.5 * b),
    "clip": lambda a, b: jnp.clip(a, -0.7, 0.9) + 0 * b,
    "select": lambda a, b: lax.select_n((a > 0) & (b > 0), a, b),
    "branch": lambda a, b: lax.cond(jnp.sum(a) > 0, lambda: a * 0.5, lambda: a + 0 * b),
}
TO_NUMBER = {
    "sum": jnp.sum,
    "norm": lambda v: jnp.sqrt(v @ v + 0.1),
    "first": lambda v: v[0],
    "last": lambda v: v[-1],
    "largest": jnp.max,
    "product": lambda v: jnp.prod(jnp.tanh(v)),
}
TO_VECTOR = {
    "stacked": lambda v, a: jnp.stack([a, v[1], v[0]]),
    "scaled": lambda v, a: jnp.tanh(a) * v,
    "reversed": lambda v, a: v[::-1] + a * 0,
    "rolled": lambda v, a: jnp.roll(v, 1),
    "matrix": lambda v, a: jnp.array([[0.1, 0.2, 0.3], [0.5, -0.1, 0.2], [0.3, 0.3, 0.1]]) @ v,
    "outer": lambda v, a: 0.3 * jnp.outer(jnp.tanh(v), jnp.array([0.1, 0.2, 0.7])) @ v,
    "summed": lambda v, a: 0.3 * jnp.cumsum(v),
    "crossed": lambda v, a: jnp.cross(jnp.tanh(v), jnp.array([0.5, -0.2, 0.1])),
    "set": lambda v, a: v.at[1].set(a),
    "added": lambda v, a: v.at[jnp.array([0, 2, 0])].add(a),
    "taken": lambda v, a: v[jnp.array([2, 0, 0])],
    "padded": lambda v, a: jnp.pad(v[:2], (1, 0)),
}
REDUCTIONS = {
    **{how: how for how in ("sum", "mean", "logsumexp", "max", "min")},
    "moments": Moments(),
    "several": Several("sum", "max", "argmin"),
}
LABELS = {f"{how} by label": how for how in ("sum", "mean", "max", "logsumexp")}
LAYOUTS = {
    "rows": ((4, 1), (30,), 1),
    "columns": ((4, 1), (30,), 0),
    "both": ((4, 1), (30,), None),
    "three": ((3, 1, 2), (5, 1), (0, 2)),
    "few": ((1, 1), (300,), 1),
    "one": ((4, 1), (1,), 1),
}
Step = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Fused:
    """A kernel of pairs, and how it is reduced."""

    steps: tuple[Step, ...]
    reduce: str = "sum"
    layout: str = "rows"
    where: bool = False
    second: bool = False
    seed: int = 0

    def item(self, x: Any, y: Any, w: Any) -> Any:
        numbers, vectors = [w, x[0] * y[1]], [x, y, x - y]
        for name, i, j in self.steps:
            a, b = numbers[i % len(numbers)], numbers[j % len(numbers)]
            u, v = vectors[i % len(vectors)], vectors[j % len(vectors)]
            if name in TO_NUMBER:
                numbers.append(TO_NUMBER[name](u))
            elif name in TO_VECTOR:
                vectors.append(TO_VECTOR[name](u, b))
            elif (i + j) % 2:
                numbers.append(ONE[name](a) if name in ONE else TWO[name](a, b))
            else:
                vectors.append(ONE[name](u) if name in ONE else TWO[name](u, v))
        out = {"a": numbers[-1], "v": vectors[-1]}
        out |= {"b": jnp.floor(2 * w).astype(int) + 1} if self.reduce in LABELS else {}
        return out | ({"ok": numbers[-1] > -0.4} if self.where else {})

    def kernel(self, **options: Any) -> Any:
        how = REDUCTIONS.get(self.reduce)
        reduce: Any = {"a": how, "v": "sum"} | ({"ok": "any"} if self.where else {})
        reduce = ByLabel("b", 4, LABELS[self.reduce]) if self.reduce in LABELS else reduce
        more = {"where": "ok"} if self.where else {}
        axis = LAYOUTS[self.layout][2]
        kernel = auto_vmap(x=1, y=1, w=0, reduce=reduce, reduce_axis=axis, **more, **options)
        return kernel(self.item)

    def check(self) -> None:
        """Compare values and derivatives."""
        rows, columns, _ = LAYOUTS[self.layout]
        draw = np.random.default_rng(self.seed).normal
        args = [draw(size=s).astype("float32") for s in ((*rows, 3), (*columns, 3), columns)]
        fused, plain = self.kernel(fused=True), self.kernel()
        wholes = [jax.jit(self._whole(kernel))(*args) for kernel in (fused, plain)]
        got, want = map(jax.tree.leaves, wholes)
        assert jax.tree.structure(wholes[0]) == jax.tree.structure(wholes[1])
        for a, b in zip(got, want, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            largest = np.abs(np.asarray(b)[np.isfinite(b)]).max(initial=1e-2)
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * largest)

    def _whole(self, kernel: Any) -> Any:
        def loss(*args: Any) -> Any:
            outs = [x for x in jax.tree.leaves(kernel(*args)) if x.dtype == jnp.float32]
            finite = [jnp.where(jnp.isfinite(x), x, 0) for x in outs]  # a mean of no items is NaN
            return sum(jnp.sum(jnp.sin(0.1 * x)) for x in finite)

        gradient = jax.grad(loss, (0, 1, 2))

        def whole(*args: Any) -> Any:
            found = kernel(*args), gradient(*args)
            if not self.second:
                return found
            return *found, jax.jvp(gradient, args, tuple(jnp.cos(x) for x in args))[1]

        return whole

    def simpler(self) -> Iterator[Fused]:
        """Yield programs with less in them."""
        for n in range(len(self.steps)):
            yield dataclasses.replace(self, steps=self.steps[:n] + self.steps[n + 1 :])
        plain = {"where": False, "second": False, "reduce": "sum", "layout": "rows"}
        for name, value in plain.items():
            if getattr(self, name) != value:
                yield dataclasses.replace(self, **{name: value})


def draw(seed: int, kind: str = "fused") -> Fused:
    """Make a program of a seed."""
    rng = random.Random(seed)
    names = [*ONE, *TWO, *TO_NUMBER, *TO_VECTOR]
    steps = tuple(
        (rng.choice(names), rng.randrange(8), rng.randrange(8)) for _ in range(rng.randint(2, 7))
    )
    return Fused(
        steps,
        rng.choice([*REDUCTIONS, *LABELS, "sum", "sum"]),
        rng.choice([*LAYOUTS, "rows", "rows"]),
        rng.random() < 0.2,
        rng.random() < 0.25,
        seed,
    )
