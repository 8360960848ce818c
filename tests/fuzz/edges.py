# SPDX-License-Identifier: MIT
"""Random programs at the edges of arithmetic, where a wrong order of additions or a repeat shows.

`draw` makes an `Edge` of a seed and one of `KINDS`: half precision, long sums, infinite
derivatives, rules that send something back for nothing, weak types. Its kernel is one of `KERNELS`,
short, so that it compiles fast. What rankax returns is compared with two programs of plain JAX:

* `jax.vmap` of the kernel, which uses a shared argument once for all items;
* the same with a copy of each argument for each item. The sum over the items, also that of the
  cotangents of the copies, is one of twice as many bits, which is rounded once.

The first says what structure, dtypes and weak types are right, the second what number is, of half
precision and long sums. Of what is infinite or no derivative, those numbers are compared that both
agree in: of others, such as inf - inf, no order of additions is the right one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax import (
    Mask,
    Ragged,
    auto_vmap,
    checkpoint_chunked_scan,
    chunked_reduce,
    chunked_vmap,
    options,
    sliced_scan,
)
from rankax.reductions import Best, Moments, MomentsResult, Several, TopK, TopKResult

Item = dict[str, Any]

# The leaves: those that are mapped, with their ranks; `r` are the rows of a ragged item.
MAPPED = {"x": 0, "y": 0, "v": 1, "i": 0, "r": 1}
# Those that the items share, of which the last two are closed over.
SHARED = {"w": 0, "u": 1, "m": 2, "c": 0, "k": 1}
CLOSED = ("c", "k")


# Kernels. Each takes the leaves that its parameters name.


def like(a: Any, b: Any) -> Any:
    return a.astype(b.dtype)


def by_rule(bwd: Callable[..., Any], fun: Callable[..., Any] = lambda x: x) -> Any:
    """Return a function whose derivative is ``bwd(arguments, cotangent)``."""
    ruled = jax.custom_vjp(fun)
    ruled.defvjp(lambda *args: (fun(*args), args), bwd)
    return ruled


def by_jvp_rule(x: jax.Array, w: jax.Array) -> jax.Array:
    fun = jax.custom_jvp(lambda x, w: x * w)
    fun.defjvp(lambda args, ts: (fun(*args), ts[0] * args[1] + args[0] * ts[1]))
    return fun(x, w)


# What `bwd` makes of 0 is not 0.
regular = by_rule(lambda args, ct: (ct + 0.1 * args[0],))
unit = by_rule(lambda args, ct: (ct / jnp.linalg.norm(ct),))
signed = by_rule(lambda args, ct: (ct / jnp.abs(ct),))
both = by_rule(
    lambda args, ct: (ct * args[1] + 0.1, ct * args[0] + 0.1 * args[0]), lambda x, w: x * w
)
with_vector = by_rule(
    lambda args, ct: (ct * jnp.sum(args[1]) + 0.1, (ct * args[0] + 0.1) * jnp.ones_like(args[1])),
    lambda x, u: x * jnp.sum(u),
)


def _looped(fun: Any, s: Any) -> Any:
    return lax.scan(lambda s, _: (fun(s), None), s, None, 2)[0]


# All terms of these are positive, and so are those of their derivatives: nothing cancels.
POSITIVE: dict[str, Any] = {
    "product": lambda x, w: like(x, w) * w,
    "widened": lambda x, w: (like(x, w) * w).astype("float32"),
    "wide": lambda x, w: x.astype("float32") * w.astype("float32"),
    "square": lambda x, w: like(x, w) * w * w,
    "affine": lambda x, y, u: like(x, u) * u[0] + like(y, u) * u[-1],
    "matrix": lambda v, m: m @ like(v, m),
    "form": lambda v, m: like(v, m) @ (m @ like(v, m)),
    "vector": lambda v, w: like(v, w) * w,
    "closed": lambda x, c: like(x, c) * c,
    "closed_vector": lambda v, k: jnp.sum(like(v, k) * k),
    "shared_alone": lambda x, w: w * w,
    "looked_up": lambda x, i, u: like(x, u) * u[i % u.size],
    "looped": lambda x, w: lax.fori_loop(0, 3, lambda _, s: s * w, like(x, w)),
    "scanned": lambda x, u: lax.scan(lambda s, a: (s * a, None), like(x, u), u)[0],
    "branch": lambda x, i, w: lax.cond(
        i % 2 == 0, lambda x, w: x * w, lambda x, w: x + w, like(x, w), w
    ),
    "vjp_rule": lambda x, w: by_rule(lambda args, ct: (ct * args[1], ct * args[0]), jnp.multiply)(
        like(x, w), w
    ),
    "jvp_rule": lambda x, w: by_jvp_rule(like(x, w), w),
    "compiled": lambda x, w: jax.jit(jnp.multiply)(like(x, w), w),
    "remembered": lambda x, w: jax.checkpoint(jnp.multiply)(like(x, w), w),
    "two": lambda x, y, w, u: (like(x, w) * w, like(y, u) * u),
}
OF_ONE_SIGN: dict[str, Any] = {
    "decay": lambda x, w: jnp.exp(-like(x, w) * w),
    "root_of_sum": lambda x, y, w: jnp.sqrt(like(x, w) * w + like(y, w)),
    "reciprocal": lambda x, y, w: w / (like(x, w) + like(y, w)),
}
INFINITE: dict[str, Any] = {
    "root": lambda x: jnp.sqrt(x),
    "root_times": lambda x, y: jnp.sqrt(x) * (y + 1),
    "log": lambda x: jnp.log(x),
    "inverse": lambda x: 1 / x,
    "power": lambda x: x**0.3,
    "norm": lambda v: jnp.linalg.norm(v),
    "distance": lambda v, u: jnp.linalg.norm(v - u),
    "closed_distance": lambda v, k: jnp.linalg.norm(v - k),
    "root_of_product": lambda x, w: jnp.sqrt(x * (w + 1)),
    "shared_root": lambda x, w: jnp.sqrt(w) * (x + 1),
    "closed_root": lambda x, c: jnp.sqrt(c) * (x + 1),
    "root_looked_up": lambda x, i, u: jnp.sqrt(u[i % u.size]) * (x + 1),
    "root_minus": lambda x, y: y - jnp.sqrt(x),
    "hidden_root": lambda x: jnp.where(x > 0.1, jnp.sqrt(x), x),
    "looped_root": lambda x, y: _looped(lambda s: s / 2 + y, jnp.sqrt(x)),
    "two_roots": lambda x, y, w: (jnp.sqrt(x) * (w + 1), jnp.log(y + 1)),
}
REGULAR: dict[str, Any] = {
    "regular": lambda x, y: regular(x) * y,
    "regular_product": lambda x, y, w: regular(x * w) * y,
    "unit": lambda v, y: jnp.sum(unit(v) ** 2) * y,
    "unit_product": lambda v, w: jnp.sum(unit(v * w) ** 2),
    "signed": lambda x, w: signed(x) * w,
    "both": both,
    "both_of_closed": lambda x, c: both(x, c),
    "with_vector": lambda x, u: with_vector(x, u),
    "of_distance": lambda v, u: jnp.sum(unit(v - u) ** 2),
    "in_a_loop": lambda x, y: _looped(lambda s: regular(s) * y, x),
    "in_a_branch": lambda x, i: lax.cond(i % 2 == 0, regular, lambda x: x * x, x),
    "remembered_rule": lambda x, y: jax.checkpoint(regular)(x) * y,
    "two_rules": lambda x, y, w: (regular(x) * w, both(y, w)),
}
WEAK: dict[str, Any] = {
    "number": lambda x: 2.0,
    "integer": lambda x: 2,
    "complex_number": lambda x: 2j,
    "itself": lambda x: x,
    "twice": lambda x: x * 2.0,
    "of_integer": lambda i: i * 1.5,
    "counter": lambda i: lax.fori_loop(0, 3, lambda n, s: s + n, 0),
    "counted": lambda i: lax.while_loop(lambda s: s < i, lambda s: s + 1, 0),
    "of_shared": lambda x, w: x * w,
    "of_closed": lambda x, c: x * c,
    "of_vector": lambda i, u: u[i % u.size],
    "branches": lambda i: lax.cond(i % 2 == 0, lambda: 1.0, lambda: 2.0),
    "where": lambda x, i: jnp.where(i % 2 == 0, x, 1.0),
    "vector_of_numbers": lambda v: v * 2.0,
    "with_number": lambda x, i: (x * 3.0, 2.0, i + 1),
    "complex_of_shared": lambda x, w: x * w * 1j,
}
KERNELS = POSITIVE | OF_ONE_SIGN | INFINITE | REGULAR | WEAK
FOR_RAGGED: dict[str, Any] = {
    "infinite": jnp.sqrt,
    "nonzero": lambda r: regular(r) * 2,
}
OF_VECTORS = ("matrix", "vector", "vector_of_numbers", "two")
OF_TWO = ("two", "two_roots", "two_rules", "with_number")
TWICE_DIFFERENTIABLE = tuple(name for name in POSITIVE if name != "vjp_rule")
WITH_VJP = ("vjp_rule", *REGULAR)
WINNERS = ("max", "min", "topk", "best")
REDUCTIONS: dict[str, Any] = {
    "moments": Moments(),
    "several": Several("sum", "mean"),
    "topk": TopK(2),
    "best": Best("key"),
}


def double(x: jax.Array) -> Any:
    return x.astype("complex128" if jnp.iscomplexobj(x) else "float64")


def copies(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Return a copy for each item; the sum of their cotangents is rounded once."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.broadcast_to(x, batch)
    return jnp.broadcast_to(double(x), batch).astype(x.dtype)


def reduced(how: Any, x: jax.Array, axes: tuple[int, ...], *, copied: bool) -> Any:
    """Reduce the outputs of all items by `jax.numpy`."""
    y = double(x) if copied and jnp.issubdtype(x.dtype, jnp.inexact) else x
    if how == "moments":
        count = jnp.asarray(np.prod([x.shape[axis] for axis in axes]), "int32")
        variance = jnp.var(y, axes).astype(jax.eval_shape(jnp.var, x).dtype)
        return MomentsResult(count, jnp.mean(y, axes).astype(x.dtype), variance)
    if how == "gram":
        flat = y.reshape(np.prod([x.shape[axis] for axis in axes]), -1)
        return (jnp.conj(flat).T @ flat).astype(x.dtype)
    if how == "logsumexp":
        return jax.nn.logsumexp(y, axes).astype(x.dtype)
    if how in ("any", "all"):  # of which those of `jax.numpy` look at the real part only
        return getattr(jnp, how)(x != 0, axes)
    fun = functools.partial(getattr(jnp, how), axis=axes)
    return fun(y).astype(jax.eval_shape(fun, x).dtype)


def _ended(n: jax.Array, out: Any, *, plain: bool) -> Any:
    """Halve n times, in a loop that each item ends by itself; JAX has no reverse mode of that."""

    def half(out: Any) -> Any:
        return jax.tree.map(lambda x: x * jnp.asarray(0.5, x.dtype), out)

    if not plain:
        state = jnp.zeros_like(n), out
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, half(s[1])), state)[1]
    for step in range(2):
        out = jax.tree.map(functools.partial(jnp.where, step < n), half(out), out)
    return out


# Transformations of `f`, of a dict of arrays, at `p` along `t`. No weight is negative.


def weights(shape: tuple[int, ...], *, with_zeros: bool) -> jax.Array:
    at = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    return jnp.asarray(np.where(at % 3 == 1, 0.5, 1.0) * (at % 4 != 2 if with_zeros else 1))


def loss(out: Any, *, with_zeros: bool) -> jax.Array:
    total = jnp.zeros((), "float32")
    for leaf in jax.tree.leaves(out):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            weighed = leaf * weights(leaf.shape, with_zeros=with_zeros).astype(leaf.dtype)
            real = jnp.real(weighed) + jnp.imag(weighed) if jnp.iscomplexobj(leaf) else weighed
            total += jnp.sum(real.astype("float32"))
    return total


def two(p: Item) -> Item:
    return jax.tree.map(lambda x: jnp.stack([x, x * 0.5]), p)


def _shared(p: Item) -> Item:
    return {name: x for name, x in p.items() if name in SHARED}


Transformation = Callable[[Any, Any, Item, Item], Any]
TRANSFORMATIONS: dict[str, Transformation] = {
    "value": lambda f, loss, p, t: f(p),
    "grad": lambda f, loss, p, t: jax.grad(lambda p: loss(f(p)))(p),
    "jvp": lambda f, loss, p, t: jax.jvp(f, (p,), (t,)),
    "linearize": lambda f, loss, p, t: jax.linearize(f, p)[1](t),
    "vmap": lambda f, loss, p, t: jax.vmap(f)(two(p)),
    "grad of jit": lambda f, loss, p, t: jax.grad(lambda p: loss(jax.jit(f)(p)))(p),
    "grad of checkpoint": lambda f, loss, p, t: jax.grad(lambda p: loss(jax.checkpoint(f)(p)))(p),
    "vmap of grad": lambda f, loss, p, t: jax.vmap(jax.grad(lambda p: loss(f(p))))(two(p)),
    "grad of vmap": lambda f, loss, p, t: jax.grad(
        lambda p: jnp.sum(jax.vmap(lambda p: loss(f(p)))(p))
    )(two(p)),
    "grad of scan": lambda f, loss, p, t: jax.grad(
        lambda p: lax.scan(lambda s, q: (s + loss(f(q)), None), jnp.float32(0), two(p))[0]
    )(p),
    "jacrev": lambda f, loss, p, t: jax.jacrev(lambda s: f(p | s))(_shared(p)),
    "jacfwd": lambda f, loss, p, t: jax.jacfwd(lambda s: f(p | s))(_shared(p)),
    "jvp of grad": lambda f, loss, p, t: jax.jvp(jax.grad(lambda p: loss(f(p))), (p,), (t,))[1],
}
FORWARD = ("jvp", "linearize", "jacfwd", "jvp of grad")
REVERSE = tuple(name for name in TRANSFORMATIONS if "grad" in name or name == "jacrev")
SIMPLE = ("value", "grad", "jvp", "vmap of grad")
# JAX itself forgets a rule of what it linearised.
FORGETFUL = ("grad of scan", "grad of checkpoint")

SCANS = {"sliced_scan": sliced_scan, "checkpoint_chunked_scan": checkpoint_chunked_scan}
# There are many to compile, and each runs once.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Edge:
    """Everything that was drawn."""

    kind: str
    kernel: str
    caller: str  # chunked_vmap, auto_vmap, chunked_reduce, ragged or a scan
    batch: tuple[int, ...]  # of a ragged call: how many rows each item has
    options: dict[str, Any]
    transformation: str = "value"
    narrow: tuple[str, ...] = ()  # the leaves of half precision
    dtype: str = "float32"
    style: str = "spread"  # of the values; "same", "powers" of two or "complex"
    zeros: tuple[int, ...] = ()  # the items whose derivative is infinite
    zero_weights: bool = False  # whether the cotangents of some outputs are 0
    ends: bool = False  # whether items end by themselves
    core: int = 2
    jit: bool = True
    x64: bool = False
    data: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether one chunk may hold all items, by a program that is that of plain JAX."""
        if self.caller in SCANS:
            return False
        size = self.options.get("chunk_size")
        return size is None or size * self.options.get("devices", 1) >= self.count

    @property
    def is_told(self) -> bool:
        """Whether it is said what is right: all at once, losers send zeros, as in plain JAX."""
        chooses = self.how in WINNERS and self.kind in ("infinite", "nonzero")
        return not (chooses and self.is_whole)

    # The arrays.

    @property
    def names(self) -> list[str]:
        """The leaves that the items need."""
        names = [*inspect.signature(KERNELS[self.kernel]).parameters]
        more = {"i": self.ends or "where" in self.options, "y": self.how == "best"}
        more["r"] = self.caller == "ragged"
        return [*names, *(name for name, is_read in more.items() if is_read and name not in names)]

    @property
    def count(self) -> int:
        return len(self.batch) if self.caller == "ragged" else int(np.prod(self.batch))

    @property
    def how(self) -> str | None:
        """The name of the reduction."""
        return self.options.get("reduce")

    def _shape(self, name: str) -> tuple[int, ...]:
        if name in SHARED:
            return (self.core,) * SHARED[name]
        core = (self.core,) * MAPPED[name]
        if self.caller == "ragged":
            return (sum(self.batch),) if name == "r" else (self.count, *core)
        if len(self.batch) == 2:  # the first along one axis only, any others along the other
            mapped = [name for name in self.names if name in MAPPED]
            if len(mapped) > 1:
                n, m = self.batch
                return (n, 1, *core) if name == mapped[0] else (m, *core)
        return (*self.batch, *core)

    def _integers(self) -> Any:
        shape = self._shape("i")
        return (
            np.random.default_rng(self.data)
            .permutation(np.arange(np.prod(shape)) % 6)
            .reshape(shape)
        )

    def _array(self, name: str) -> Any:
        rng = np.random.default_rng([self.data, zlib.crc32(name.encode())])
        shape = self._shape(name)
        if name == "i":
            return jnp.asarray(self._integers(), "int32")
        x = rng.uniform(0.5, 1.5, shape)
        if self.style == "same":
            x = np.full(shape, 0.1 if name in MAPPED else 0.9)
        if self.style == "powers":
            x = rng.choice([1.0, 2.0], shape) if name in MAPPED else np.ones(shape)
        x = np.array(x)
        if self.kind == "infinite" and name in SHARED:  # the first alone, if they are looked up
            x[...] = x * (np.arange(x.size) > 0) if "i" in self.names and x.ndim else 0
        elif self.kind == "infinite" and name != "y":
            x[[n for n in self.zeros if n < len(x)]] = 0
        if self.kind == "weak":
            scalars = [
                jnp.asarray(complex(a) if self._is_complex(name) else float(a)) for a in x.flat
            ]
            return jnp.stack(scalars).reshape(shape) if shape else scalars[0]
        array = jnp.asarray(x, self.dtype if name in self.narrow else "float32")
        return Ragged(array, self.batch) if name == "r" and self.caller == "ragged" else array

    def _is_complex(self, name: str) -> bool:
        return self.style == "complex" and name in SHARED

    def arrays(self) -> Item:
        return {name: self._array(name) for name in self.names}

    # One item.

    def item(self, item: Item, *, plain: bool, closed: Item | None = None, mask: Any = None) -> Any:
        """Return what the kernel makes of an item."""
        item = item | (closed or {})
        known = inspect.signature(KERNELS[self.kernel]).parameters
        out = KERNELS[self.kernel](*(item[name] for name in known))
        if self.ends:
            out = _ended(item["i"] % 3, out, plain=plain)
        if self.caller == "ragged":
            fun = FOR_RAGGED.get(self.kind, lambda r: r + r)
            out = {"out": out, "rows": jnp.sum(fun(item["r"]), where=mask)}
        if "where" in self.options:
            out = {"out": out, "ok": item["i"] % 3 > 0}
        if self.how == "best":
            out = {"out": out, "key": item["y"]}
        return out

    # By rankax.

    def _given(self) -> dict[str, Any]:
        given = dict(self.options)
        if self.how is not None:
            how = REDUCTIONS.get(self.how, self.how)
            given["reduce"] = {"out": how, "ok": "any"} if "where" in given else how
        if "devices" in given:
            given["devices"] = min(given["devices"], jax.device_count())
        return given

    def by_rankax(self, arrays: Item) -> Any:
        closed = {name: x for name, x in arrays.items() if name in CLOSED}
        arrays = {name: x for name, x in arrays.items() if name not in CLOSED}
        kernel = functools.partial(self.item, closed=closed, plain=False)
        given = self._given()
        if "scan" in self.caller:
            return self._by_scan(arrays | closed, SCANS[self.caller], **given)
        if self.caller in ("chunked_vmap", "chunked_reduce"):
            axes = ({name: None if name in SHARED else 0 for name in arrays},)
            size = given.pop("chunk_size")
            if self.caller == "chunked_vmap":
                return chunked_vmap(kernel, size, axes, **given)(arrays)
            return chunked_reduce(kernel, given.pop("reduce"), size, axes, **given)(arrays)
        ranks: Item = {name: (SHARED | MAPPED)[name] for name in arrays}
        if given.pop("whole", False):  # an argument that is not mapped, in place of one of its rank
            ranks = {name: None if name in SHARED else rank for name, rank in ranks.items()}
        if self.caller == "ragged":
            ranks |= {"r": "n"}
            return auto_vmap(ranks, mask=Mask("n"), **given)(
                lambda item, *, mask: kernel(item, mask=mask)
            )(arrays)
        return auto_vmap(ranks, **given)(kernel)(arrays)

    def _by_scan(self, arrays: Item, scan: Any, **given: Any) -> Any:
        shared = {name: x for name, x in arrays.items() if x.ndim == len(self._core(name))}
        xs = {name: x for name, x in arrays.items() if name not in shared}

        def body(carry: jax.Array, x: Item) -> tuple[jax.Array, Any]:
            out = self.item(shared | x, plain=True)
            parts = [jnp.sum(leaf.astype(carry.dtype)) for leaf in jax.tree.leaves(out)]
            return carry / 2 + sum(parts), out

        return scan(body, jnp.zeros((), "float32"), xs, **given)

    def _core(self, name: str) -> tuple[int, ...]:
        return (self.core,) * (SHARED | MAPPED)[name]

    # By plain JAX.

    def by_plain_jax(self, arrays: Item, *, copied: bool, all_count: bool = False) -> Any:
        """Return what all items are, and their reduction; with copies of each argument or not."""
        if "scan" in self.caller:
            if copied:
                arrays = {n: self._copies(n, x, self.batch) for n, x in arrays.items()}
            carry, ys = self._by_scan(arrays, lax.scan, reverse=self.options.get("reverse", False))
            window = slice(*(self.options.get(name) for name in ("start", "stop", "step")))
            return carry, jax.tree.map(lambda y: y[window], ys)
        if self.caller == "ragged":
            return self._reduced(*self._one_by_one(arrays, copied=copied), copied=copied)
        shared = {name: x for name, x in arrays.items() if name in SHARED}
        mapped = {name: x for name, x in arrays.items() if name in MAPPED}
        ids = None if all_count else self._items()
        if ids is None and self.how not in WINNERS and not copied:
            return self._reduced(self._nested(mapped, shared), ids, copied=copied)
        mapped = {n: self._spread(n, x, copied=copied) for n, x in mapped.items()}
        if copied:
            mapped |= {n: self._copies(n, x, (self.count,)) for n, x in shared.items()}
            shared = {}
        if ids is not None:
            mapped = {n: x[ids] for n, x in mapped.items()}
        kernel = jax.vmap(functools.partial(self.item, closed=shared, plain=True))
        if self.how in WINNERS:
            return self._winners(kernel, mapped, ids)
        out = kernel(mapped)
        if ids is None:
            out = jax.tree.map(lambda x: x.reshape(*self.batch, *x.shape[1:]), out)
        return self._reduced(out, ids, copied=copied)

    def _spread(self, name: str, x: jax.Array, *, copied: bool) -> jax.Array:
        """Give all items a leaf of their own, in a row."""
        core = self._core(name)
        wide = jnp.broadcast_to(x, (*self.batch, *core))
        wide = self._copies(name, x, self.batch) if copied else wide
        return wide.reshape(self.count, *core)

    def _copies(self, name: str, x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
        return copies(x, (*batch, *self._core(name)))

    def _nested(self, mapped: Item, shared: Item) -> Any:
        fun = functools.partial(self.item, closed=shared, plain=True)
        for axis in reversed(range(len(self.batch))):
            left = len(self.batch) - axis
            axes = {}
            for name, x in mapped.items():
                ndim = x.ndim - MAPPED[name]
                has_axis = ndim >= left and x.shape[ndim - left] > 1
                axes[name] = 0 if has_axis or len(self.batch) == 1 else None
            fun = self._level(fun, axes, left)
        return fun(mapped)

    def _level(self, fun: Any, axes: Item, left: int) -> Any:
        def level(item: Item) -> Any:
            ready = {}
            for name, x in item.items():  # an axis of length 1 that this level does not map
                is_stretched = axes[name] is None and x.ndim - MAPPED[name] >= left
                ready[name] = x[0] if is_stretched else x
            return jax.vmap(fun, (axes,))(ready)

        return level

    def _one_by_one(self, arrays: Item, *, copied: bool) -> Any:
        rows = [jnp.asarray(part) for part in arrays["r"].to_list()]
        rest = {name: x for name, x in arrays.items() if name != "r"}
        if copied:
            batch = (self.count,)
            rest = {n: self._copies(n, x, batch) if n in SHARED else x for n, x in rest.items()}
        outs = []
        for n, row in enumerate(rows):
            item = {name: x if name in SHARED and not copied else x[n] for name, x in rest.items()}
            mask = jnp.ones(len(row), bool)
            outs.append(self.item(item | {"r": row}, plain=True, mask=mask))
        ids = self._items()
        outs = outs if ids is None else [outs[n] for n in ids]
        return jax.tree.map(lambda *x: jnp.stack(x), *outs), ids

    def _items(self) -> Any:
        """Return which items count, if not all do."""
        if "where" not in self.options:
            return None
        flags = np.broadcast_to(self._integers() % 3 > 0, self._flat_batch())
        return np.flatnonzero(flags)

    def _flat_batch(self) -> tuple[int, ...]:
        return (self.count,) if self.caller == "ragged" else self.batch

    def _reduced(self, out: Any, ids: Any, *, copied: bool) -> Any:
        if self.how is None:
            return out
        ndim = len(self._flat_batch()) if ids is None else 1
        axis = self.options.get("reduce_axis")
        axes = tuple(range(ndim)) if axis is None else (axis % ndim,)

        def each(how: str, out: Any) -> Any:
            if how == "several":
                return each("sum", out), each("mean", out)
            return jax.tree.map(lambda x: reduced(how, x, axes, copied=copied), out)

        if "where" in self.options:
            return {"out": each(self.how, out["out"]), "ok": each("any", out["ok"])}
        return each(self.how, out)

    def _winners(self, kernel: Any, items: Item, ids: Any) -> Any:
        """Evaluate the chosen items alone, so that the others send nothing back."""
        out = kernel(jax.tree.map(lax.stop_gradient, items))

        def at(index: jax.Array) -> Any:
            return kernel({name: x[index] for name, x in items.items()})

        if self.how == "best":
            best = jnp.argmin(out["key"])
            return jax.tree.map(lambda x: x[0], at(best[None]))
        leaves, structure = jax.tree.flatten(out["out"] if ids is not None else out)
        found = []
        for n, leaf in enumerate(leaves):
            if self.how == "topk":
                index = lax.top_k(leaf, 2)[1]
            else:
                index = getattr(jnp, f"arg{self.how}")(leaf)[None]
            picked = at(index)
            values = jax.tree.leaves(picked["out"] if ids is not None else picked)[n]
            places = index if ids is None else jnp.asarray(ids, "int32")[index]
            found.append(TopKResult(values, places) if self.how == "topk" else values[0])
        chosen = structure.unflatten(found)
        return {"out": chosen, "ok": jnp.any(out["ok"])} if ids is not None else chosen

    # The comparison.

    def _call(self, by: Any) -> tuple[Any, Item, Item, Item]:
        """Return the transformed program, and its arguments."""
        arrays = self.arrays()
        moving = {n: x for n, x in arrays.items() if is_moving(x)}
        fixed = {n: x for n, x in arrays.items() if n not in moving}
        is_weak = self.kind == "weak"
        along = jax.tree.map(lambda x: x * 0.5 if is_weak else jnp.full_like(x, 0.5), moving)
        how = functools.partial(loss, with_zeros=self.zero_weights)

        def transformed(p: Item, t: Item, fixed: Item) -> Any:
            return TRANSFORMATIONS[self.transformation](lambda p: by(fixed | p), how, p, t)

        return transformed, moving, along, fixed

    def _run(self, fun: Any, *args: Any, jit: bool = True) -> Any:
        return (jax.jit(fun, compiler_options=QUICK_COMPILE) if jit else fun)(*args)

    def types(self) -> Any:
        """Return structure, shapes, dtypes and weak types."""
        _, *args = self._call(self.by_rankax)
        # Which no function of JAX has: they do not depend on chunks.
        if self.how in ("gram", "moments", *WINNERS):
            options = {n: x for n, x in self.options.items() if n not in ("devices", "bucket")}
            whole = dataclasses.replace(self, options=options | {"chunk_size": None})
            return jax.eval_shape(whole._call(whole.by_rankax)[0], *args)
        by = functools.partial(self.by_plain_jax, copied=False, all_count=True)
        return jax.eval_shape(self._call(by)[0], *args)

    def wanted(self) -> list[Any]:
        """Return the right values."""
        with jax.enable_x64(self.x64 if self.kind == "weak" else True):
            by = (functools.partial(self.by_plain_jax, copied=copied) for copied in (False, True))
            (first, *args), (second, *_) = map(self._call, by)
            may_be_first = self.kind in ("infinite", "nonzero") or self.is_whole
            funs = [first, second] if may_be_first else [second]
            funs = [first] if self.kind == "weak" else funs
            return self._run(lambda *args: [fun(*args) for fun in funs], *args)

    def check_types(self) -> None:
        """Trace only: assert equal structure, shapes, dtypes and weak types."""
        with _as_users(self.x64):
            fun, *args = self._call(self.by_rankax)
            _check_types(jax.eval_shape(fun, *args), self.types())

    def check(self) -> None:
        """Assert that rankax and plain JAX agree in structure, shapes, dtypes and values."""
        with _as_users(self.x64):
            fun, *args = self._call(self.by_rankax)
            got = self._run(fun, *args, jit=self.jit)
            _check_types(got, self.types())
            named = jax.tree_util.tree_leaves_with_path(got)
            wants = zip(*map(jax.tree.leaves, self.wanted()), strict=True)
            for (path, a), want in zip(named, wants, strict=True):
                self._check_values(jax.tree_util.keystr(path), _wide(a), *map(_wide, want))

    def check_reuse(self) -> None:
        """Assert that eager calls find their own programs, among those of similar ones."""
        first = dataclasses.replace(self, transformation="value", jit=False)
        near = [other for other in first.simpler() if other.x64 is self.x64]
        with options(check=True):
            first.check()
            for other in random.Random(self.data).sample(near, min(2, len(near))):
                with contextlib.suppress(TypeError, ValueError), _as_users(self.x64):
                    other.by_rankax(other.arrays())

    @property
    def tolerance(self) -> float:
        """How far numbers may be off, relative to themselves and to the largest of their array."""
        if self.kind == "half":
            # Where all are powers of two, nothing is rounded but the sum.
            is_exact = self.style == "powers" and self.how in (None, "sum", *WINNERS)
            is_exact &= self.kernel in POSITIVE and self.caller not in SCANS
            # A weight of logsumexp is as far off as its exponent; a tangent is rounded on its way.
            is_rough = self.how == "logsumexp" or self.transformation == "jvp"
            eps = float(jnp.finfo(self.dtype).eps)
            return 1e-6 if is_exact else (8 if is_rough else 1.5) * eps
        if self.kind == "long":
            # XLA adds the products of a chunk one after another.
            is_rough = self.how in ("logsumexp", "moments") or self.kernel in ("matrix", "form")
            return 2e-5 if is_rough else 4e-6
        return 1e-5

    def _check_values(self, name: str, a: Any, *wants: Any) -> None:
        first, other = wants[0], wants[-1]
        scale = np.max(np.abs(other), initial=0, where=np.isfinite(other))
        wrong = self._differ(a, other, scale)
        if self.kind in ("half", "long"):  # right are both, where both come in question
            wrong &= self._differ(a, first, scale)
        else:
            wrong &= ~self._differ(first, other, scale)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0].tolist())
            count = f"{wrong.sum()} of {wrong.size}"
            raise AssertionError(f"{name}[{at}] is {a[at]}, not {other[at]}; so are {count}")

    def _differ(self, a: Any, b: Any, scale: float) -> Any:
        with np.errstate(invalid="ignore"):
            is_near = np.abs(a - b) <= self.tolerance * (np.abs(b) + scale) / 2
        return ~((a == b) | (np.isnan(a) & np.isnan(b)) | (np.isfinite(b) & is_near))

    def simpler(self) -> Iterator[Edge]:
        """Yield programs with less in them, those with much less first."""
        options, batch = self.options, self.batch
        changes: list[dict[str, Any]] = [{"transformation": name} for name in SIMPLE]
        place = SIMPLE.index(self.transformation) if self.transformation in SIMPLE else None
        changes = changes[:place]
        for name in options:
            if name not in ("reduce", "chunk_size") and not (self.ends and name == "lockstep"):
                changes.append({"options": {n: x for n, x in options.items() if n != name}})
        changes += [{"ends": False}, {"narrow": self.narrow[:1]}, {"narrow": self.narrow[1:]}]
        changes += [{"zero_weights": False}, {"core": 1}, {"jit": True}, {"x64": False}]
        changes += [{"zeros": self.zeros[:n] + self.zeros[n + 1 :]} for n in range(len(self.zeros))]
        for n, length in enumerate(batch):
            least = 0 if self.caller == "ragged" else 2
            for shorter in (
                length // 10,
                length // 2,
                length - 1 if length < 20 else length * 4 // 5,
            ):
                if least <= shorter < length:
                    changes.append({"batch": (*batch[:n], shorter, *batch[n + 1 :])})
        if len(batch) > 1:
            changes += [{"batch": batch[:1]}, {"batch": batch[1:]}]
        size = options.get("chunk_size")
        if isinstance(size, int) and size > 2:
            changes.append({"options": options | {"chunk_size": 2}})
        for change in changes:
            other = dataclasses.replace(self, **change)
            if other != self and other.is_told:
                yield other


