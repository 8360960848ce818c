# SPDX-License-Identifier: MIT
"""Mistakes that a type checker must see: a line without its error is itself an error.

Both checkers report an ignore that nothing needs, so each line below is seen to be wrong.
"""

import jax
import jax.numpy as jnp

from rankax import (
    Static,
    auto_vmap,
    checkpoint_chunked_scan,
    chunked_reduce,
    chunked_vmap,
    sliced_scan,
)
from rankax.reductions import TopK


@auto_vmap(0, 1)
def energy(s: float, v: jax.Array, *, name: str = "v") -> jax.Array:
    return v * s


class Body:
    @auto_vmap(x=1)
    def pull(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x * scale


def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return carry, x


X = jnp.ones((5, 3))

TopK(3, largest=True)  # type: ignore

energy(2.0)  # type: ignore
energy(2.0, X, X)  # type: ignore
energy("2", X)  # type: ignore
energy(2.0, X, name=3)  # type: ignore
energy(2.0, X, title="w")  # type: ignore
length: int = energy(2.0, X)  # type: ignore
energy(2.0, X).no_such_attribute  # type: ignore
energy.no_such_attribute  # type: ignore

Body().pull()  # type: ignore
Body().pull(X, scale="a")  # type: ignore
Body().pull(X, 1.0, 2.0)  # type: ignore
Body.pull(X)  # type: ignore
text: str = Body().pull(X)  # type: ignore
Body().pull.no_such_attribute  # type: ignore
Body().pull.with_options(chunksize=3)  # type: ignore
Body().pull.with_options(chunk_size=3)(X, scale="a")  # type: ignore

auto_vmap(0, chunk_size="3")  # type: ignore
auto_vmap(0, jit="yes")  # type: ignore
auto_vmap(0)(3)  # type: ignore
auto_vmap(0, chunksize=100)  # type: ignore
auto_vmap(x=1, jitt=True)  # type: ignore
auto_vmap(x=1, memory=2.5)  # type: ignore
auto_vmap(0, reduce="sums")  # type: ignore
auto_vmap(0, reduce={"v": "sum", "w": "maximum"})  # type: ignore
auto_vmap(0, reduce=("sum", "maximum"))  # type: ignore
auto_vmap(0, reduce=jnp.sum)  # type: ignore
auto_vmap(0, reduce="sum", over=1)  # type: ignore
auto_vmap(0, reduce="sum", where=1.5)  # type: ignore
auto_vmap(x="i | 3", reduce="sum", over="i")(step)(X)  # type: ignore
auto_vmap(x=1, reduce="sum", where="ok")(step)(X)  # type: ignore
chunked_reduce(step, "sums", 3)  # type: ignore
auto_vmap(0)(step).with_options(reduce="sums")  # type: ignore
auto_vmap(0)(step).with_options(chunksize=3)  # type: ignore
auto_vmap(0)(step).with_options(chunk_size="3")  # type: ignore

Static()  # type: ignore
Static(3).value.upper()  # type: ignore
chunked_vmap(step)  # type: ignore
chunked_vmap(step, "3")  # type: ignore
chunked_vmap(step, 3, spmd_axis_name="i")  # type: ignore
sliced_scan(step, X, X, None, False, 1, 2)  # type: ignore
sliced_scan(step, "init", X)  # type: ignore
checkpoint_chunked_scan(step, X, X, chunk_size="3")  # type: ignore
