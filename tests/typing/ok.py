# SPDX-License-Identifier: MIT
"""Calls that a type checker accepts: a decorated kernel has the kernel's parameters and result."""

from typing import Any, Self, assert_type

import jax
import jax.numpy as jnp

from rankax import (
    SplitKey,
    Static,
    auto_vmap,
    checkpoint_chunked_scan,
    checkpoint_while_loop,
    chunked_reduce,
    chunked_vmap,
    ranks_like,
    sliced_scan,
)
from rankax.plans import BatchPlan, Level
from rankax.reductions import BottomK, Fold, Several, Sum


@auto_vmap(0, 1)
def energy(s: float | jax.Array, v: jax.Array, *, name: str = "v") -> tuple[jax.Array, str]:
    return v * s, name


@auto_vmap(x=1, chunk_size=10, checkpoint=False, jit=True)
def norm(x: jax.Array, order: int = 2) -> jax.Array:
    return jnp.sum(x**order)


@auto_vmap(x=1, key=SplitKey, reduce="mean")
def noisy(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.sum(x) + jax.random.normal(key)


@auto_vmap(ranks={"bucket": 0, "x": 1}, chunk_size=10)
def filled(x: jax.Array, bucket: float) -> jax.Array:
    return jnp.sum(x) * bucket


@auto_vmap
def bare(x: jax.Array) -> int:
    return x.ndim


class Body:
    mass: float = 1.0

    @auto_vmap(x=1)
    def pull(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x * (self.mass * scale)

    @staticmethod
    @auto_vmap(1)
    def unit(x: jax.Array) -> jax.Array:
        return x


class Comet(Body):
    # Parameters are compared as invariant, `self` too, so that an override needs this.
    @auto_vmap(x=1)
    def pull(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, x: jax.Array, scale: float = 1.0
    ) -> jax.Array:
        return super().pull(x, scale=scale)

    @auto_vmap(x=1, jit=True)
    def fall(self, x: jax.Array) -> jax.Array:
        return x * self.mass


def plain(x: jax.Array, y: int) -> list[jax.Array]:
    return [x] * y


X = jnp.ones((5, 3))

assert_type(energy(2.0, X), tuple[jax.Array, str])
assert_type(energy(s=X, v=X, name="w"), tuple[jax.Array, str])
assert_type(norm(X), jax.Array)
assert_type(norm(X, order=3), jax.Array)
assert_type(bare(X), int)
assert_type(Body().pull(X), jax.Array)
assert_type(Body().pull(X, scale=2.0), jax.Array)
assert_type(Body.pull(Body(), X), jax.Array)
assert_type(Body.unit(X), jax.Array)
assert_type(Comet().pull(X, 2.0), jax.Array)
assert_type(Comet().fall(X), jax.Array)
lowered: Any = Comet.fall.lower(Comet(), X)
lowered_method: Any = Comet().fall.lower(X)
assert_type(Body().pull.with_options(chunk_size=2)(X, scale=2.0), jax.Array)
assert_type(Body().pull.tune(X, seconds=1)(X), jax.Array)
size_of_batch: tuple[int, ...] = Body().pull.plan(X).batch_shape
assert_type(auto_vmap(1)(plain)(X, 3), list[jax.Array])

ranks: object = ranks_like(X)  # as Any, it could be a kernel to mypy
assert_type(auto_vmap(ranks)(plain)(X, 3), list[jax.Array])

assert_type(energy.plan(2.0, X), BatchPlan)
assert_type(energy.plan(2.0, X).levels, tuple[Level, ...])
batch_shape: tuple[int, ...] = energy.plan(2.0, X).batch_shape
steps: int = energy.plan(2.0, X).steps
program: Any = norm.lower(X).compile()


class StepLog:
    def of_parts(self, count: int) -> Self:
        return self

    def reports(self, length: int, size: int, steps: int) -> Self:
        return self


watched: Any = chunked_vmap(plain, 3, (0, None), progress=StepLog())(X, 2)
assert_type(energy.with_options(progress=StepLog())(2.0, X), tuple[jax.Array, str])
assert_type(energy.with_options(chunk_size=3, memory_limit="1 GB")(2.0, X), tuple[jax.Array, str])
again: Any = norm.with_options(reduce="sum", reduce_axis=(0,)).lower(X)
parts = Several(Sum(where="ok"), "argmin", where=1), Several(least="min", best=BottomK(3, where=1))
product = Fold(1.0, lambda x: x, lambda x, y: x * y, where="ok")
some: Any = norm.with_options(reduce=(parts, product), where="ok")


@auto_vmap(x="i | 3", key=SplitKey("i |"), w={"a": 0, "b": None}, reduce="sum", over="i")
def total(x: jax.Array, key: jax.Array, w: dict[str, float]) -> jax.Array:
    return jnp.sum(x) * w["a"] + jax.random.normal(key)


@auto_vmap(x=1, reduce={"v": "sum", "ok": None, "i": Several("min", "argmin")})
def several(x: jax.Array) -> dict[str, jax.Array]:
    return {"v": x, "ok": x, "i": x}


@auto_vmap(x=1, ok=0, reduce="sum", where="ok")
def counted(x: jax.Array, ok: bool) -> jax.Array:
    return x


@auto_vmap(x=1, ok=0, reduce=Sum(), where="ok", chunk_size="auto", hoist=False)
def of_object(x: jax.Array, ok: bool) -> jax.Array:
    return x


@auto_vmap(x=1, reduce="sum", fused=True)
def in_registers(x: jax.Array) -> jax.Array:
    return x


rank: int = X.ndim - 1
by_rank = auto_vmap(ranks={"x": rank})(counted.__wrapped__)
assert_type(total(X, X, {"a": 1.0, "b": 2.0}), jax.Array)
assert_type(in_registers(X), jax.Array)
assert_type(several(X), Any)
assert_type(counted(X, True), Any)
assert_type(of_object(X, ok=True), Any)
assert_type(total.with_options(chunk_size=3, jit=True)(X, X, {}), jax.Array)
assert_type(total.with_options(reduce=Several("min", "max"))(X, X, {}), Any)
assert_type(total.with_options(where="ok", reduce="sum")(X, X, {}), Any)
name: str = norm.__name__

assert_type(Static(3).value, int)
assert_type(Static("a"), Static[str])

mapped: Any = chunked_vmap(plain, 3, in_axes=(0, None), out_axes=0, checkpoint=False)(X, 2)
summed: Any = chunked_reduce(plain, reduce="sum", chunk_size=3, in_axes=(0, None))(X, 2)
unmapped: Any = chunked_vmap(jnp.sin, None)(X)


def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return carry + x, (carry, 1)


assert_type(sliced_scan(step, X[0], X, step=2), tuple[jax.Array, tuple[jax.Array, int]])
assert_type(
    checkpoint_chunked_scan(step, X[0], X, chunk_size=[2, 3]),
    tuple[jax.Array, tuple[jax.Array, int]],
)
assert_type(checkpoint_while_loop(jnp.any, jnp.sin, X, max_stored=3), jax.Array)