@contextlib.contextmanager
def _as_users(x64: bool) -> Iterator[None]:
    """Promote as JAX does by default; the tests are stricter."""
    promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with promotion[0], promotion[1], jax.enable_x64(x64):
        yield


def is_moving(x: Any) -> bool:
    (leaf,) = jax.tree.leaves(x)
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _wide(x: Any) -> Any:
    if x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape)
    return np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)


def _type(x: Any) -> tuple[Any, ...]:
    # A tangent of integers is an array of NumPy.
    return x.shape, x.dtype.name, "weak" if getattr(x, "weak_type", False) else "strong"


def _check_types(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    named = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(named, jax.tree.leaves(want), strict=True):
        a, b = map(_type, (a, b))
        assert a == b, f"{jax.tree_util.keystr(path)} is of {a}, not {b}"


# Drawing.

PRIMES = (3, 5, 7, 7, 11, 13)
LONG = (31, 97, 257, 1009, 4099, 20011)
CALLERS = ("chunked_vmap", "auto_vmap", "auto_vmap", "chunked_reduce", "chunked_reduce", "ragged")
FOR_KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "half": (
        POSITIVE | OF_ONE_SIGN,
        # Rounding decides which of two near items wins, so nothing is asked of its place.
        ("sum", "sum", "sum", "mean", "logsumexp", "moments", "several", "gram", "max", "min"),
    ),
    "long": (
        POSITIVE | OF_ONE_SIGN,
        ("sum", "sum", "mean", "logsumexp", "moments", "several", "gram"),
    ),
    "infinite": (INFINITE, ("sum", "sum", "mean", "logsumexp", "prod", *WINNERS)),
    "nonzero": (REGULAR, ("sum", "sum", "mean", "logsumexp", *WINNERS)),
    "weak": (WEAK, ("sum", "mean", "prod", "any", "all", "gram", "max", "several")),
}
KINDS = tuple(FOR_KINDS)


