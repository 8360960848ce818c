# SPDX-License-Identifier: MIT
"""The calls whose compiled programs `programs.py` compares. They use public names only."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rankax import (
    SplitKey,
    auto_vmap,
    checkpoint_chunked_scan,
    chunked_hessian,
    chunked_jacfwd,
    chunked_jacrev,
    chunked_reduce,
    chunked_vmap,
    sliced_scan,
)
from rankax.reductions import Best, BottomK, Fold, Gram, Moments, Several, TopK

# Kernels for one item.


def spread(x):
    return jnp.sum(jnp.sin(x[:, None] * x[None]))


def energy(s, v, m):
    return v @ jnp.tanh(m) @ v + s


def forces(item, w):
    hidden = jnp.tanh(w @ item["x"])
    return {"force": hidden * item["charge"], "energy": jnp.sum(hidden**2)}


def noisy(key, x):
    return x * jax.random.normal(key, x.shape)


def nearest(x):
    return {"distance": jnp.linalg.norm(x), "place": jnp.cos(x)}


def gap(x):
    values, vectors = jnp.linalg.eigh(x @ x.T + jnp.eye(3))
    return values, vectors[:, 0]


def pendulum(x):
    return lax.scan(lambda angle, force: (angle + jnp.sin(angle) * force, angle), x[0], x)


def choice(x):
    return lax.cond(x[0] > 0, jnp.sin, lambda x: x**2, x)


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda primals, tangents: (soft(*primals), tangents[0] * jax.nn.sigmoid(*primals)))


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, t: (jnp.clip(t, -1, 1) * jnp.cos(x),))


def halved(x):
    return lax.while_loop(lambda x: x > 0.3, lambda x: x / 2, x)


@jax.custom_jvp
def root(x):
    return lax.while_loop(lambda y: jnp.abs(y * y - x) > 1e-3, lambda y: (y + x / y) / 2, x)


root.defjvp(lambda primals, tangents: (root(*primals), tangents[0] / (2 * root(*primals))))


def strides(length, x):
    def stride(state):
        count, place = state
        return count + 1, place + length

    return lax.while_loop(lambda state: state[1] < x, stride, (0, 0 * x))


def positive(x):
    return {"distance": jnp.sqrt(x[0]), "place": jnp.cos(x), "ok": x[0] > 0}


def squares(x, w):
    return jnp.tanh(jnp.outer(x, w)).sum(1) ** 2


def step(carry, x):
    carry = carry + 0.1 * jnp.sin(x - carry)
    return carry, (carry, jnp.sum(carry))


# A case is a function and its arguments, whose values do not matter.

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def ones(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


def auto_vmap_cases() -> dict[str, Case]:
    grid = ones(4, 1), ones(6, 3), ones(4, 1, 3, 3)
    row = ones(13), ones(13, 3), ones(3, 3)
    keys = jax.random.split(jax.random.key(0), 13)
    tree = {"x": ones(13, 3), "charge": ones(13)}
    ranked = {"item": {"x": 1, "charge": 0}, "w": 2}

    def energies(**options: Any) -> Callable[..., Any]:
        return auto_vmap(0, 1, 2, **options)(energy)

    return {
        "unchunked": (energies(), grid),
        "even": (energies(chunk_size=4), (ones(12), ones(12, 3), ones(3, 3))),
        "uneven": (energies(chunk_size=5), row),
        "two axes": (energies(chunk_size=12), grid),
        "two axes, both chunked": (energies(chunk_size=4), grid),
        "chunk of 1": (energies(chunk_size=1), row),
        "checkpoint=False": (energies(chunk_size=5, checkpoint=False), row),
        "jit": (energies(chunk_size=5, jit=True), row),
        "memory_limit": (energies(memory_limit="2 kB"), (ones(300), ones(300, 3), ones(3, 3))),
        "pytree": (auto_vmap(chunk_size=5, **ranked)(forces), (tree, ones(4, 3))),
        "dimensions": (auto_vmap("(n),(n)->()", chunk_size=5)(jnp.dot), (ones(13, 3), ones(3))),
        "keys": (auto_vmap(SplitKey, 1)(noisy), (jax.random.key(0), ones(13, 3))),
        "keys, chunked": (
            auto_vmap(SplitKey, 1, chunk_size=5)(noisy),
            (jax.random.key(0), ones(4, 6, 3)),
        ),
        "batch of keys": (auto_vmap(0, 1, chunk_size=5)(noisy), (keys, ones(13, 3))),
        "reduce, unchunked": (energies(reduce="sum"), grid),
        "reduce all": (energies(chunk_size=5, reduce="sum"), grid),
        "reduce all, max": (energies(chunk_size=5, reduce="max"), grid),
        "reduce axis 0": (energies(chunk_size=5, reduce="sum", reduce_axis=0), grid),
        "reduce axis -1": (energies(chunk_size=5, reduce="logsumexp", reduce_axis=-1), grid),
        "reduce a pytree": (
            auto_vmap(chunk_size=5, reduce={"force": None, "energy": "mean"}, **ranked)(forces),
            (tree, ones(4, 3)),
        ),
    }


def chunked_vmap_cases() -> dict[str, Case]:
    tree = {"x": ones(13, 3), "charge": ones(13)}
    x = ones(13, 3)
    mixed = (1, None, -1)
    out_axes = {"force": -1, "energy": 0}
    return {
        "even": (chunked_vmap(spread, 4), (ones(12, 3),)),
        "uneven": (chunked_vmap(spread, 5), (x,)),
        "tiles": (chunked_vmap(spread, 1000), (ones(4003, 8),)),
        "axis 1": (chunked_vmap(spread, 5, in_axes=1), (ones(3, 13),)),
        "axis 1, even, in and out": (chunked_vmap(jnp.cumsum, 4, 1, 1), (ones(3, 12),)),
        "in_axes": (chunked_vmap(energy, 5, (0, None, -1)), (ones(13), ones(3), ones(3, 3, 13))),
        "in_axes, even": (chunked_vmap(energy, 4, mixed), (ones(2, 12), ones(3), ones(3, 3, 12))),
        "out_axes": (
            chunked_vmap(forces, 5, ({"x": 0, "charge": 0}, None), out_axes),
            (tree, ones(4, 3)),
        ),
        "constant output": (
            chunked_vmap(lambda x, w: (x * w, w**2), 5, (0, None), (0, None)),
            (x, ones(3)),
        ),
        "closure": (lambda x, w: chunked_vmap(lambda x: spread(w * x), 5)(x), (x, ones(3))),
        "chunk of 1": (chunked_vmap(choice, 1), (x,)),
        "checkpoint=False": (chunked_vmap(spread, 5, checkpoint=False), (x,)),
        "checkpoint=False, even": (chunked_vmap(spread, 4, checkpoint=False), (ones(12, 3),)),
        "pytree": (chunked_vmap(forces, 5, (0, None)), (tree, ones(4, 3))),
        "keyword": (lambda x, s: chunked_vmap(lambda x, s: x * s, 5)(x, s=s), (x, ones(13))),
        "eigh": (chunked_vmap(gap, 5), (ones(13, 3, 3),)),
        "scan": (chunked_vmap(pendulum, 5), (ones(13, 7),)),
        "cond": (chunked_vmap(choice, 5), (x,)),
        "custom_jvp": (chunked_vmap(soft, 5), (x,)),
        "custom_vjp": (chunked_vmap(clipped, 5), (x,)),
        "bfloat16": (chunked_vmap(spread, 5), (ones(13, 3, dtype=jnp.bfloat16),)),
        "axis of length 1": (chunked_vmap(lambda x: jnp.sin(x) * x, 5), (ones(13, 1, 3),)),
        "under vmap": (jax.vmap(chunked_vmap(spread, 5)), (ones(2, 13, 3),)),
    }


def chunked_reduce_cases() -> dict[str, Case]:
    names = ["sum", "mean", "prod", "max", "argmax", "any", "logsumexp"]
    product = Fold(jnp.eye(3), lambda x: jnp.outer(x, x), jnp.matmul)
    kernels = {"any": lambda x: x > 0}
    x = ones(13, 3)
    return {
        **{name: (chunked_reduce(kernels.get(name, spread), name, 5), (x,)) for name in names},
        "unchunked": (chunked_reduce(spread, "sum", None), (x,)),
        "even, axis 1": (chunked_reduce(spread, "sum", 4, 1), (ones(3, 12),)),
        "tiles": (chunked_reduce(spread, "sum", 1000), (ones(4003, 8),)),
        "checkpoint=False": (chunked_reduce(spread, "sum", 5, checkpoint=False), (x,)),
        "TopK": (chunked_reduce(spread, TopK(3), 5), (x,)),
        "BottomK": (chunked_reduce(spread, BottomK(3), 5), (x,)),
        "Moments": (chunked_reduce(jnp.sin, Moments(), 5), (x,)),
        "Fold": (chunked_reduce(jnp.sin, product, 5), (x,)),
        "Best": (chunked_reduce(nearest, Best("distance"), 5), (x,)),
        "pytree": (chunked_reduce(nearest, {"distance": "max", "place": None}, 5), (x,)),
        "bfloat16": (chunked_reduce(spread, "sum", 5), (ones(13, 3, dtype=jnp.bfloat16),)),
        "Several": (chunked_reduce(spread, Several("sum", "min", "argmin", Moments()), 5), (x,)),
        "gram": (chunked_reduce(jnp.sin, "gram", 5), (x,)),
        "gram of a pytree": (chunked_reduce(nearest, "gram", 5), (x,)),
        "argmin and max of vectors": (
            chunked_reduce(lambda x: (x, jnp.cos(x)), ("argmin", "max"), 5),
            (x,),
        ),
    }


def where_cases() -> dict[str, Case]:
    reductions = {name: name for name in ("sum", "mean", "max", "argmin", "logsumexp")}
    objects = {
        "TopK": TopK(3),
        "Moments": Moments(),
        "Fold": Fold(jnp.float32(1), lambda x: 1 + jnp.sin(x), lax.mul),
        "Several": Several("sum", "min", "argmin"),
    }

    def scaled(x, scale):
        return {"sum": scale * jnp.sum(x), "ok": x[0] > scale}

    def of_items(reduce: Any, chunk_size: int | None = 5) -> Case:
        return chunked_reduce(positive, reduce, chunk_size, where="ok"), (ones(13, 3),)

    def of_grid(**options: Any) -> Case:
        kernel = auto_vmap(1, 0, chunk_size=5, where="ok", **options)(scaled)
        return kernel, (ones(4, 1, 3), ones(6))

    return {
        **{
            name: of_items({"distance": reduce, "place": None, "ok": None})
            for name, reduce in (reductions | objects).items()
        },
        "Best": of_items(Best("distance")),
        "unchunked": of_items("sum", None),
        "one reduced axis": of_grid(reduce="mean", reduce_axis=0),
        "two reduced axes": of_grid(reduce="max"),
    }


def lockstep_cases() -> dict[str, Case]:
    x, options = ones(13), {"lockstep": False}
    return {
        "map": (chunked_vmap(halved, 5, **options), (x,)),
        "unbounded": (chunked_vmap(halved, None, **options), (x,)),
        "two axes": (auto_vmap(0, 0, chunk_size=5, **options)(strides), (ones(4, 1), ones(6))),
        "sum": (chunked_reduce(halved, "sum", 5, **options), (x,)),
        "argmin": (chunked_reduce(halved, "argmin", 5, **options), (x,)),
        "own derivative": (chunked_vmap(root, 5, **options), (x,)),
        "own derivative, sum": (chunked_reduce(root, "sum", 5, **options), (x,)),
    }


def bucket_cases() -> dict[str, Case]:
    def energies(**options: Any) -> Case:
        kernel = auto_vmap(0, 1, 2, jit=True, bucket=True, **options)(energy)
        return kernel, (ones(7, 1), ones(11, 3), ones(7, 1, 3, 3))

    return {
        "map": energies(),
        "chunked": energies(chunk_size=5),
        "mean": energies(chunk_size=5, reduce="mean"),
        "max of one axis": energies(chunk_size=5, reduce="max", reduce_axis=0),
        "TopK": energies(chunk_size=5, reduce=TopK(3)),
        "where": (
            auto_vmap(1, jit=True, bucket=True, chunk_size=5, reduce="sum", where="ok")(positive),
            (ones(13, 3),),
        ),
    }


def jacobian_cases() -> dict[str, Case]:
    def of(chunked: Callable[..., Any], **options: Any) -> Case:
        return chunked(squares, chunk_size=5, **options), (ones(13), ones(4))

    return {
        "jacfwd": of(chunked_jacfwd),
        "jacfwd of both": of(chunked_jacfwd, argnums=(0, 1)),
        "jacfwd, gram": of(chunked_jacfwd, reduce="gram"),
        "jacfwd, diagonal": of(chunked_jacfwd, reduce="diagonal"),
        "jacrev": of(chunked_jacrev),
        "jacrev, Gram": of(chunked_jacrev, reduce=Gram(ones(13))),
        "jacrev, max": of(chunked_jacrev, reduce="max"),
        "jacrev, trace": of(chunked_jacrev, reduce="trace"),
        "hessian": (
            chunked_hessian(lambda x: jnp.sum(squares(x, x)), chunk_size=5),
            (ones(13),),
        ),
    }


def scan_cases() -> dict[str, Case]:
    def sliced(**options: Any) -> Case:
        return (lambda c, xs: sliced_scan(step, c, xs, **options)), (ones(3), ones(20, 3))

    def checkpointed(chunk_size: Any, **options: Any) -> Case:
        options["chunk_size"] = chunk_size
        args = ones(3), ones(20, 3)
        return (lambda c, xs: checkpoint_chunked_scan(step, c, xs, **options)), args

    return {
        "sliced": sliced(start=1, stop=18, step=3),
        "sliced, even": sliced(start=3, step=4),
        "sliced, negative step": sliced(step=-3),
        "sliced, reverse": sliced(reverse=True, step=3),
        "sliced, unroll": sliced(unroll=2, start=4, step=5),
        "sliced, checkpoint": sliced(checkpoint=True, start=3, step=4),
        "checkpointed": checkpointed(6),
        "checkpointed, nested": checkpointed((10, 3)),
        "checkpointed, reverse": checkpointed(5, reverse=True, unroll=2),
    }


def sharded_cases() -> dict[str, Case]:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def shared(x: jax.Array) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, P()))

    def split(*shape: int) -> jax.Array:
        return jax.device_put(ones(*shape), NamedSharding(mesh, P("d")))

    x, w = split(24, 3), shared(ones(4, 3))
    tree = {"x": x, "charge": split(24)}
    options: dict[str, Any] = {"chunk_size": 4, "devices": P("d")}
    grid = split(24, 1), shared(ones(6, 3)), shared(ones(3, 3))
    return {
        "auto_vmap": (auto_vmap(item={"x": 1, "charge": 0}, w=2, **options)(forces), (tree, w)),
        "auto_vmap, two axes": (auto_vmap(0, 1, 2, **options)(energy), grid),
        "auto_vmap, jit": (auto_vmap(0, 1, 2, chunk_size=4, jit=True)(energy), grid),
        "auto_vmap, keys": (
            auto_vmap(SplitKey, 1, **options)(noisy),
            (shared(jax.random.key(0)), x),
        ),
        **{
            f"auto_vmap, reduce {name}": (
                auto_vmap(0, 1, 2, reduce="sum", reduce_axis=axis, **options)(energy),
                grid,
            )
            for name, axis in {"axis 0": 0, "axis 1": 1, "all": None}.items()
        },
        "chunked_vmap": (chunked_vmap(forces, in_axes=(0, None), **options), (tree, w)),
        "chunked_vmap, uneven": (chunked_vmap(spread, 5, devices=P("d")), (x,)),
        **{
            f"chunked_reduce, {name}": (chunked_reduce(spread, reduction, **options), (x,))
            for name, reduction in {"sum": "sum", "max": "max", "TopK": TopK(3)}.items()
        },
        "chunked_reduce, Moments": (chunked_reduce(jnp.sin, Moments(), **options), (x,)),
        "chunked_reduce, Best": (chunked_reduce(nearest, Best("distance"), **options), (x,)),
    }


CASES: dict[str, Callable[[], dict[str, Case]]] = {
    "auto_vmap": auto_vmap_cases,
    "chunked_vmap": chunked_vmap_cases,
    "chunked_reduce": chunked_reduce_cases,
    "where": where_cases,
    "lockstep": lockstep_cases,
    "bucket": bucket_cases,
    "jacobian": jacobian_cases,
    "scan": scan_cases,
    "sharded": sharded_cases,
}
# A `jax.custom_vjp` has no forward derivative.
NO_JVP = {"chunked_vmap, custom_vjp"}
# A `jax.lax.while_loop` has no derivative in reverse.
NO_GRADIENT = {f"lockstep, {name}" for name in ("map", "unbounded", "two axes", "sum", "argmin")}
# Also called outside `jax.jit`, where several programs may be compiled.
EAGER = {
    "auto_vmap, unchunked",
    "auto_vmap, uneven",
    "auto_vmap, two axes, both chunked",
    "auto_vmap, jit",
    "auto_vmap, memory_limit",
    "auto_vmap, keys, chunked",
    "auto_vmap, reduce all",
    "auto_vmap, reduce axis 0",
    "auto_vmap, reduce a pytree",
    "chunked_vmap, even",
    "chunked_vmap, uneven",
    "chunked_vmap, custom_jvp",
    "chunked_reduce, max",
    "chunked_reduce, Best",
    "chunked_reduce, Several",
    "where, sum",
    "lockstep, map",
    "lockstep, own derivative, sum",
    "bucket, chunked",
    "jacobian, jacfwd, gram",
    "jacobian, jacrev",
    "scan, sliced",
    "sharded, auto_vmap",
    "sharded, chunked_reduce, sum",
}
