# SPDX-License-Identifier: MIT
"""The memory contract of `docs/how_it_works.md`, as XLA:GPU compiles it: the same for ten times
as many items, besides what the table allows."""

import jax
import jax.numpy as jnp
import pytest

from cases import compiled, gradient, modes, mostly_weekly, noisy
from h100 import shaped
from rankax import (
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
from rankax.reductions import Best, BottomK, Fold, Gram, Moments, Several, TopK

FEW, MANY = 2**15, 10 * 2**15  # items, in loops of more than 20 steps
SIZE = 2**10  # of a chunk, which divides both
SLACK = 2**16  # bytes; of 2**10 items, 64 bytes each


def near(x):
    return jnp.sum(jnp.tanh(x[:, None] * x[None]))


def step(carry, x):
    carry = carry + 0.1 * jnp.sin(x - carry)
    return carry, carry


def vectors(count):
    return (shaped(count, 8),)


def key(count):
    return shaped(dtype=jax.random.key(0).dtype), shaped(count, 8)


def network(x):
    return jnp.sum(jnp.tanh(x[:, :, None] * x[:, None]), (1, 2))


PRODUCT = Fold(jnp.eye(2), lambda x: jnp.outer(x[:2], x[:2]), jnp.matmul)
REDUCTIONS = {
    **{name: (near, name) for name in ("sum", "mean", "max", "argmin", "logsumexp")},
    "any": (lambda x: near(x) > 0, "any"),
    "TopK": (near, TopK(3)),
    "BottomK": (near, BottomK(3)),
    "Best": (lambda x: {"d": near(x), "x": x}, Best("d")),
    "Moments": (near, Moments()),
    "Gram": (jnp.tanh, Gram()),
    "Several": (near, Several("sum", "max", "argmin")),
}

CASES = {
    "map": (chunked_vmap(near, SIZE), vectors),
    "batched": (chunked_vmap(network, SIZE, batched=True), vectors),
    "keys": (auto_vmap(SplitKey, 1, chunk_size=SIZE)(noisy), key),
    "default": (
        lambda x, y: auto_vmap(1, 1, reduce="sum", reduce_axis=-1)(lambda x, y: jnp.exp(-x @ y))(
            x[:, None], y
        ),
        lambda n: (shaped(n, 8), shaped(2**13, 8)),
    ),
    **{
        name: (chunked_reduce(fun, reduce, SIZE), vectors)
        for name, (fun, reduce) in REDUCTIONS.items()
    },
    "where": (
        chunked_reduce(lambda x: {"v": near(x), "ok": x[0] > 0}, "sum", SIZE, where="ok"),
        vectors,
    ),
    "prod": (chunked_reduce(near, "prod", SIZE), vectors),
    "Fold": (chunked_reduce(lambda x: x, PRODUCT, SIZE), vectors),
    "two passes": (chunked_reduce(near, Several("sum", Moments()), SIZE), vectors),
    "uneven": (chunked_vmap(near, SIZE), lambda n: (shaped(n + 1, 8),)),
}
# What gradients store of each item; all else is that of a chunk.
STORED = {
    "prod": 64 / SIZE,  # a state for each tile
    "Fold": 64 / SIZE,
    # Two reductions that are not linear make two passes, whose cotangents of the inputs are added.
    "two passes": 4 * 8,
    "uneven": 4,  # a copy of its cotangents, and of no inputs
}


def bytes_of_outputs(fun, args):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(fun, *args)))


def growth(call, shapes):
    """Return the memory of ten times as many items, without that of the others."""
    few, many = (compiled(call, *shapes(count)).temporaries for count in (FEW, MANY))
    return many - few


QUICK = ("map", "sum", "logsumexp", "uneven")


@pytest.mark.parametrize("name", mostly_weekly(CASES, QUICK))
def test_ten_times_the_items_need_the_same(name):
    fun, shapes = CASES[name]
    for mode, call in modes(name, fun, shapes(FEW)):
        # The outputs of the call that is differentiated are temporaries of its gradient.
        outputs = bytes_of_outputs(fun, shapes(MANY)) if mode == "gradient" else 0
        stored = STORED.get(name, 0) * (MANY - FEW) if mode == "gradient" else 0
        assert growth(call, shapes) <= outputs + stored + SLACK, mode


def test_what_a_chunk_bounds_is_not_bounded_without():
    for options in ({"chunk_size": None}, {"chunk_size": SIZE, "checkpoint": False}):
        call = gradient(chunked_vmap(near, **options), *vectors(FEW))
        assert growth(call, vectors) > 64 * (MANY - FEW)


SCANS = {
    "sliced": lambda c, xs: sliced_scan(step, c, xs, start=1, stop=None, step=64)[1],
    "checkpointed": lambda c, xs: checkpoint_chunked_scan(step, c, xs, chunk_size=128)[0],
}


@pytest.mark.weekly
@pytest.mark.parametrize("name", SCANS)
def test_scans(name):
    carry = shaped(512)
    for mode, call in modes(name, SCANS[name], (carry, shaped(1024, 512))):
        short, long = (compiled(call, carry, shaped(n * 1024, 512)) for n in (1, 10))
        assert not long.has_unknown_steps
        if mode == "forward" and name != "sliced":
            assert long.temporaries <= short.temporaries + SLACK
        # A carry for each 64 or 128 steps, in the forward pass and again in the reverse pass.
        carries = 4 * 512 * 9 * 1024 // 64
        inputs = 4 * 512 * 9 * 1024  # whose cotangents leave the gradient in another order
        assert long.temporaries <= short.temporaries + 2 * carries + (name == "sliced") * inputs


def test_jacobians_hold_a_chunk_of_rows():
    def residuals(x):
        return jnp.tanh(x[:, None] * jnp.arange(4.0)[None]).ravel()

    for fun in (
        chunked_jacfwd(residuals, chunk_size=16, reduce="gram"),
        chunked_jacrev(residuals, chunk_size=16, reduce="gram"),
        chunked_hessian(lambda x: jnp.sum(residuals(x) ** 3), chunk_size=16, reduce="trace"),
    ):
        few, many = compiled(fun, shaped(256)), compiled(fun, shaped(2560))
        assert not many.has_unknown_steps
        rows = 16 * 4 * 2560  # of a chunk
        assert many.temporaries <= 10 * few.temporaries + 8 * 4 * rows


def test_a_while_loop_stores_some_carries():
    def walk(x):
        return checkpoint_while_loop(lambda s: s[0] < 5000, move, (0, x), max_stored=16)[1]

    def move(state):
        count, x = state
        return count + 1, x + 0.01 * jnp.sin(x)

    program = compiled(jax.grad(lambda x: jnp.sum(walk(x))), shaped(2**16))
    assert program.temporaries <= 24 * 4 * 2**16
    assert program.host_copies == 0


def test_ragged_items_are_filled_up_in_chunks():
    kernel = auto_vmap("n 8", reduce="sum", chunk_size=4)(lambda x: jnp.sum(jnp.tanh(x)))
    lengths = [3, 4, 4, 2] * 1000
    values = shaped(sum(lengths), 8)
    program = compiled(lambda values: kernel(Ragged(values, lengths)), values)
    assert program.loops
    assert not program.has_unknown_steps
    assert program.temporaries < SLACK  # not the rows of all items, filled up
    assert program.host_copies == 0
