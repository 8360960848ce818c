# SPDX-License-Identifier: MIT
"""What depends on fewer axes than an item is evaluated over those axes only."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rankax
from helpers import assert_same, slow, temporary_bytes, weekly
from rankax import SplitKey, auto_vmap
from rankax._options import Options
from rankax.core.protocols import NO_RULES
from rankax.ext.equations import operations
from rankax.reductions import Best, TopK

R = np.random.default_rng(0)
X, Y = (jnp.asarray(R.normal(size=(n, 3)), jnp.float32) for n in (13, 29))
W, V = (jnp.asarray(R.normal(size=shape) / 4, jnp.float32) for shape in ((3, 32), (32, 4)))


FILTER = jnp.asarray(R.normal(size=5), jnp.float32)


def net(x):
    return jnp.tanh(jnp.tanh(x @ W) @ V)


@jax.custom_vjp
def clipped(x):
    return jnp.sum(jnp.sin(x @ W) ** 2)


def clipped_backward(x, ct):
    return (jnp.clip(jax.grad(lambda x: jnp.sum(jnp.sin(x @ W) ** 2))(x), -0.1, 0.1) * ct,)


clipped.defvjp(lambda x: (clipped(x), x), clipped_backward)


def solved(x):
    return jnp.linalg.solve(jnp.eye(3) * 4 + jnp.outer(x, x), x)


def doubled(x):
    return jax.lax.fori_loop(0, 5, lambda _, z: jnp.tanh(z @ W @ V[:, :3] + x), x)


KERNELS = {
    "two nets": lambda x, y: jnp.exp(-jnp.sum((net(x) - net(y)) ** 2)),
    "one net": lambda x, y: jnp.sin(jnp.sum(net(y)) + x[0]),
    "a tangent kernel": lambda x, y: (
        jax.grad(lambda x: net(x)[0])(x) @ jax.grad(lambda y: net(y)[1])(y)
    ),
    "a rule": lambda x, y: clipped(x) * y[0] + clipped(y),
    "a solver": lambda x, y: solved(x) @ y,
    "a loop": lambda x, y: jnp.sum(doubled(x) * doubled(y)),
    "an output of one side": lambda x, y: (net(x), jnp.sum(x * net(y)[:3])),
    "a convolution": lambda x, y: jnp.tanh(
        jnp.sum(jnp.convolve(x, FILTER) * jnp.convolve(y, FILTER) ** 2) / 50
    ),
    "nothing to move": lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2)),
}
CALLS = {
    "a map": {"chunk_size": 7},
    "a sum of rows": {"reduce": "sum", "reduce_axis": -1, "chunk_size": 10},
    "a sum of columns": {"reduce": "sum", "reduce_axis": 0, "chunk_size": 10},
    "all": {"reduce": "logsumexp", "chunk_size": 50},
    "the largest": {"reduce": "max", "reduce_axis": -1, "chunk_size": 10},
}


def by_hand(kernel, call):
    """Return the same call by `jax.vmap`."""

    def pairs(x, y):
        outs = jax.vmap(lambda x: jax.vmap(lambda y: kernel(x, y))(y))(x)
        if "reduce" not in call:
            return outs
        axis = call.get("reduce_axis", (0, 1))
        axis = axis % 2 if isinstance(axis, int) else axis
        fun = {"sum": jnp.sum, "max": jnp.max, "logsumexp": jax.nn.logsumexp}[call["reduce"]]
        return jax.tree.map(lambda out: fun(out, axis=axis), outs)

    return pairs


def total(pairs, x, y):
    return sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(pairs(x, y)))


def calls_of(kernel, call, **options):
    mapped = auto_vmap(x=1, y=1, **call, **options)(kernel)
    return lambda x, y: mapped(x[:, None], y)


def computed(fun, *args, name="tanh"):
    """Return how many numbers of a function are computed."""
    program = jax.make_jaxpr(fun)(*args).jaxpr
    return sum(
        each.times * each.eqn.outvars[0].aval.size
        for each in operations(program)
        if each.name == name and not each.calls
    )


SOME = "two nets", "a rule", "a solver"  # in each run, in every call


@pytest.mark.parametrize(
    ("name", "call"),
    [
        pair if pair[0] in SOME or pair[1] == "a sum of rows" else slow(*pair)
        for pair in itertools.product(KERNELS, CALLS)
    ],
)
def test_values_and_gradients_are_those_of_vmap(name, call):
    kernel, call = KERNELS[name], CALLS[call]
    mine, plain = calls_of(kernel, call), by_hand(kernel, call)
    assert_same(mine(X, Y), plain(X, Y), rtol=2e-5, atol=2e-5)  # eager
    if call.get("reduce") == "max":
        # XLA may compute items twice, find none equal to the largest, and divide 0 by 0.
        plain = calls_of(kernel, call, hoist=False)
    gradients = (jax.jit(jax.grad(functools.partial(total, f), (0, 1))) for f in (mine, plain))
    assert_same(*(gradient(X, Y) for gradient in gradients), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["two nets", slow("a tangent kernel"), slow("a solver")])
def test_second_derivatives(name):
    call = CALLS["a sum of rows"]

    def second(pairs):
        gradient = jax.grad(functools.partial(total, pairs), (0, 1))
        return jax.jit(lambda x, y: jax.jvp(gradient, (x, y), (jnp.ones_like(x), y)))(X, Y)

    pairs = calls_of(KERNELS[name], call), by_hand(KERNELS[name], call)
    assert_same(*map(second, pairs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("call", ["a map", "a sum of rows", "all"])
def test_a_net_is_evaluated_once_for_each_point(call):
    kernel, numbers = KERNELS["two nets"], 32 + 4
    mine = calls_of(kernel, CALLS[call])
    # In chunks that do not divide an axis, a few points come again.
    assert computed(mine, X, Y) <= (len(X) + len(Y) + 14) * numbers
    gradient = jax.grad(functools.partial(total, mine), (0, 1))
    assert computed(gradient, X, Y) <= 3 * (len(X) + len(Y) + 14) * numbers
    assert computed(calls_of(kernel, CALLS[call], hoist=False), X, Y) > len(X) * len(Y) * numbers
    with rankax.options(hoist=False):
        in_scope = computed(calls_of(kernel, CALLS[call]), X, Y)
    assert in_scope > len(X) * len(Y) * numbers


def test_parts_of_three_axes():
    kernel = auto_vmap(x=1, y=1, z=1, chunk_size=40)(
        lambda x, y, z: jnp.sum(net(x) * net(y) + jnp.tanh(net(x) @ V.T @ V) * net(z))
    )
    plain = kernel.with_options(chunk_size=None)
    args = X[:5, None, None], Y[:6, None], Y[:7]
    assert_same(kernel(*args), plain(*args), rtol=2e-5, atol=2e-5)
    assert computed(kernel, *args) <= (5 + 6 + 7 + 5) * 40


def test_a_rule_of_derivatives_moves_whole():
    mine = calls_of(lambda x, y: clipped(x) * y[0], {"chunk_size": 10, "reduce": "sum"})
    found = jax.grad(mine)(X, Y)
    one = jax.vmap(jax.grad(clipped))(X) * jnp.sum(Y[:, 0])  # clipped, then scaled
    assert_same(found, one, rtol=1e-4, atol=1e-4)


def seen(_):
    """Do nothing."""


CANNOT = {
    "an effect": lambda x, y: (jax.debug.callback(seen, x[0]), jnp.sum(net(y)) * x[0])[1],
    "a callback": lambda x, y: (
        x[0] * jnp.sum(net(jax.pure_callback(np.asarray, y, y, vmap_method="sequential")))
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_calls_back_is_not_moved(name):
    programs = [
        str(jax.make_jaxpr(calls_of(CANNOT[name], {"chunk_size": 7}, hoist=hoist))(X, Y))
        for hoist in (True, False)
    ]
    assert programs[0] == programs[1]


OPTIONS = {
    "memory_limit": {"memory_limit": "200 kB"},
    "lanes": {"lockstep": False},
    "cpu_math": {"cpu_math": True},
}


AT_EACH_RUN = {("memory_limit", "a sum of rows"), ("lanes", "a map")}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        pair if pair in AT_EACH_RUN else weekly(*pair)
        for pair in itertools.product(OPTIONS, [call for call in CALLS if call != "the largest"])
    ],
)
def test_options_that_hoist_too(name, call):
    kernel, call = KERNELS["two nets"], {**CALLS[call], **OPTIONS[name]}
    call = {k: v for k, v in call.items() if k != "chunk_size" or "memory_limit" not in call}
    x, y = jnp.tile(X, (3, 1)), jnp.tile(Y, (3, 1))
    options = {k: v for k, v in call.items() if k not in ("reduce", "reduce_axis")}
    mine = calls_of(kernel, call)
    plain = by_hand(kernel, {k: v for k, v in call.items() if k not in options})
    assert_same(mine(x, y), plain(x, y), rtol=2e-5, atol=2e-5)
    gradients = (jax.jit(jax.grad(functools.partial(total, f), (0, 1))) for f in (mine, plain))
    assert_same(*(gradient(x, y) for gradient in gradients), rtol=2e-4, atol=2e-4)
    if name != "cpu_math":  # which has no tanh
        assert computed(mine, x, y) <= (len(x) + len(y) + 30) * 36


def test_lanes_of_what_is_hoisted():
    def steps(x):
        return jax.lax.while_loop(lambda z: jnp.sum(z * z) > 1e-2, lambda z: jnp.tanh(z) / 2, x)

    def kernel(x, y):
        return jnp.sum(steps(x)[:2] * steps(y)[1:])

    mine = calls_of(kernel, {"reduce": "sum", "reduce_axis": -1}, lockstep=False, chunk_size=8)
    plain = by_hand(kernel, {"reduce": "sum", "reduce_axis": -1})
    assert_same(mine(X, Y), plain(X, Y), rtol=1e-5, atol=1e-5)
    loops = str(jax.make_jaxpr(mine)(X, Y)).count("while[")
    assert loops >= 2


# Items that are left out: row 2 and columns 3 and 7, whose nets and derivatives are infinite.
POSITIVE = jnp.abs(X).at[2].set(0), jnp.abs(Y).at[3].set(0).at[7].set(-1)


def masked(reduce, where, axis, **options):
    """Return the sum of a reduction of some pairs, as a function of weights and points."""

    def item(w, x, y):
        f, g = (jnp.log(z[0]) + jnp.sqrt(jnp.tanh(z @ w**2)) @ V for z in (x, y))
        return jnp.exp(-jnp.sum((f - g) ** 2)) + x[1]

    def total(w, x, y):
        ok = jnp.outer(jnp.min(x, -1), jnp.min(y, -1)) > 0
        if options.get("plain"):
            x, y = (jnp.where(jnp.min(z, -1, keepdims=True) > 0, z, 1) for z in (x, y))
            outs = jax.vmap(lambda x: jax.vmap(lambda y: item(w, x, y))(y))(x)
            function = {"sum": jnp.sum, "max": jnp.max, "logsumexp": jax.nn.logsumexp}[reduce]
            initial = {"initial": -jnp.inf} if reduce == "max" else {}
            out = function(outs, axis, where=ok, **initial)
        elif where == "mask":
            call = auto_vmap(1, 1, 0, reduce=reduce, reduce_axis=axis, where="mask", **options)
            out = call(lambda x, y, mask: item(w, x, y))(x[:, None], y, ok)
        else:
            how = {"reduce": {"out": reduce, "ok": "any"}, "reduce_axis": axis, "where": "ok"}

            def kernel(x, y):
                return {"out": item(w, x, y), "ok": jnp.min(x) * jnp.min(y) > 0}

            out = auto_vmap(1, 1, **how, **options)(kernel)(x[:, None], y)["out"]
        return jnp.sum(jnp.sin(jnp.where(jnp.isfinite(out), out, 0)))

    return total


@pytest.mark.parametrize(
    ("reduce", "where", "axis"),
    [
        ("sum", "output", None),
        ("logsumexp", "mask", -1),
        slow("sum", "mask", -1),
        slow("max", "output", 0),
        slow("sum", "output", -1),
        slow("max", "mask", 0),
        slow("logsumexp", "output", -1),
    ],
)
def test_a_piece_that_is_left_out_sends_nothing_back(reduce, where, axis):
    mine, plain = (
        masked(reduce, where, axis, **own) for own in ({"chunk_size": 10}, {"plain": True})
    )

    def both(total):
        gradient = jax.value_and_grad(total, (0, 1, 2))
        if reduce == "sum":  # of second order, too
            return jax.jit(lambda *args: (gradient(*args), jax.jvp(gradient, args, args)[1][1]))
        return jax.jit(gradient)

    got, want = both(mine)(W, *POSITIVE), both(plain)(W, *POSITIVE)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(got))
    assert_same(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("where", ["mask", "output"])
def test_pieces_of_masked_items_are_evaluated_once(where):
    mine, points = masked("sum", where, -1, chunk_size=10), len(X) + len(Y)
    assert computed(mine, W, *POSITIVE) <= (points + 14) * 32
    gradient = jax.grad(mine, (0, 1, 2))
    assert computed(gradient, W, *POSITIVE) <= 3 * (points + 14) * 32


def test_pieces_of_two_axes_that_are_left_out():
    """What depends on x and y has an x that counts elsewhere."""

    def kernel(x, y, z):
        return {
            "v": jnp.sum(jnp.sin(jnp.exp(jnp.log(x[0] * y[0] * net(x) ** 2)))) * z[0],
            "ok": x[0] * y[0] > 0,
        }

    x, y, z = (jnp.abs(own) + 0.1 for own in (X[:5], Y[:6], Y[:7]))
    x, y = x.at[2].multiply(-1), y.at[4].multiply(-1)
    call = {"reduce": {"v": "sum", "ok": "any"}, "where": "ok", "chunk_size": 20}
    mine = auto_vmap(1, 1, 1, **call)(kernel)
    notes = mine.plan(x[:, None, None], y[:, None], z).notes
    assert any("once for each of 30," in note for note in notes)

    def total(call):
        return lambda x, y, z: call(x[:, None, None], y[:, None], z)["v"]

    got, want = (
        jax.grad(total(own), (0, 1, 2))(x, y, z) for own in (mine, mine.with_options(hoist=False))
    )
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in got)
    assert_same(got, want, rtol=1e-4, atol=1e-4)


def test_a_bucket_of_a_reduction():
    call = {"reduce": "sum", "reduce_axis": -1, "chunk_size": 10}
    mine = auto_vmap(1, 1, bucket=True, jit=True, **call)(KERNELS["two nets"])
    assert len(mine.plan(X[:, None], Y).notes) >= 2
    plain = by_hand(KERNELS["two nets"], call)

    def pairs(x, y):
        return mine(x[:, None], y)

    got, want = (
        jax.jit(jax.value_and_grad(functools.partial(total, f), (0, 1)))(X, Y)
        for f in (pairs, plain)
    )
    assert_same(got, want, rtol=2e-4, atol=2e-4)


def test_keys_draw_the_same_numbers():
    kernel = auto_vmap(x=1, y=1, key=SplitKey, chunk_size=7)(
        lambda x, y, key: jnp.sum(net(x) * net(y)) + jax.random.normal(key)
    )
    args = X[:, None], Y, jax.random.key(0)
    assert_same(kernel(*args), kernel.with_options(hoist=False)(*args), rtol=1e-5, atol=1e-5)
    own = jax.random.split(jax.random.key(1), len(X))[:, None]
    drawn = auto_vmap(x=1, y=1, key=0, chunk_size=7)(
        lambda x, y, key: x @ y * jnp.sum(net(jax.random.normal(key, 3)))
    )
    args = X[:, None], Y, own
    assert_same(drawn(*args), drawn.with_options(chunk_size=None)(*args), rtol=1e-5, atol=1e-5)


def test_weights_that_change_are_seen():
    weights = [W]
    kernel = auto_vmap(x=1, y=1, chunk_size=7)(
        lambda x, y: jnp.sum(jnp.tanh(x @ weights[0]) * jnp.tanh(y @ weights[0]))
    )
    kernel(X[:, None], Y)
    weights[0] = 2 * W
    expected = jnp.tanh(X @ (2 * W)) @ jnp.tanh(Y @ (2 * W)).T
    assert_same(kernel(X[:, None], Y), expected, rtol=1e-5, atol=1e-5)


def test_memory_is_that_of_the_results():
    """Of a gradient, too: at four times the batch, four times the features, and the same loop."""

    def temporaries(n):
        x = jax.ShapeDtypeStruct((n, 3), jnp.float32)
        mine = calls_of(KERNELS["two nets"], {"reduce": "sum", "chunk_size": 1000})
        return temporary_bytes(jax.grad(functools.partial(total, mine), (0, 1)), x, x)

    results = 2 * 4 * 4  # bytes for each point, of which the cotangents take as many
    small, large = temporaries(1000), temporaries(4000)
    assert large - small <= 4 * results * 3000


def test_results_that_are_too_large_are_computed_again():
    def kernel(x, y):
        return jnp.sum(jnp.tanh(jnp.outer(x, x)) + jnp.tanh(jnp.outer(y, y)))

    x, y = (jax.ShapeDtypeStruct((300, *more, 256), jnp.float32) for more in ((1,), ()))
    numbers = [
        computed(auto_vmap(x=1, y=1, chunk_size=100, hoist=h)(kernel), x, y) for h in (True, False)
    ]
    # In chunks of 10 x 10 pairs, each is computed again for each row and each column of a chunk.
    assert numbers[0] <= 300 * 300 // 10 * 256**2 * 2 * 1.5
    assert numbers[1] > 300 * 300 * 256**2


@pytest.mark.slow
def test_a_limit_without_room_for_results():
    kernel = auto_vmap(x=1, y=1, memory_limit="30 kB")(KERNELS["two nets"])
    x, y = jnp.tile(X, (20, 1)), jnp.tile(Y, (10, 1))
    assert not any("once for" in note for note in kernel.plan(x[:, None], y).notes)
    roomy = kernel.with_options(memory_limit="100 kB").plan(x[:, None], y)
    assert any("once for" in note for note in roomy.notes)


def test_a_plan_names_what_is_evaluated_once():
    plan = auto_vmap(x=1, y=1, chunk_size=7)(KERNELS["two nets"]).plan(X[:, None], Y)
    assert plan.notes == ("f(x): once for each of 13, 1 kB", "f(y): once for each of 29, 1 kB")
    assert [leaf.path for leaf in plan.leaves] == ["x", "y", "f(x)", "f(y)"]
    assert "mapping f(y)" in str(plan)
    apart = auto_vmap(x=1, y=1, chunk_size=7, hoist=False)(KERNELS["two nets"])
    assert apart.plan(X[:, None], Y).notes == ()


def test_half_precision_is_added_in_32_bits():
    w = jnp.ones((3, 8), jnp.bfloat16) / 8

    def gradient(**options):
        def loss(w):
            def kernel(x, y):
                return jnp.sum(jnp.tanh(x @ w) * jnp.tanh(y @ w)).astype(jnp.float32)

            mapped = auto_vmap(x=1, y=1, reduce="sum", **options)(kernel)
            return mapped(X.astype(jnp.bfloat16)[:, None], Y.astype(jnp.bfloat16))

        return jax.jit(jax.grad(loss))(w).astype(jnp.float32)

    expected = gradient(chunk_size=None)
    for size in (5, 10, 64):
        assert_same(gradient(chunk_size=size), expected, rtol=2e-2, atol=5e-2)


# Products of what two axes have.


@pytest.mark.parametrize("call", [CALLS["a map"], CALLS["a sum of rows"], CALLS["all"]], ids=str)
def test_products_are_those_of_vmap(call):
    a, b = (jnp.asarray(R.normal(size=(n, 16)) / 4, jnp.float32) for n in (150, 263))
    mine, plain = (
        calls_of(lambda x, y: jnp.exp(x @ y), call),
        by_hand(lambda x, y: jnp.exp(x @ y), call),
    )
    assert_same(mine(a, b), plain(a, b), rtol=2e-5, atol=2e-5)
    gradients = (jax.jit(jax.grad(functools.partial(total, f), (0, 1))) for f in (mine, plain))
    assert_same(*(gradient(a, b) for gradient in gradients), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 50, 1000, 5000])
@pytest.mark.parametrize("reduce", [{}, {"reduce": "sum", "reduce_axis": -1}], ids=["map", "sum"])
def test_chunks_of_products_have_two_sides(reduce, size):
    kernel = auto_vmap(a=1, b=1, chunk_size=size, **reduce)(lambda a, b: jnp.exp(a @ b))
    plan = kernel.plan(*(jax.ShapeDtypeStruct((2000, *one, 16), "float32") for one in ((1,), ())))
    assert plan.in_flight <= size
    if Options().rules is not NO_RULES:
        rows, columns = (level.tile for level in plan.levels)
        assert rows == columns


tuned = pytest.mark.skipif(Options().rules is NO_RULES, reason="no tiles without the rules")


@tuned
def test_tiles_of_long_vectors_have_two_long_sides():
    def tiles(kernel, size):
        kernel = auto_vmap(a=1, b=1, reduce="sum", reduce_axis=-1)(kernel)
        x, y = (jax.ShapeDtypeStruct((2000, *one, size), "float32") for one in ((1,), ()))
        return [level.tile for level in kernel.plan(x, y).levels]

    assert [tiles(lambda a, b: jnp.exp(a @ b), size) for size in (16, 784, 20_000)] == [
        [250, 250],
        [250, 250],
        [25, 25],
    ]
    # A gradient stores the difference for each item of a tile.
    both = tiles(lambda a, b: jnp.exp(a @ b - jnp.sum((a - b) ** 4)), 784)
    assert max(both) <= 40


NUMBERS = jnp.asarray(R.normal(size=(2, 301)), jnp.float32)


@tuned
def test_pairs_of_numbers_have_two_sides():
    def tiles(kernel, *args):
        return [level.tile for level in kernel.plan(*args).levels]

    x, y = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((2000, 1), (2000,)))
    kernel = auto_vmap(0, 0, reduce="max", reduce_axis=-1)(lambda x, y: jnp.exp(-((x - y) ** 2)))
    assert tiles(kernel, x, y) == [125, 125]
    assert tiles(kernel.with_options(chunk_size=100), x, y) == [10, 10]
    few, many = (jax.ShapeDtypeStruct(own, "float32") for own in ((3, 1), (100_000,)))
    assert tiles(kernel, few, many) == [3, 1000]
    assert tiles(kernel.with_options(chunk_size=512), few, many) == [3, 160]
    assert tiles(kernel.with_options(hoist=False), x, y) == [1, 1000]
    halves = (jax.ShapeDtypeStruct(own.shape, "bfloat16") for own in (x, y))
    assert tiles(kernel, *halves) == [1, 1000]
    of_both = jax.ShapeDtypeStruct((2000, 2000), "float32")  # lies along both axes
    assert tiles(kernel, x, of_both) == [1, 1000]
    vectors = auto_vmap(1, 1, reduce="max", reduce_axis=-1)(lambda x, y: jnp.sum((x - y) ** 2))
    assert tiles(vectors, jnp.zeros((2000, 1, 3)), jnp.zeros((2000, 3))) == [1, 1000]


@pytest.mark.parametrize("reduce", ["sum", "min", "logsumexp", "argmax", TopK(2)])
def test_pairs_of_numbers_are_those_of_one_chunk(reduce):
    x, y = NUMBERS[0][:, None], NUMBERS[1][:290]
    kernel = auto_vmap(0, 0, reduce=reduce, reduce_axis=-1, chunk_size=900)(
        lambda x, y: jnp.cosh(x - y) * x
    )
    whole = kernel.with_options(chunk_size=None)
    assert_same(kernel(x, y), whole(x, y), rtol=1e-5)
    if reduce == "argmax":
        return

    def loss(call):
        return lambda x, y: sum(
            jnp.sum(leaf) for leaf in jax.tree.leaves(call(x, y)) if leaf.dtype == x.dtype
        )

    got, want = (jax.grad(loss(call), (0, 1))(x, y) for call in (kernel, whole))
    assert_same(got, want, rtol=1e-4, atol=1e-4)


# Vectors of which an item reads numbers.


def by_index(x, y):
    return jnp.cosh(x[0] - y[2]) * y[-1] + jnp.exp(-((x[1] - y[0]) ** 2))


def unpacked(x, y):
    a, b, c = x
    (p, q), (r, _) = y
    return jnp.sqrt(1 + (a - p) ** 2 + (b - q) ** 2) * r - c


READERS = {
    "by index": (by_index, X[:, None], Y),
    "unpacked": (unpacked, X[:, None], jnp.asarray(R.normal(size=(29, 2, 2)), jnp.float32)),
    "of two axes": (by_index, X[:, None], jnp.asarray(R.normal(size=(4, 1, 29, 3)), jnp.float32)),
    "one is a number": (lambda x, y: jnp.sin(x * y[0]) * y[1], X[:, :1], Y),
    "a tree": (
        lambda x, y: y["a"][1] / (1 + (x[0] - y["b"]) ** 2),
        X[:, None],
        {"a": Y, "b": Y[:, 0]},
    ),
}


REDUCTIONS = "sum", "max", "logsumexp", "argmin", TopK(2)


@pytest.mark.parametrize(
    ("name", "reduce"),
    [
        pair if pair in (("by index", "max"), ("unpacked", "sum")) else slow(*pair)
        for pair in itertools.product(READERS, REDUCTIONS)
    ],
)
def test_items_that_read_numbers_are_those_of_one_chunk(name, reduce):
    fun, x, y = READERS[name]
    ranks = {"one is a number": (0, 1), "a tree": (1, {"a": 1, "b": 0}), "unpacked": (1, 2)}
    options = {"reduce": reduce, "reduce_axis": -1, "chunk_size": 50}
    kernel = auto_vmap(*ranks.get(name, (1, 1)), **options)(fun)
    if Options().rules.by_number:
        assert any("numbers of y" in note for note in kernel.plan(x, y).notes)
    whole = kernel.with_options(chunk_size=None)
    assert_same(kernel(x, y), whole(x, y), rtol=1e-5, atol=1e-5)
    if reduce == "argmin":
        return

    def loss(call):
        def of(x, y):
            outs = [leaf for leaf in jax.tree.leaves(call(x, y)) if leaf.dtype == x.dtype]
            return sum(jnp.sum(leaf**2) for leaf in outs)

        return of

    of_first = [jax.grad(loss(own), (0, 1)) for own in (kernel, whole)]
    assert_same(*(jax.jit(f)(x, y) for f in of_first), rtol=1e-3, atol=1e-3)
    of_second = [jax.grad(lambda x, f=f: jnp.sum(f(x, y)[0] ** 2)) for f in of_first]
    assert_same(*(jax.jit(f)(x) for f in of_second), rtol=1e-3, atol=1e-3)


def test_items_that_read_numbers_may_have_constants_of_their_own():
    kernel = auto_vmap(1, 1, reduce="sum", reduce_axis=-1, chunk_size=50)(
        lambda x, y: x[0] * y[1] + jnp.ravel(2.0)[0]
    )
    assert_same(kernel(X[:, None], Y), jnp.outer(X[:, 0], Y[:, 1]).sum(1) + 58, rtol=1e-5)


@pytest.mark.skipif(not Options().rules.by_number, reason="from JAX 0.12 on")
def test_numbers_of_vectors_are_read_before_the_loop():
    def in_loops(kernel, x, y):
        program = jax.make_jaxpr(kernel)(x, y).jaxpr
        return [each for each in operations(program) if each.name == "slice" and each.times > 1]

    pairs = X[:, None], jnp.tile(Y, (40, 1))
    kernel = auto_vmap(1, 1, reduce="sum", reduce_axis=-1)(by_index)
    assert not in_loops(kernel, *pairs)
    assert in_loops(kernel.with_options(hoist=False), *pairs)
    plan = kernel.plan(*pairs)
    assert plan.notes[-1] == "numbers of y: once for each of 1160, 13 kB"
    assert [leaf.path for leaf in plan.leaves] == ["x", "y"]
    assert str(plan).count("mapping y, reduced") == 1


@tuned
@pytest.mark.parametrize(
    "kernel",
    [
        auto_vmap(1, 1, chunk_size=50)(by_index),  # a map
        auto_vmap(1, 1, reduce="sum", reduce_axis=-1)(lambda x, y: x[0] * jnp.sum(y)),
        auto_vmap(1, 1, reduce="sum", reduce_axis=-1)(lambda x, y: x[0] * y),
        auto_vmap(1, 1, reduce="sum", reduce_axis=-1, hoist=False)(by_index),
    ],
    ids=["a map", "the whole vector is read", "items are vectors", "hoist=False"],
)
def test_numbers_of_vectors_are_read_by_items_otherwise(kernel):
    assert "numbers of" not in str(kernel.plan(X[:, None], jnp.tile(Y, (40, 1))))


@tuned
def test_pairs_of_numbers_do_not_drift():
    """In tiles of one row, the cotangents of 20,000 rows were 1.7e-4 off."""
    kernel = auto_vmap(0, 0, reduce="sum", reduce_axis=-1)(lambda x, y: x * y)
    x, y = jnp.full((20_000, 1), 0.1, jnp.float32), jnp.ones(500, jnp.float32)
    gradient = jax.jit(jax.grad(lambda y: jnp.sum(kernel(x, y))))(y)
    right = 20_000 * float(np.float32(0.1))
    assert float(jnp.max(jnp.abs(gradient - right))) < 1e-6 * right


def test_a_convolution_counts_its_products():
    def kernel(x, y):
        return jnp.sum(jnp.convolve(x, FILTER) * jnp.convolve(y, FILTER) ** 2)

    x, y = (jax.ShapeDtypeStruct((n, *more, 24), jnp.float32) for n, more in ((50, (1,)), (60, ())))
    notes = auto_vmap(x=1, y=1, chunk_size=100)(kernel).plan(x, y).notes
    assert [note.split(":")[0] for note in notes] == ["f(x)", "f(y)"]


@pytest.mark.parametrize("reduce", ["max", TopK(2), Best("key", largest=True)])
def test_a_piece_without_a_winner_gets_nothing_back(reduce):
    """0 times the infinite derivative of a logarithm at 0 is NaN."""
    x, y = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([0.0, 4.0, 2.0, 0.0])

    def kernel(x, y):
        out = jnp.log(y) * x
        return {"key": out, "value": 2 * out} if isinstance(reduce, Best) else out

    call = auto_vmap(0, 0, reduce=reduce, reduce_axis=-1, chunk_size=2)(kernel)
    assert call.plan(x[:, None], y).notes

    def total(y):
        outs = jax.tree.leaves(call(x[:, None], y))
        return sum(jnp.sum(out) for out in outs if out.dtype == y.dtype)

    got = jax.grad(total)(y)
    assert got[1] > 0
    assert_same(got[jnp.asarray([0, 3])], jnp.zeros(2))


@pytest.mark.parametrize("hoist", [True, False])
def test_lanes_whose_only_loop_is_hoisted_have_a_reverse_pass(hoist):
    def kernel(s, n, z):
        def step(own):
            return own[0] + 1, jnp.sin(own[1])

        return jax.lax.while_loop(lambda own: own[0] < n, step, (0, s))[1] * z

    s, n, z = jnp.arange(5.0), jnp.arange(5), jnp.arange(3.0)[:, None]
    call = auto_vmap(0, 0, 0, lockstep=False, hoist=hoist)(kernel)
    got = jax.grad(lambda s: jnp.sum(call(s, n, z)))(s)

    def sine(s, n):
        return s if n == 0 else jnp.sin(sine(s, n - 1))

    assert_same(got, jnp.stack([3 * jax.grad(sine)(own, i) for i, own in enumerate(s)]), rtol=1e-5)


@pytest.mark.parametrize(
    ("chunk_size", "more", "most"),
    [
        (2000, {}, (20, 100)),  # whole rows
        (799, {}, (28, 28)),  # not even 8 of them
        (2000, {"reduce": "sum", "reduce_axis": -1}, (44, 44)),
        (2000, {"reduce": "sum", "reduce_axis": 0}, (44, 44)),
    ],
)
def test_a_map_of_products_stores_whole_rows(chunk_size, more, most):
    kernel = auto_vmap(x=1, y=1, chunk_size=chunk_size, **more)(lambda x, y: jnp.sin(x @ y))
    plan = kernel.plan(jnp.ones((1000, 1, 16)), jnp.ones((100, 16)))
    for level, size in zip(plan.levels, most, strict=True):
        assert 0.7 * size < level.chunks.size <= size, plan


def test_rows_are_short_where_work_is_done_again():
    def kernel(x, y):
        return jnp.sum(jnp.tanh(jnp.outer(x, x)) + jnp.tanh(jnp.outer(y, y)))

    x, y = (jax.ShapeDtypeStruct((300, *more, 256), jnp.float32) for more in ((1,), ()))
    plan = auto_vmap(x=1, y=1, chunk_size=2500)(kernel).plan(x, y)
    assert all(level.chunks.size <= 50 for level in plan.levels)
