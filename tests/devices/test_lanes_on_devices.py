# SPDX-License-Identifier: MIT
"""Items that end by themselves, on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax import SplitKey, auto_vmap
from sharding import ODD, N, collatz, compiled, on, put, same, sent


@on("Auto")
def test_items_end_alone(mesh):
    w = jnp.array([0.3, 0.7])
    mapped = auto_vmap(n=0, w=1, chunk_size=3, lockstep=False, devices="all")(collatz)
    totals = mapped.with_options(reduce="sum")
    best = mapped.with_options(reduce=(None, "argmax"))
    for length, wrapped in ((N, jax.jit), (ODD, lambda fun: fun)):
        n = np.arange(1, length + 1, dtype=np.int32)
        counts, sums = jax.jit(jax.vmap(collatz, (0, None)))(n, w)
        want = (counts, sums), (jnp.sum(counts), jnp.sum(sums)), (counts, jnp.argmax(sums))
        same(wrapped(lambda n: (mapped(n, w), totals(n, w), best(n, w)))(n), want)
    # A vmapped loop asks all devices at each step whether it is done; here each ends alone.
    assert sent(compiled(mapped, jnp.arange(1, N + 1), w)) == {}
    plan = mapped.plan(jnp.arange(N), w)
    assert (plan.lanes, plan.devices) == (3, ((0, mesh.size),))


@on("Auto")
def test_noise_and_progress_of_items_that_end_alone(mesh):
    """Noise is that of the whole batch, and progress counts all items."""
    key, seen = jax.random.key(1), []

    def noisy(n, key):
        def body(state):
            return state[0] - 1, state[1] + jax.random.normal(jax.random.fold_in(key, state[0]))

        return lax.while_loop(lambda state: state[0] > 0, body, (n, jnp.float32(0)))[1]

    n, told = jnp.arange(ODD) % 5, lambda *now: seen.append(now)
    options = {"chunk_size": 3, "lockstep": False, "devices": "all", "progress": told}
    drawn = auto_vmap(n=0, key=SplitKey, **options)(noisy)(n, key)
    same(drawn, jax.jit(jax.vmap(noisy))(n, jax.random.split(key, ODD)))
    jax.effects_barrier()
    assert seen[-1][0] == seen[-1][1] == max(seen)[0]


@on("Explicit", enter=False)
def test_items_end_alone_on_an_explicit_mesh(mesh):
    n, w = np.arange(1, N + 1, dtype=np.int32), jnp.array([0.3, 0.7])
    lying = put(mesh, n, "d")
    mapped = auto_vmap(n=0, w=1, chunk_size=3, lockstep=False)(collatz)
    totals = mapped.with_options(reduce="sum")

    def slopes(gradient, fun, n, w):
        pulled = gradient(lambda w: jnp.sum(fun(n, w)[1]))(w)
        return jax.jvp(lambda w: fun(n, w)[1], (w,), (w,)), pulled

    @jax.jit
    def plain(n, w):
        each = jax.vmap(collatz, (0, None))
        counts, sums = each(n, w)
        return (counts, sums), (jnp.sum(counts), jnp.sum(sums)), slopes(jax.jacfwd, each, n, w)

    want = plain(n, w)
    with jax.set_mesh(mesh):
        forward = compiled(lambda n: (mapped(n, w), totals(n, w)), lying)
        assert sent(forward) == {"all-reduce": 2}  # of the totals
        found = *forward(lying), slopes(jax.grad, mapped, lying, w)
    same(found, want, rtol=1e-3, atol=1e-3)
