# SPDX-License-Identifier: MIT
"""Eager calls, first and warm, transfer nothing that JAX could not see; and leak no tracer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import at_each_run, slow
from rankax import (
    Ragged,
    auto_vmap,
    checkpoint_chunked_scan,
    chunked_jacfwd,
    chunked_jacrev,
    sliced_scan,
)
from rankax.reductions import Best, BottomK, Fold, Moments, Several, TopK

X = np.linspace(0.1, 1.0, 21, dtype=np.float32).reshape(7, 3)
ZERO, SHIFT = jax.device_put(np.float32(0)), jax.device_put(np.float32(2))
ALL = Several(
    *("sum", "mean", "prod", "max", "min", "argmax", "argmin", "logsumexp", "gram"),
    *(TopK(2), BottomK(3), Moments(), Fold(ZERO, lambda x: x, lambda a, b: a + b)),
)


def kernel(x):
    total = jnp.sum(jnp.sin(x)) * SHIFT
    return {"x": total, "ok": total > 0.5}


def until_small(x):
    return jax.lax.while_loop(lambda y: y > 0.1, lambda y: y / 2, jnp.sum(x))


def step(carry, x):
    carry = carry * jnp.sum(x) + 1
    return carry, carry * 2


def squares(x):
    return x * jnp.sum(x)


FLOATS = Several("sum", "mean", "prod", "max", "logsumexp", "gram")
REDUCED = {"x": ALL, "ok": Several("any", "all")}
CALLS = {
    "a map": auto_vmap(1, chunk_size=3)(kernel),
    "best": auto_vmap(1, reduce=Best("x"), chunk_size=3)(kernel),
    "checkpoints": lambda x: checkpoint_chunked_scan(step, ZERO, x, chunk_size=3),
    "reductions": auto_vmap(1, reduce=REDUCED, chunk_size=3)(kernel),
    "where": auto_vmap(1, reduce={**REDUCED, "ok": None}, where="ok", chunk_size=3)(kernel),
    "lanes": auto_vmap(1, reduce="sum", lockstep=False, chunk_size=3)(until_small),
    "a gradient": lambda x: jax.vjp(auto_vmap(1, reduce=FLOATS, chunk_size=3)(squares), x)[0],
    "a matrix": chunked_jacfwd(squares, reduce="gram", chunk_size=2),
    "rows": chunked_jacrev(squares, reduce="gram", chunk_size=2),
    "windows": lambda x: sliced_scan(step, ZERO, x, step=3, reduce="mean"),
}


@pytest.mark.parametrize("call", at_each_run(["a map", "best", "checkpoints"], CALLS))
def test_eager_calls_transfer_nothing_implicitly(call):
    x = jax.device_put(X)
    for _ in range(2):
        with jax.transfer_guard("disallow"):
            jax.block_until_ready(call(x))


@pytest.mark.parametrize(
    "options", [{}, {"jit": True}, slow({"reduce": "sum"}), slow({"jit": True, "bucket": True})]
)
def test_ragged_items_transfer_nothing_implicitly(options):
    signature, kernel = ("(n)->()", jnp.sum) if "reduce" in options else ("(n)->(n)", squares)
    mapped = auto_vmap(signature, **{"chunk_size": 2, **options})(lambda x: kernel(x))
    items = Ragged(jnp.arange(12.0), [1, 2, 3, 0, 6])
    for _ in range(2):
        with jax.transfer_guard("disallow"):
            jax.block_until_ready(mapped(items))


@pytest.mark.parametrize("options", [{"chunk_size": 3}, slow({"reduce": "argmax"})], ids=str)
def test_buckets_leak_no_tracer(options):
    mapped = auto_vmap(1, jit=True, bucket=(8,), **options)(lambda x: jnp.sum(x))
    x = jnp.asarray(X)
    with jax.checking_leaks():
        mapped(x)
        mapped(x[:5])
        jax.vjp(mapped, x)
