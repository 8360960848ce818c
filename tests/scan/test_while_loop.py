# SPDX-License-Identifier: MIT
"""`checkpoint_while_loop` against `jax.lax.while_loop`, which has forward mode only."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import (
    assert_same,
    at_each_run,
    compilations,
    enable_x64,
    refusal,
    slow,
    temporary_bytes,
    weekly,
)
from rankax import auto_vmap, checkpoint_chunked_scan, checkpoint_while_loop, chunked_vmap
from scan_cases import assert_same_weak_types, here

COUNT = [0]


def count():
    COUNT[0] += 1


def count_calls(fun, *args):
    COUNT[0] = 0
    out = jax.block_until_ready(fun(*args))
    jax.effects_barrier()
    return out, COUNT[0]


# A loop of n steps, in an integer, a float and an array.


def steps(loop, a, x, n, counted=False):
    def body(carry):
        if counted:
            jax.debug.callback(count)
        i, (x, v) = carry
        return i + 1, (x * (1 - 1e-5 * a) + 1e-4 * jnp.sin(a * x), 0.999 * v + 1e-3 * x * a)

    _, (x, v) = loop(lambda carry: carry[0] < n, body, (0, (x, jnp.stack([x, a]))))
    return jnp.sin(x) + jnp.sum(v**2)


@functools.cache
def forward_mode():
    return jax.jit(jax.jacfwd(functools.partial(steps, lax.while_loop), (0, 1)))


def evaluated_again(n, stored):
    """The fewest evaluations that reverse n steps, besides the loop and a derivative of each."""
    most = 0
    while math.comb(stored + most, most) < n:
        most += 1
    return most * n - math.comb(stored + most, most - 1) if most else 0


SHORT = [0, 1, 2, 3, 31, 32, 33, 1000]
# The powers of 32, which is what is stored, with one step more and one less.
LONG = [1023, 1024, 1025, 32_767, 32_768, 32_769, 100_000]


@functools.cache
def reverse_mode(max_stored):
    loop = functools.partial(checkpoint_while_loop, max_stored=max_stored)
    return jax.jit(jax.grad(functools.partial(steps, loop, counted=True), (0, 1)))


@pytest.mark.parametrize(
    ("max_stored", "lengths"),
    [(32, SHORT), slow(1, SHORT[:-1]), slow(3, SHORT), slow(2000, [1000]), weekly(32, LONG)],
)
def test_gradient_is_that_of_forward_mode_at_the_cost_of_revolve(max_stored, lengths):
    with enable_x64():
        for n in lengths:
            got, evaluated = count_calls(reverse_mode(max_stored), 1.0, 2.0, n)
            assert_same(got, forward_mode()(1.0, 2.0, n), rtol=1e-10, atol=0)
            least = evaluated_again(n, max_stored)
            assert least <= evaluated - 2 * n <= 1.01 * least


@pytest.mark.optimized
def test_memory_does_not_depend_on_the_number_of_steps():
    state = jax.ShapeDtypeStruct((512,), jnp.float32)

    def gradient(n, **options):
        def end(x):
            def body(carry):
                i, x = carry
                return i + 1, x + 0.01 * jnp.tanh(x)

            return jnp.sum(checkpoint_while_loop(lambda c: c[0] < n, body, (0, x), **options)[1])

        return jax.grad(end)

    assert temporary_bytes(gradient(100), state) == temporary_bytes(gradient(100_000), state)
    assert 33 < temporary_bytes(gradient(100_000), state) / 2048 < 36
    assert 5 < temporary_bytes(gradient(100_000, max_stored=4), state) / 2048 < 8
    rows = jax.ShapeDtypeStruct((16, 512), jnp.float32)
    of_rows = jax.vmap(gradient(100_000))
    assert temporary_bytes(of_rows, rows) / (16 * 2048) < 36


# Transformations of a loop whose number of steps depends on the item.


def growth(loop, a, x):
    return jnp.sin(loop(lambda x: x < 9, lambda x: x * (1 + a), x))


MINE, PLAIN = (functools.partial(growth, loop) for loop in (checkpoint_while_loop, lax.while_loop))
A, X = jnp.float32(0.3), jnp.float32(1.1)
RATES = jnp.asarray(np.array([0.3, 0.5, 0.1, 20.0, 0.7], np.float32))


def sum_of_items(f, a, x):
    return jnp.sum(jax.vmap(f, (0, None))(a, x))


def sum_of_pairs(f, a, x):
    return jnp.sum(jax.vmap(jax.vmap(f, (None, 0)), (0, None))(a[None], x * RATES))


def nested(f, a, x):
    loop = {MINE: checkpoint_while_loop, PLAIN: lax.while_loop}[f]
    end = loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(a, 1 + c[1] * 0.2)), (0, x))
    return end[1]


def in_chunked_scan(f, a, x):
    scan = functools.partial(checkpoint_chunked_scan, chunk_size=2)
    return (lax.scan if f is PLAIN else scan)(
        lambda x, _: (f(a, 1 + x * 0.2), None), x, None, length=5
    )[0]


def in_lanes(f, a, x):
    if f is PLAIN:
        return sum_of_items(f, a, x)
    return auto_vmap(0, 0, chunk_size=2, lockstep=False, reduce="sum")(f)(a, x)


grad, jacfwd, hessian = (
    functools.partial(transform, argnums=(0, 1))
    for transform in (jax.grad, jax.jacfwd, jax.hessian)
)


def second(f):
    return jacfwd(jacfwd(f))


def of_items(transform):
    return lambda f: jax.vmap(transform(f), (0, None))


def itself(f, *args):
    return f(*args)


# How ours is transformed, how the loop of JAX is, of which rates, and what is around both. The
# first three are tested at each run.
CASES = {
    "values": (of_items(lambda f: f), of_items(lambda f: f), RATES, itself),
    "jvp of grad of items": (of_items(hessian), of_items(second), RATES, itself),
    "in lanes, grad": (grad, jacfwd, RATES, in_lanes),
    "grad of pairs by item": (of_items(grad), of_items(jacfwd), RATES, sum_of_pairs),
    "hessian of items": (hessian, second, RATES, sum_of_items),
    "checkpoint": (lambda f: grad(jax.checkpoint(f)), jacfwd, A, itself),
    "in a chunked scan": (grad, jacfwd, A, in_chunked_scan),
    "in itself, items": (of_items(grad), of_items(jacfwd), RATES, nested),
    "grad of jvp": (lambda f: jax.jacrev(jacfwd(f), (0, 1)), second, A, itself),
    "third": (lambda f: jax.jacfwd(hessian(f)), lambda f: jax.jacfwd(second(f)), A, itself),
}


@pytest.mark.parametrize("case", at_each_run([*CASES][:3], CASES))
def test_transformations(case):
    reverse, forward, rates, around = case
    got = jax.jit(reverse(functools.partial(around, MINE)))(rates, X)
    want = jax.jit(forward(functools.partial(around, PLAIN)))(rates, X)
    assert_same(got, want, rtol=1e-3, atol=1e-4)


def test_reverse_mode_of_the_reverse_pass_is_refused():
    expected = (
        "checkpoint_while_loop(<lambda>): its reverse pass has no reverse mode; for second "
        "derivatives, use forward mode of the gradient, such as jax.jvp or jax.jacfwd of jax.grad, "
        "or jax.hessian"
    )
    for refused in (jax.grad(jax.grad(MINE)), jax.jit(jax.jacrev(jax.grad(MINE)))):
        assert refusal(ValueError, refused, A, X).startswith(expected)


# What a carry may hold.


def mixed(loop, a, x):
    """A carry of floats of two widths, integers, a boolean, keys, nothing, and Python numbers."""

    def cond(carry):
        return carry["more"] & (carry["count"] < 100) & (carry["x"][0] < 20 * a)

    def body(carry):
        keys = jax.random.split(carry["keys"][0])
        (x, half), count = carry["x"], carry["count"] + 1
        x = x * (1 + a * jax.random.uniform(keys[0])) + jnp.float32(0.1) * half.astype(jnp.float32)
        more = carry["more"] & (x < 100)
        half = half * jnp.bfloat16(0.5)
        weak, promoted = carry["weak"] + 1, carry["promoted"] + jnp.float32(0.5)
        others = {"keys": keys, "empty": carry["empty"], "weak": weak, "promoted": promoted}
        return {"x": (x, half), "count": count, "more": more, **others}

    init = {
        "x": (x, jnp.bfloat16(1) * x.astype(jnp.bfloat16)),
        "count": jnp.int8(0),
        "more": True,
        "keys": jax.random.split(jax.random.key(1)),
        "empty": jnp.zeros((0, 2)),
        "weak": 0,
        "promoted": 1,
    }
    return loop(cond, body, init)


def mixed_loss(loop, a, x):
    out = mixed(loop, a, x)
    return jnp.sin(out["x"][0]) + out["x"][1].astype(jnp.float32) * a


def test_carry_of_all_kinds():
    def both(loop, derivatives):
        gradient = of_items(derivatives)(functools.partial(mixed_loss, loop))
        return jax.jit(lambda rates: (mixed(loop, A, X), gradient(rates, X)))(RATES)

    got, want = both(checkpoint_while_loop, grad), both(lax.while_loop, jacfwd)
    assert_same(got, want, rtol=1e-3, atol=1e-4)
    assert_same_weak_types(got[0], want[0])


def test_integers_have_no_gradient():
    def end(i, x):
        return checkpoint_while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (i, x))[1]

    of_i, of_x = jax.grad(end, (0, 1), allow_int=True)(2, 1.0)
    assert of_i.dtype == jax.dtypes.float0
    assert of_x == 8


def test_only_what_depends_is_differentiated():
    def end(x):
        def body(carry):
            i, x, noise = carry
            return i + 1, x * jnp.cos(noise[:3]), noise * 0.5

        out = checkpoint_while_loop(lambda c: c[0] < 5, body, (0, x, jnp.ones(7)))
        return jnp.sum(out[1])

    eqns = jax.make_jaxpr(jax.grad(end))(jnp.ones(3)).eqns
    (reverse,) = (eqn for eqn in eqns if eqn.primitive.name == "rankax_while_reverse")
    assert [v.aval.shape for v in reverse.outvars] == [(3,)]


doubled, tripled = jax.custom_vjp(lambda x: 2 * x), jax.custom_jvp(lambda x: 3 * x)
doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (10 * ct,))
tripled.defjvp(lambda primals, tangents: (3 * primals[0], 100 * tangents[0]))


def test_rules_in_the_body_are_kept():
    def end(x, n):
        def body(carry):
            return carry[0] + 1, doubled(tripled(carry[1]))

        return checkpoint_while_loop(lambda carry: carry[0] < n, body, (0, x))[1]

    gradient = jax.grad(end)
    assert gradient(1.0, 2) == 1e6
    items = jnp.ones(3), jnp.asarray(np.array([0, 1, 2]))
    of_items = jax.jit(jax.vmap(gradient))(*items)
    of_sum = jax.jit(jax.grad(lambda x, n: jnp.sum(jax.vmap(end)(x, n))))(*items)
    for got in (of_items, of_sum):
        assert_same(got, jnp.asarray(np.array([1, 1e3, 1e6], np.float32)))


# The derivative of this step is infinite at the last carry of the first item, and at the first
# carry of the second, which makes no step. The third becomes NaN.


def risky(loop, shift, x, scale):
    return loop(lambda x: x > 1, lambda x: x - jnp.sqrt(shift * (x - 1)) * scale, x)


def test_infinite_derivatives_and_nan_stay_in_their_items():
    x = jnp.asarray(np.array([2.0, 1.0, 5.0, 7.0], np.float32))
    scales = jnp.asarray(np.array([1.0, 1.0, np.nan, 0.3], np.float32))
    finite = np.array([0, 1, 3])

    mine = functools.partial(risky, checkpoint_while_loop)
    plain = functools.partial(risky, lax.while_loop)

    def items(f):
        return jax.vmap(f, (None, 0, 0))

    some, every = (1.0, x[finite], scales[finite]), (1.0, x, scales)
    of_finite, got, want = jax.jit(
        lambda: (
            jax.grad(lambda *args: jnp.sum(items(mine)(*args)), (0, 1, 2))(*some),
            items(jax.grad(mine, (0, 1, 2)))(*every),
            items(jax.jacfwd(plain, (0, 1, 2)))(*some),
        )
    )()
    assert all(np.all(np.isfinite(of_item)) for of_item in want)
    assert np.isnan(got[0][2])
    assert_same([of_item[finite] for of_item in got], [*want], rtol=1e-4)
    assert_same([*of_finite], [jnp.sum(want[0]), *want[1:]], rtol=1e-4)


def step(x):
    return {"x": x["x"] + 1}


def longer(x):
    return {"x": jnp.stack([x["x"]] * 2)}


def first(x):
    return x["x"]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"cond_fun": 3}, TypeError, ": cond_fun must be callable, got int"),
        ({"body_fun": 3}, TypeError, ": body_fun must be callable, got int"),
        ({"max_stored": 0}, ValueError, "(step): max_stored must be a positive int, got 0"),
        ({"init_val": {"x": object()}}, TypeError, "(step): init_val['x'] must be an array or a"),
        ({"cond_fun": first}, TypeError, f"(step): cond_fun {here(first)} must return a bool"),
        (
            {"init_val": {"x": 1, "y": 2}},
            TypeError,
            f"(step): body_fun {here(step)} must return a carry with the structure of init_val; "
            "it lacks init_val['y']\n",
        ),
        (
            {"body_fun": longer},
            TypeError,
            f"(longer): body_fun {here(longer)} must return a carry with the shapes and dtypes of "
            "init_val; init_val['x'] differs\n",
        ),
    ],
)
def test_refused_arguments(given, error, text):
    good = {"cond_fun": lambda x: x["x"] < 3, "body_fun": step, "init_val": {"x": jnp.int32(1)}}
    with pytest.raises(error, match=f"^{re.escape(f'checkpoint_while_loop{text}')}"):
        checkpoint_while_loop(**{**good, **given})


def test_effects_in_order_are_refused_in_derivatives():
    seen = []

    def f(x):
        def body(x):
            jax.experimental.io_callback(lambda x: seen.append(float(x)), None, x, ordered=True)
            return x * 2

        return checkpoint_while_loop(lambda x: x < 9, body, x)

    assert f(1.0) == 16
    jax.effects_barrier()
    assert seen == [1, 2, 4, 8]
    where = rf"body\(\) at {re.escape(__file__)}:{f.__code__.co_firstlineno + 1}"
    text = rf"^checkpoint_while_loop\(body\): {where} has an ordered effect, so the loop has no"
    with pytest.raises(ValueError, match=text):
        jax.grad(f)(1.0)


def test_refs_are_written_and_refused_in_derivatives():
    def f(x):
        total = jax.new_ref(jnp.float32(0))

        def body(x):
            total[...] += x
            return x * 2

        end = checkpoint_while_loop(lambda x: x < 9, body, x)
        return end + total[...]

    assert jax.jit(f)(1.0) == 16 + 15
    with pytest.raises(ValueError, match=r"body\(\) at .* uses a jax\.Ref, so the loop has no"):
        jax.grad(f)(1.0)


def test_derivatives_that_devices_add_up_are_refused():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("i")

    def of_rates(a, rates=RATES):
        return jnp.sum(jax.vmap(MINE, (None, 0))(a, rates))

    def on_mesh(prepared):
        def local(a, rates):
            return lax.psum(of_rates(prepared(a), rates), "i")

        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[0])

    expected = "checkpoint_while_loop(<lambda>): inside jax.shard_map, it is differentiated "
    text = refusal(ValueError, jax.grad(on_mesh(lambda a: a)), A, RATES)
    assert text.startswith(expected)
    assert text.endswith("as varying before the loop: jax.lax.pcast(x, axes, to='varying')")
    varying = on_mesh(lambda a: lax.pcast(a, ("i",), to="varying"))
    got, want = jax.jit(lambda a: (jax.grad(varying)(a, RATES), jax.grad(of_rates)(a)))(A)
    assert_same(got, want, rtol=1e-4)


def test_without_jit_it_is_the_loop_itself():
    with jax.disable_jit():
        assert_same(jax.grad(MINE)(A, X), jax.grad(jax.jit(MINE))(A, X), rtol=1e-4)


def test_without_jit_a_map_of_it_has_a_reverse_pass():
    mapped = jax.vmap(jax.grad(lambda x: MINE(A, x)))
    want = jax.jit(mapped)(RATES)
    with jax.disable_jit():
        assert_same(mapped(RATES), want, rtol=1e-4)


def test_eager_calls_in_chunks_are_compiled_once():
    kernel = chunked_vmap(lambda x: MINE(A, x), 2)
    for transform in (lambda f: f, lambda f: jax.grad(lambda x: jnp.sum(f(x)))):
        compilations(transform(kernel), RATES)
        assert compilations(transform(kernel), RATES)[1] == 0