def draw(seed: int, kind: str) -> Edge:
    """Draw a program."""
    rng = random.Random(f"{kind} {seed}")
    kernels, reductions = FOR_KINDS[kind]
    kernel = rng.choice([*kernels])
    callers = CALLERS if kind != "half" else (*CALLERS, *SCANS)
    callers = (*CALLERS, *SCANS) if kind in ("infinite", "nonzero") else callers
    # Rows that fill a ragged item up send back to its last row, see docs/limits.md.
    caller = rng.choice([c for c in callers if c != "ragged" or kind == "half"])
    edge = Edge(kind, kernel, caller, (), {}, style=_draw_style(rng, kind))
    given = {} if caller in SCANS else _draw_options(rng, edge, reductions)
    edge = dataclasses.replace(edge, options=given, batch=_draw_batch(rng, edge, given))
    if not edge.is_told:
        given["chunk_size"] = 1
        given.pop("devices", None)
    if caller in SCANS:
        edge = dataclasses.replace(edge, options=_draw_scan(rng, edge))
    is_one_axis = len(edge.batch) == 2 and "where" not in given and rng.random() < 0.4
    if is_one_axis and edge.how not in (None, "gram", *WINNERS):
        given["reduce_axis"] = rng.choice([0, 1, -1])

    narrow = [n for n in edge.names if n != "i"]
    if rng.random() < 0.5:
        narrow = [n for n in narrow if n in SHARED] or narrow
    # Few operations run one by one.
    is_compiled = rng.random() < (0.2 if "jit" in given else 0.9)
    transformation = _draw_transformation(rng, edge, is_compiled=is_compiled)
    return dataclasses.replace(
        edge,
        transformation=transformation,
        narrow=tuple(narrow) if kind == "half" else (),
        dtype=rng.choice(["bfloat16", "bfloat16", "float16"]) if kind == "half" else "float32",
        zeros=_draw_zeros(rng, edge) if kind == "infinite" else (),
        # The cotangents of ragged items have no order in which all that they share gets them.
        zero_weights=kind == "infinite" and caller != "ragged" and rng.random() < 0.2,
        core=rng.choice([2, 2, 3]),
        jit=is_compiled,
        x64=rng.random() < 0.2,
        data=seed,
    )


