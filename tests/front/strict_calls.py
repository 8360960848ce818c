# SPDX-License-Identifier: MIT
"""A call of every front end beside the plain program that means the same; see test_strict_table.py.

As a script, it makes the named calls in this process, which has made no other.
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax import (
    Mask,
    Ragged,
    SplitKey,
    auto_vmap,
    checkpoint_chunked_scan,
    checkpoint_while_loop,
    chunked_hessian,
    chunked_jacfwd,
    chunked_jacrev,
    chunked_reduce,
    chunked_vmap,
    sliced_scan,
)
from rankax.reductions import Best, ByLabel, Fold, Gram, Histogram, Moments, TopK

X = np.linspace(0.1, 1.0, 18, dtype=np.float32).reshape(6, 3)


def kernel(v):
    return jnp.sum(jnp.sin(v) * v)


def pair(a, b):
    return jnp.exp(-jnp.sum((a - b) ** 2))


def halved(v):
    return lax.while_loop(lambda y: y > 0.1, lambda y: y / 2, jnp.sum(v))


def noisy(v, key):
    return jnp.sum(v) * jax.random.normal(key)


def step(carry, v):
    carry = carry + kernel(v) * carry
    return carry, carry * 2


def masked(v, mask):
    return jnp.sum(jnp.where(mask[:, None], jnp.sin(v), jnp.zeros_like(v)))


def rows(x):
    return jax.vmap(kernel)(x)


def of_parts(x):
    return jnp.stack([jnp.sum(jnp.sin(part)) for part in (x[:1], x[1:4], x[4:])])


def keyed(mapped):
    return lambda x: mapped(x, jax.random.key(0))


def each_key(x, key):
    numbers = jnp.arange(len(x), dtype=jnp.uint32)
    return jax.vmap(lambda v, n: noisy(v, jax.random.fold_in(key, n)))(x, numbers)


def squares(v):
    return v * jnp.sum(v)


def outer(x):
    found = jax.vmap(squares)(x)
    return found.T @ found


def centered_outer(x):
    found = jax.vmap(squares)(x)
    found = found - jnp.mean(found, axis=0, keepdims=True)
    return found.T @ found


def whole_scan(x):
    return lax.scan(step, jnp.sum(x[0]), x)


def grown(mapped):
    return lambda x: mapped(lambda s: jnp.max(s) < 9, lambda s: s * 1.5, x[0])


def top(x):
    values, indices = lax.top_k(rows(x), 2)
    return {"values": values, "indices": indices}


NAMED = ("mean", "prod", "min", "any", "all", "argmax", "argmin")


def each_named(v):
    y = kernel(v)
    return {name: y > 1 if name in ("any", "all") else y for name in NAMED}


def others(v):
    y, label = kernel(v), (jnp.sum(v) > 1.5).astype(jnp.int32)
    return {
        "best": {"by": y, "v": v},
        "product": y,
        "label": {"label": label, "v": v},
        "bins": {"x": y, "weight": v[0]},
    }


OTHERS = {
    "best": Best("by"),
    "product": Fold(jnp.float32(1), lambda y: y, jnp.multiply),
    "label": ByLabel("label", length=2),
    "bins": Histogram([0.0, 0.5, 1.0, 2.0], of="sum", by="x"),
}


def others_at_once(x):
    one = jax.vmap(others)(x)
    first = jnp.argmin(one["best"]["by"])
    x = one["bins"]["x"]
    bins = [(low <= x) & (x < high) for low, high in [(0.0, 0.5), (0.5, 1.0), (1.0, 2.0)]]
    labels = one["label"]["label"]
    return {
        "best": jax.tree.map(lambda y: y[first], one["best"]),
        "product": jnp.prod(one["product"]),
        "label": {
            "label": None,
            "v": jnp.zeros((2, 3)).at[labels].add(one["label"]["v"]),
        },
        "bins": {
            "x": None,
            "weight": jnp.stack([jnp.sum(jnp.where(b, one["bins"]["weight"], 0.0)) for b in bins]),
        },
    }


def streamed(x):
    import rankax.stream

    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/y.zarr"
        stored = rankax.stream.run(
            auto_vmap(1)(kernel), x, out=out, memory_limit="5 MB", progress=False
        )
        return jnp.asarray(stored[...])


CALLS = {
    "map": (auto_vmap(1, chunk_size=2)(kernel), rows),
    "uneven": (chunked_vmap(kernel, 4), rows),
    "whole": (auto_vmap(1)(kernel), rows),
    "jit": (auto_vmap(1, chunk_size=2, jit=True)(kernel), rows),
    "bucket": (auto_vmap(1, jit=True, bucket=True)(kernel), rows),
    "batched": (auto_vmap(1, batched=True, chunk_size=2)(rows), rows),
    "pairs": (
        lambda x: auto_vmap(1, 1, chunk_size=7)(pair)(x[:, None], x),
        lambda x: jax.vmap(lambda a: jax.vmap(lambda b: pair(a, b))(x))(x),
    ),
    "keys": (keyed(auto_vmap(1, SplitKey, chunk_size=2)(noisy)), keyed(each_key)),
    "lanes": (auto_vmap(1, lockstep=False, chunk_size=2)(halved), jax.vmap(halved)),
    "ragged": (
        lambda x: auto_vmap(v="n 3", mask=Mask("n"))(masked)(Ragged(x, [1, 3, 2])),
        of_parts,
    ),
    "sum": (chunked_reduce(kernel, "sum", 2), lambda x: jnp.sum(rows(x))),
    "max": (chunked_reduce(kernel, "max", 4), lambda x: jnp.max(rows(x))),
    "logsumexp": (
        chunked_reduce(kernel, "logsumexp", 2),
        lambda x: jax.nn.logsumexp(rows(x)),
    ),
    "gram": (
        chunked_reduce(squares, "gram", 2),
        lambda x: jax.vmap(squares)(x).T @ jax.vmap(squares)(x),
    ),
    "centered": (chunked_reduce(squares, Gram(center=True), 2), centered_outer),
    "moments": (
        lambda x: chunked_reduce(kernel, Moments(), 2)(x)[1:],
        lambda x: (jnp.mean(rows(x)), jnp.var(rows(x))),
    ),
    "named": (
        chunked_reduce(each_named, {name: name for name in NAMED}, 4),
        lambda x: {name: getattr(jnp, name)(y) for name, y in jax.vmap(each_named)(x).items()},
    ),
    "others": (chunked_reduce(others, OTHERS, 2), others_at_once),
    "top": (lambda x: chunked_reduce(kernel, TopK(2), 2)(x)._asdict(), top),
    "jacfwd": (
        lambda x: chunked_jacfwd(squares, chunk_size=2)(x[1]),
        lambda x: jax.jacfwd(squares)(x[1]),
    ),
    "jacrev": (
        lambda x: chunked_jacrev(squares, chunk_size=2)(x[1]),
        lambda x: jax.jacrev(squares)(x[1]),
    ),
    "hessian": (
        lambda x: chunked_hessian(kernel, chunk_size=2)(x[1]),
        lambda x: jax.hessian(kernel)(x[1]),
    ),
    "sliced_scan": (
        lambda x: sliced_scan(step, jnp.sum(x[0]), x, start=1, step=2),
        lambda x: (whole_scan(x)[0], whole_scan(x)[1][1::2]),
    ),
    "checkpointed": (
        lambda x: checkpoint_chunked_scan(step, jnp.sum(x[0]), x, chunk_size=4),
        whole_scan,
    ),
    "stream": (streamed, rows),
    "while": (grown(checkpoint_while_loop), grown(lax.while_loop)),
}
NO_GRADIENT = ("lanes", "while", "stream")  # of the plain program, or at all


def called(fun, x, *, gradient=True):
    """Return what a function returns, and the gradient of the sum of its squares."""

    def loss(x):
        outs = [y for y in jax.tree.leaves(fun(x)) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(y * y) for y in outs)

    return fun(x), jax.grad(loss)(x) if gradient else None


def main(names):
    for name in names:
        fun, plain = CALLS[name]
        both = [called(f, jnp.asarray(X), gradient=name not in NO_GRADIENT) for f in (fun, plain)]
        for got, want in zip(*map(jax.tree.leaves, both), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5, err_msg=name)


if __name__ == "__main__":
    main(sys.argv[1:] or CALLS)
