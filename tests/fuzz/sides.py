# SPDX-License-Identifier: MIT
"""Random kernels whose arguments have dear work of their own, against nested `jax.vmap`.

A kernel encodes each of its two or three arguments by some parts, joins what they return, and may
encode what it joined of the first two. What is hoisted, and what it sends back, must be what nested
maps of the whole kernel return.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax import auto_vmap

KINDS = ("sides",)

KNOTS = np.linspace(-3, 3, 8)
TABLE = np.cos(np.arange(48.0)).reshape(16, 3)


def _rule(factor: float, *, forward: bool) -> Any:
    """Return a function whose rule is not its derivative, which must move with it."""
    fun = (jax.custom_jvp if forward else jax.custom_vjp)(lambda v: jnp.sin(v) * jnp.sum(v * v))
    slope = lambda v: factor * jnp.cos(v) * jnp.tanh(v)  # noqa: E731
    if forward:
        fun.defjvp(lambda vs, ts: (fun(*vs), slope(*vs) * ts[0]))
    else:
        fun.defvjp(lambda v: (fun(v), v), lambda v, t: (slope(v) * t,))
    return fun


def ended(v: Any) -> Any:
    """Halve until it is small."""
    return lax.while_loop(lambda z: z @ z > 0.05, lambda z: jnp.sin(z) * 0.6, v)


# From a vector of an argument to a vector. `w`, (3, 8), is closed over.
PARTS = {
    "net": lambda v, w, key: jnp.tanh(jnp.tanh(v @ w) @ w.T),
    "spline": lambda v, w, key: jnp.interp(v, KNOTS, jnp.sin(KNOTS)) + w[:, 0],
    "bumps": lambda v, w, key: jnp.exp(-((v[:, None] - KNOTS) ** 2)) @ w[0],
    "solved": lambda v, w, key: jnp.linalg.solve(4 * jnp.eye(3) + jnp.outer(v, v), v),
    "factored": lambda v, w, key: jnp.linalg.cholesky(4 * jnp.eye(3) + w @ w.T) @ v * 0.3,
    "factor": lambda v, w, key: jnp.linalg.cholesky(4 * jnp.eye(3) + jnp.outer(v, v))[2],
    "normalised": lambda v, w, key: v - jax.nn.logsumexp(jnp.sin(v[0] * KNOTS)),
    "softmax": lambda v, w, key: jax.nn.softmax(v @ w)[:3] * 3,
    "looked up": lambda v, w, key: jnp.take(TABLE, (v[0] * v[0] * 9).astype(int) % 16, 0) * v,
    "column": lambda v, w, key: w[:, (jnp.abs(v[1]) * 9).astype(int) % 8] + jnp.sin(v),
    "fixed point": lambda v, w, key: lax.fori_loop(0, 6, lambda _, z: jnp.tanh(z + v) / 2, v),
    "scan": lambda v, w, key: lax.scan(lambda z, c: (jnp.sin(z + c), None), v, w.T)[0],
    "branch": lambda v, w, key: lax.cond(v[0] > 0, lambda v: jnp.tanh(v @ w) @ w.T, jnp.sin, v),
    "jvp rule": lambda v, w, key: _rule(1.25, forward=True)(v),
    "vjp rule": lambda v, w, key: _rule(1.25, forward=False)(v),
    "gradient": lambda v, w, key: jax.grad(lambda v: jnp.sum(jnp.tanh(v @ w) ** 2))(v),
    "remembered": jax.checkpoint(lambda v, w, key: jnp.cos(jnp.tanh(v @ w) @ w.T)),
    "compiled": lambda v, w, key: jax.jit(lambda v: jnp.tanh(v @ w) @ w.T)(v),
    "stopped": lambda v, w, key: v * lax.stop_gradient(jnp.tanh(v @ w) @ w.T),
    "noise": lambda v, w, key: v + jax.random.normal(key, v.shape, v.dtype),
    "same noise": lambda v, w, key: v * jax.random.normal(jax.random.key(3), v.shape, v.dtype),
    "root": lambda v, w, key: jnp.sqrt(jnp.tanh(v @ w) @ w[0] + v),  # NaN, unless left out
    "log": lambda v, w, key: jnp.log(jax.nn.relu(v + 0.6)) + jnp.tanh(v @ w) @ w.T,  # -inf, too
    "ended": lambda v, w, key: ended(v),
}
# In plain JAX, too: no reverse mode of the one, nothing forward of the other.
ONLY_FORWARD, ONLY_REVERSE, ONLY_WHERE = {"ended"}, {"vjp rule"}, {"root", "log"}

# From two vectors to a vector.
JOINS = {
    "difference": lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2)) * (a - b),
    "product": lambda a, b: jnp.tanh(a @ b) * jnp.ones_like(a),
    "matrix": lambda a, b: jnp.outer(jnp.sin(a), b) @ jnp.cos(a),
    "one side": lambda a, b: b,
    "numbers": lambda a, b: a[0] * jnp.sin(b),
}


def largest(a: Any, axes: Any, where: Any) -> Any:
    """Take the largest by its index: XLA may evaluate an item twice, and find none equal to it."""
    kept = tuple(n for axis, n in enumerate(a.shape) if axis not in axes)
    order = [axis for axis in range(a.ndim) if axis not in axes] + [*axes]
    a, where = (x.transpose(order).reshape(*kept, -1) for x in (a, where))
    first = jnp.argmax(lax.stop_gradient(jnp.where(where, a, -jnp.inf)), -1, keepdims=True)
    found = jnp.take_along_axis(a, first, -1)[..., 0]
    return jnp.where(jnp.any(where, -1), found, -jnp.inf)


REDUCED = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "logsumexp": jax.nn.logsumexp,
    "max": largest,
    "min": lambda a, axes, where: -largest(-a, axes, where),
}
# Batch shapes of the arguments, and the axes to choose from for a reduction.
LAYOUTS = {
    "pairs": (((5, 1), (7,)), (None, 0, -1)),
    "few": (((2, 1), (19,)), (None, 0, -1)),
    "single": (((1, 1), (9,)), (None, -1)),
    "crossed": (((6,), (4, 1)), (None, 0, -1)),
    "whole": (((3, 4), (4,)), (None, 0, -1)),
    "three": (((3, 1, 1), (4, 1), (5,)), (None, 0, (1, 2), (0, 2))),
    "two of three": (((3, 1, 1), (1, 4, 5), (5,)), (None, 1, (0, 1))),
}
TRANSFORMATIONS = ("value", "grad", "jvp", "hessian", "vmap of grad")


@dataclasses.dataclass(frozen=True)
class Sides:
    """A kernel of several arguments, and how it is called."""

    parts: tuple[tuple[str, ...], ...]  # of each argument
    joins: tuple[str, ...]
    of_two: tuple[str, ...] = ()  # after the first two are joined
    layout: str = "pairs"
    reduce: str | None = None
    axis: Any = None
    where: str | None = None  # what says which items count: an output, or an argument
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    transformation: str = "value"
    jit: bool = True
    seed: int = 0

    def item(self, *args: Any, w: Any, keys: Any) -> Any:
        sides = []
        for v, key, names in zip(args, keys, self.parts, strict=True):
            sides.append(functools.reduce(lambda v, name: PARTS[name](v, w, key), names, v))
        one, *others = sides
        for n, (join, other) in enumerate(zip(self.joins, others, strict=True)):
            one = JOINS[join](one, other)
            for name in () if n else self.of_two:
                one = PARTS[name](one, w, keys[0])
        out = {"a": jnp.sum(jnp.sin(one)), "v": one, "side": sides[0][0]}
        return out | ({"ok": _counts(args)} if self.where == "output" else {})

    def mine(self, w: Any, keys: Any, *args: Any) -> Any:
        given = {"ok": _counts(args)} if self.where == "argument" else {}
        return self.kernel(w)(*args, *keys, **given)

    def kernel(self, w: Any, **options: Any) -> Any:
        n, reduce = len(self.parts), {}
        if self.reduce:
            how = {"a": self.reduce, "v": "sum", "side": "mean"}
            how |= {"ok": "any"} if self.where == "output" else {}
            reduce = {"reduce": how, "reduce_axis": self.axis}
        reduce |= {"where": "ok"} if self.where else {}
        given = {**self.options, **options}
        if "devices" in given:
            given["devices"] = min(given["devices"], jax.device_count())

        ranks = {"ok": 0} if self.where == "argument" else {}

        @auto_vmap(*[1] * n, *[0] * n, **ranks, **reduce, **given)
        def kernel(*both: Any, ok: Any = None) -> Any:
            return self.item(*both[:n], w=w, keys=both[n:])

        return kernel

    def plain(self, w: Any, keys: Any, *args: Any) -> Any:
        """Call by nested maps; an item that is left out is another one, and counts nowhere."""
        n = len(args)

        def item(*both: Any) -> Any:
            args, keys = both[:n], both[n:]
            if not self.where:
                return self.item(*args, w=w, keys=keys)
            ok = _counts(args)
            args = [jnp.where(ok, v, 0.5) for v in args]
            return self.item(*args, w=w, keys=keys) | {"ok": ok}

        both = *args, *keys
        shapes = [x.shape[: x.ndim - 1] for x in args] + [key.shape for key in keys]
        ndim = max(map(len, shapes))
        both = [
            x.reshape((1,) * (ndim - len(s)) + x.shape) for x, s in zip(both, shapes, strict=True)
        ]
        call = item
        for axis in reversed(range(ndim)):
            longest = max(x.shape[axis] for x in both)
            axes = [0 if x.shape[axis] == longest else None for x in both]
            call = _mapped(call, axes, longest)
        outs = call(*both)
        if not self.reduce:
            return outs
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        axes = tuple(range(ndim)) if self.axis is None else tuple(axis % ndim for axis in axes)
        ok = outs.get("ok", jnp.ones(outs["a"].shape, bool))
        found = {
            "a": REDUCED[self.reduce](outs["a"], axes, where=ok),
            "v": jnp.sum(outs["v"], axes, where=ok[..., None]),
            "side": jnp.mean(outs["side"], axes, where=ok),
        }
        return found | ({"ok": jnp.any(ok, axes)} if self.where == "output" else {})

    def check(self) -> None:
        """Compare what rankax returns with nested maps."""
        with jax.enable_x64(True):
            self._check()

    def _check(self) -> None:
        args, keys = self.arguments()
        mine, plain = (functools.partial(self._whole, call) for call in (self.mine, self.plain))
        got = (jax.jit(mine) if self.jit else mine)(keys, *args)
        want = jax.jit(plain)(keys, *args)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            name = jax.tree_util.keystr(path)
            assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type), name
            a, b = np.asarray(a), np.asarray(b)
            if a.dtype == jax.dtypes.float0:
                continue
            size = np.abs(b[np.isfinite(b)]).max(initial=1)
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9 * size, err_msg=name)

    def arguments(self) -> tuple[list[Any], list[Any]]:
        """Return the weights and arguments, and keys that lie along with the arguments."""
        shapes = LAYOUTS[self.layout][0]
        normal = np.random.default_rng(self.seed).normal
        args = [jnp.asarray(normal(size=s)) for s in ((3, 8), *((*s, 3) for s in shapes))]
        args[0] = args[0] / 2
        return args, [jax.random.split(jax.random.key(n), s) for n, s in enumerate(shapes)]

    def _whole(self, call: Any, keys: Any, *args: Any) -> Any:
        def value(w: Any, *args: Any) -> Any:
            return call(w, keys, *args)

        def loss(*args: Any) -> Any:
            outs = [x for x in jax.tree.leaves(value(*args)) if x.dtype != bool]
            return sum(jnp.sum(jnp.sin(x)) for x in outs)

        gradient = jax.grad(loss, range(len(args)))
        tangents = tuple(jnp.cos(x) for x in args)
        if self.transformation == "value":
            return value(*args)
        if self.transformation == "jvp":
            return jax.jvp(value, args, tangents)
        if self.transformation == "hessian":
            return jax.jvp(gradient, args, tangents)
        if self.transformation == "vmap of grad":
            return jax.vmap(gradient)(*[jnp.stack([x, 0.9 * x]) for x in args])
        return gradient(*args)

    def simpler(self) -> Iterator[Sides]:
        """Yield programs with less in them."""
        for n, names in enumerate(self.parts):
            for name in names:
                less = tuple(other for other in names if other != name)
                parts = (*self.parts[:n], less, *self.parts[n + 1 :])
                yield dataclasses.replace(self, parts=parts)
        for name in self.options:
            less = {n: x for n, x in self.options.items() if n != name}
            yield dataclasses.replace(self, options=less)
        plain = {"of_two": (), "reduce": None, "axis": None, "where": None, "jit": True}
        plain |= {"transformation": "value", "joins": ("product",) * len(self.joins)}
        for name, value in plain.items():
            is_safe = name != "where" or not ONLY_WHERE & self.names()
            if getattr(self, name) != value and is_safe:
                yield dataclasses.replace(self, **{name: value})

    def names(self) -> set[str]:
        """Return the parts."""
        return {name for names in (*self.parts, self.of_two) for name in names}


def _counts(args: Any) -> Any:
    """Say whether an item counts, or each of a batch."""
    if len(args) > 2:
        return jnp.min(args[0], -1) > -0.6
    a, b = args[0][..., 0], args[1][..., 1]
    shape = jnp.broadcast_shapes(a.shape, b.shape)
    return jnp.broadcast_to(a, shape) + jnp.broadcast_to(b, shape) > -0.3


def _mapped(call: Any, axes: list[Any], length: int) -> Any:
    """Map a call over one axis, of which an argument may have length 1."""

    def mapped(*args: Any) -> Any:
        args = [x if axis == 0 else x[0] for x, axis in zip(args, axes, strict=True)]
        return jax.vmap(call, axes, axis_size=length)(*args)

    return mapped


def draw(seed: int, kind: str = "sides") -> Sides:
    """Make a program of a seed."""
    rng = random.Random(seed)
    layout = rng.choice([*LAYOUTS, "pairs", "pairs"])
    shapes, axes = LAYOUTS[layout]
    transformation = rng.choice(TRANSFORMATIONS)
    where = rng.random() < 0.3
    without = set() if where and rng.random() < 0.5 else ONLY_WHERE
    without = without | (ONLY_REVERSE if transformation in ("jvp", "hessian") else set())
    without = without | (set() if transformation in ("value", "jvp") else ONLY_FORWARD)
    names = [name for name in PARTS if name not in without]

    def some(most: int) -> tuple[str, ...]:
        return tuple(rng.choice(names) for _ in range(rng.randint(0, most)))

    options: dict[str, Any] = {"chunk_size": rng.choice([1, 3, 6, 10])}
    if rng.random() < 0.2:
        options = {"memory_limit": rng.choice(["20 kB", "60 kB", "1 MB"])}
    if rng.random() < 0.05:  # one chunk has all, of which nothing is hoisted
        options = {}
    for name, value, share in (
        ("devices", rng.choice([2, 3]), 0.15),
        ("lockstep", False, 0.15),
        ("checkpoint", False, 0.1),
        ("hoist", False, 0.05),
    ):
        options |= {name: value} if rng.random() < share else {}
    reduce = rng.choice([None, "sum", *REDUCED])
    return Sides(
        tuple(some(2) or ("net",) for _ in shapes),
        tuple(rng.choice([*JOINS]) for _ in shapes[1:]),
        some(1) if len(shapes) > 2 else (),
        layout,
        reduce,
        rng.choice(axes) if reduce else None,
        rng.choice(["output", "argument"]) if where and reduce else None,
        options,
        transformation,
        rng.random() < 0.8,
        seed,
    )