def _draw_style(rng: random.Random, kind: str) -> str:
    styles = {"half": ["spread", "same", "powers"], "long": ["spread", "same"]}
    return rng.choice(styles.get(kind, ["complex", "spread"] if kind == "weak" else ["spread"]))


def _draw_options(rng: random.Random, edge: Edge, reductions: tuple[str, ...]) -> dict[str, Any]:
    """Draw the options of a map or a reduction."""
    has_size = edge.caller in ("chunked_vmap", "chunked_reduce")
    sizes = [1, 2, 10, 64, 1000] if edge.kind == "long" else [1, 2, 2, 3, 4, 4, 6, 10]
    # Plain JAX adds up to many numbers with less care than is asked for here.
    may_be_whole = edge.kind != "long"
    given: dict[str, Any] = {"chunk_size": rng.choice([*sizes, None] if may_be_whole else sizes)}
    if edge.caller != "chunked_vmap" and (edge.caller == "chunked_reduce" or rng.random() < 0.6):
        given["reduce"] = rng.choice([how for how in reductions if _admits(edge, how)])
        if given["reduce"] != "best" and rng.random() < 0.25:
            given["where"] = "ok"
    if not has_size and (may_be_whole or "reduce" in given) and rng.random() < 0.2:
        del given["chunk_size"]  # as is best
    if rng.random() < 0.2:
        given["checkpoint"] = False
    if rng.random() < 0.2:
        given["lockstep"] = False
    if rng.random() < 0.3:
        given["devices"] = rng.choice([1, 2, 3, 4])
    if not has_size and rng.random() < 0.3:
        # What is cut on the host may lose a weak type, see docs/howto/fast.md.
        has_bucket = edge.kind != "weak" and rng.random() > 0.6
        given |= {"jit": True, "bucket": True} if has_bucket else {"jit": True}
    if not has_size and rng.random() < 0.3:
        given["whole"] = True
    return given


