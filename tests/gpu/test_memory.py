# SPDX-License-Identifier: MIT
"""The memory contract of `docs/how_it_works.md`, as XLA:GPU compiles it: the same for ten times
as many items, besides what the table allows."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import h100
from cases import gradient, modes, mostly_weekly
from h100 import shaped
from hlo import read
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

FEW, MANY = 2**14, 10 * 2**14  # items
SIZE = 2**10  # of a chunk, which divides both
SLACK = 2**16  # bytes; of 2**10 items, 64 bytes each


def near(x):
    return jnp.sum(jnp.tanh(x[:, None] * x[None]))


def halved(x):
    return lax.while_loop(lambda x: x > 0.3, lambda x: x / 2, x)


def step(carry, x):
    carry = carry + 0.1 * jnp.sin(x - carry)
    return carry, carry


def vectors(count):
    return (shaped(count, 8),)


def key(count):
    return shaped(dtype=jax.random.key(0).dtype), shaped(count, 8)


def noisy(key, x):
    return x * jax.random.normal(key, x.shape)


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
    "map of axis 1": (chunked_vmap(near, SIZE, in_axes=1), lambda n: (shaped(8, n),)),
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
}


def bytes_of_outputs(fun, args):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(fun, *args)))


def temporaries(fun, args):
    return read(h100.compiled(fun, *args)).temporaries


QUICK = ("map", "sum", "logsumexp")


@pytest.mark.parametrize("name", mostly_weekly(CASES, QUICK))
def test_ten_times_the_items_need_the_same(name):
    fun, shapes = CASES[name]
    for mode, call in modes(name, fun, shapes(FEW)):
        few, many = (temporaries(call, shapes(count)) for count in (FEW, MANY))
        # The outputs of the call that is differentiated are temporaries of its gradient.
        outputs = 0 if mode == "forward" else bytes_of_outputs(fun, shapes(MANY))
        assert many <= few + outputs + SLACK, mode


@pytest.mark.weekly
@pytest.mark.parametrize("reduce", ["prod", PRODUCT], ids=["prod", "Fold"])
def test_a_product_stores_one_state_for_each_tile(reduce):
    fun = chunked_reduce(lambda x: x if reduce is PRODUCT else near(x), reduce, SIZE)
    few, many = (temporaries(gradient(fun, *vectors(n)), vectors(n)) for n in (FEW, MANY))
    assert few < many <= few + 64 * (MANY - FEW) // SIZE + SLACK


@pytest.mark.weekly
def test_two_passes_store_a_cotangent_of_the_inputs():
    """Each pass has one, and they are added: two reductions that are not linear make two passes."""
    fun = chunked_reduce(near, Several("sum", Moments()), SIZE)
    few, many = (temporaries(gradient(fun, *vectors(n)), vectors(n)) for n in (FEW, MANY))
    assert 4 * 8 * (MANY - FEW) - SLACK < many - few < 4 * 8 * (MANY - FEW) + SLACK


def test_an_uneven_map_copies_its_outputs_and_no_inputs():
    def uneven(count):
        shapes = (shaped(count + 1, 8),)
        return temporaries(gradient(chunked_vmap(near, SIZE), *shapes), shapes)

    outputs_and_cotangents = 2 * 4 * (MANY - FEW)
    assert uneven(MANY) - uneven(FEW) <= outputs_and_cotangents + SLACK


def test_what_a_chunk_bounds_is_not_bounded_without():
    fun, shapes = CASES["map"]
    at_once = gradient(chunked_vmap(near, None), *shapes(FEW))
    assert temporaries(gradient(fun, *shapes(FEW)), shapes(FEW)) < 2**24
    growth = temporaries(at_once, shapes(MANY)) - temporaries(at_once, shapes(FEW))
    without_checkpoint = gradient(chunked_vmap(near, SIZE, checkpoint=False), *shapes(FEW))
    stored = [temporaries(without_checkpoint, shapes(n)) for n in (FEW, MANY)]
    assert max(growth, stored[1] - stored[0]) > 64 * (MANY - FEW)


SCANS = {
    "sliced": lambda c, xs: sliced_scan(step, c, xs, start=1, stop=None, step=64)[1],
    "checkpointed": lambda c, xs: checkpoint_chunked_scan(step, c, xs, chunk_size=128)[0],
    "checkpointed, nested": lambda c, xs: checkpoint_chunked_scan(
        step, c, xs, chunk_size=(256, 16)
    )[0],
}


@pytest.mark.weekly
@pytest.mark.parametrize("name", SCANS)
def test_scans(name):
    def needed(call, length):
        shapes = shaped(512), shaped(length, 512)
        return read(h100.compiled(call, *shapes))

    for mode, call in modes(name, SCANS[name], (shaped(512), shaped(1024, 512))):
        short, long = needed(call, 1024), needed(call, 10 * 1024)
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

    def needed(fun, count):
        return read(h100.compiled(fun, shaped(count)))

    for fun in (
        chunked_jacfwd(residuals, chunk_size=16, reduce="gram"),
        chunked_jacrev(residuals, chunk_size=16, reduce="gram"),
        chunked_hessian(lambda x: jnp.sum(residuals(x) ** 3), chunk_size=16, reduce="trace"),
    ):
        few, many = needed(fun, 256), needed(fun, 2560)
        assert not many.has_unknown_steps
        rows = 16 * 4 * 2560  # of a chunk
        assert many.temporaries <= 10 * few.temporaries + 8 * 4 * rows


def test_a_while_loop_stores_some_carries():
    def walk(x):
        return checkpoint_while_loop(lambda s: s[0] < 5000, move, (0, x), max_stored=16)[1]

    def move(state):
        count, x = state
        return count + 1, x + 0.01 * jnp.sin(x)

    program = read(h100.compiled(jax.grad(lambda x: jnp.sum(walk(x))), shaped(2**16)))
    assert program.temporaries <= 24 * 4 * 2**16
    assert program.host_copies == 0


def test_ragged_items_are_filled_up_in_chunks():
    kernel = auto_vmap("n 8", reduce="sum", chunk_size=4)(lambda x: jnp.sum(jnp.tanh(x)))
    lengths = [3, 4, 4, 2] * 1000

    def summed(values):
        return kernel(Ragged(values, lengths))

    program = read(h100.compiled(summed, shaped(sum(lengths), 8)))
    assert program.loops
    assert not program.has_unknown_steps
    assert program.temporaries < SLACK  # not the rows of all items, filled up
    assert program.host_copies == 0