def _admits(edge: Edge, how: str) -> bool:
    """Whether the outputs of a kernel have such a reduction."""
    if how == "gram":
        return edge.kernel not in OF_TWO and edge.caller != "ragged"
    if how == "moments":  # of equal numbers, the variance is nothing but rounding
        return edge.style == "spread" and edge.kind != "half"
    if how == "max" and edge.kind == "weak" and "complex" in (edge.style, edge.kernel[:7]):
        return False
    if how in WINNERS:  # plain JAX takes ragged items one by one, and so has none to choose
        return edge.kernel not in OF_VECTORS and edge.caller != "ragged"
    return True


def _draw_batch(rng: random.Random, edge: Edge, given: dict[str, Any]) -> tuple[int, ...]:
    lengths = {"half": LONG}.get(edge.kind, PRIMES)
    if edge.caller == "ragged":
        return tuple(rng.choice([0, 1, 2, 3, 5, 7]) for _ in range(rng.choice([3, 5, 6])))
    if edge.caller in SCANS:
        return (rng.choice(LONG[:4] if edge.kind == "half" else PRIMES),)
    if edge.kind == "long":
        most = {1: 10**5, 2: 2 * 10**5, 10: 5 * 10**5}.get(given.get("chunk_size"), 10**6)
        most = most // 2 if edge.kernel in ("matrix", "form", "vector") else most
        count = rng.randint(most // 2, most)
    else:
        count = rng.choice(lengths)
    if edge.caller != "auto_vmap" or rng.random() < 0.65:
        return (count,)
    first = rng.choice([3, 7, 31, 503]) if edge.kind == "long" else rng.choice(PRIMES)
    return rng.choice([(first, max(2, count // first)), (max(2, count // first), first)])


def _draw_scan(rng: random.Random, edge: Edge) -> dict[str, Any]:
    (length,) = edge.batch
    options: dict[str, Any] = {"reverse": True} if rng.random() < 0.3 else {}
    if edge.caller == "checkpoint_chunked_scan":
        sizes = [None, rng.randint(1, length), (rng.randint(1, length), rng.randint(1, 4))]
        return options | {"chunk_size": rng.choice(sizes)}
    if edge.kind == "half":  # what a slice leaves out gets a cotangent of 0, also in plain JAX
        options |= {"start": rng.choice([None, 0, 2]), "step": rng.choice([None, 2, 3])}
    return options | ({"checkpoint": False} if rng.random() < 0.3 else {})


def _draw_transformation(rng: random.Random, edge: Edge, *, is_compiled: bool) -> str:
    names = {*TRANSFORMATIONS}
    if edge.kind == "long":
        names = {"value", "grad", "jvp", "linearize", "grad of jit", "vmap of grad", "jacrev"}
    elif edge.kind == "infinite":
        names -= {"jvp of grad", "linearize", "jacfwd", "jacrev"}
    elif edge.kind == "weak":
        names -= {"jvp of grad", "jacrev", "jacfwd", "grad of scan", "grad of checkpoint"}
        # The transposes of JAX lose a weak type, of an index or of a choice; loops keep it.
        if edge.kernel == "of_vector" or edge.how == "max":
            names = {name for name in names if "grad" not in name}
    if edge.kernel in WITH_VJP:
        names -= {*FORWARD}
    if edge.kind == "nonzero":
        names -= {*FORGETFUL, "jacrev"}
    if edge.kernel not in TWICE_DIFFERENTIABLE or edge.how not in (None, "sum", "mean", "several"):
        names -= {"jvp of grad"}
    is_real = edge.how in ("sum", "mean", "logsumexp", "several", "gram", "max", "min")
    if not is_real or "where" in edge.options or not any(name in SHARED for name in edge.names):
        names -= {"jacrev", "jacfwd"}
    if edge.how == "prod" and edge.kind == "infinite":
        names = {"value"}
    if not any(name in SHARED or name in "xyvr" for name in edge.names):
        names = {"value"}
    if not is_compiled:
        names &= {"value", "grad"}
    weights = [3 if name in ("value", "grad") else 1 for name in sorted(names)]
    return rng.choices(sorted(names), weights)[0]


def _draw_zeros(rng: random.Random, edge: Edge) -> tuple[int, ...]:
    count = sum(edge.batch) if edge.caller == "ragged" else edge.batch[0]
    return tuple(n for n in range(count) if rng.random() < 0.35)
