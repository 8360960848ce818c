# SPDX-License-Identifier: MIT
"""What JAX's other transformations see inside a call: errors, references, named axes, zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.experimental.jet import jet

from helpers import REMAT3, assert_same, at_each_run, slow
from rankax import auto_vmap, checkpoint_chunked_scan, chunked_vmap, sliced_scan

X = np.arange(5, dtype=np.float32)


@jax.custom_jvp
def inverse(x):
    return 1 / x


inverse.defjvp(lambda p, t: (inverse(*p), -t[0] / p[0] ** 2))


@jax.custom_vjp
def inverse_back(x):
    return 1 / x


inverse_back.defvjp(lambda x: (1 / x, x), lambda x, g: (-g / x**2,))


def plain(x):
    return 1 / x


def mapped(kernel, **options):
    options = {"chunk_size": 2, **options}
    return auto_vmap(0, **options)(lambda x: kernel(x))


def scanned(scan, kernel, **options):
    return lambda xs: scan(lambda c, x: (c + kernel(x), c), jnp.float32(0), xs, **options)


# Errors of checkify. A primitive that it does not know, it runs as it is.


SEEN = {
    "uneven": chunked_vmap(plain, 2),
    "a custom_jvp": chunked_vmap(inverse, 2),
    "a custom_vjp, even": chunked_vmap(inverse_back, 1),
    "two arrays": lambda x: auto_vmap(0, 0, chunk_size=3)(lambda a, b: a / b)(x[:, None], x),
    "gradient": jax.grad(lambda x: chunked_vmap(jnp.sqrt, 2)(x).sum()),
    "max": mapped(plain, reduce="max"),
    "sliced_scan, a rule": scanned(sliced_scan, inverse, step=2),
    "checkpoint_chunked_scan": scanned(checkpoint_chunked_scan, plain, chunk_size=2),
}
AT_MERGE = {
    "a custom_vjp": chunked_vmap(inverse_back, 2),
    "nested": lambda x: chunked_vmap(chunked_vmap(inverse, 2), 2)(jnp.stack([x + 1, x, x])),
    "mapped": lambda x: jax.vmap(chunked_vmap(plain, 2))(jnp.stack([x + 1, x])),
    "windows": scanned(sliced_scan, plain, step=2, reduce="mean"),
}


@pytest.mark.skipif(REMAT3, reason="see the test below")
@pytest.mark.parametrize("fun", at_each_run(SEEN, SEEN | AT_MERGE))
def test_checkify_sees_inside(fun):
    error, _ = checkify.checkify(fun, errors=checkify.float_checks)(X)
    assert "division by zero" in error.get()


@pytest.mark.skipif(not REMAT3, reason="of a switch of JAX")
def test_checkify_sees_no_high_level_primitives():
    """As docs/limits.md says."""
    fun = chunked_vmap(plain, 2)
    assert checkify.checkify(fun, errors=checkify.float_checks)(X)[0].get() is None


def too_large(x):
    checkify.check(x < 3, "{x} is too large", x=x)
    return x**2


@pytest.mark.skipif(REMAT3, reason="see the test below")
@pytest.mark.parametrize(
    "fun",
    [
        chunked_vmap(too_large, 2),
        mapped(too_large, reduce="max"),
        slow(chunked_vmap(lambda x: inverse_back(too_large(x) + 1), 2)),
        slow(scanned(sliced_scan, too_large, step=2)),
    ],
    ids=["map", "max", "rule", "scan"],
)
def test_a_check_in_a_kernel(fun):
    error, _ = jax.jit(checkify.checkify(fun))(X)
    assert "3.0 is too large" in error.get()
    assert checkify.checkify(fun)(X[:3])[0].get() is None
    error, _ = jax.vmap(checkify.checkify(fun))(jnp.stack([X - 9, X]))
    assert "at mapped index 1: 3.0 is too large" in error.get()


@pytest.mark.skipif(REMAT3, reason="see the test below")
@pytest.mark.parametrize(
    ("kernel", "options"),
    [(plain, {}), (inverse, {"reduce": "max"}), slow(inverse_back, {})],
)
def test_what_checkify_returns_has_the_same_derivative(kernel, options):
    fun = mapped(kernel, **options)

    @jax.jit
    def checked(x):
        def total(x):
            error, out = checkify.checkify(fun, errors=checkify.float_checks)(x)
            return out.sum(), error

        (_, error), gradient = jax.value_and_grad(total, has_aux=True)(x)
        return gradient, error

    expected = jax.jit(jax.grad(lambda x: fun(x).sum()))(X + 1)
    gradient, error = checked(X + 1)
    assert_same(gradient, expected)
    assert error.get() is None
    assert "division by zero" in checked(X)[1].get()


# What docs/limits.md says about JAX itself. If a test fails, JAX has fixed it: change the page.


def loops(kernel):
    return [lambda x: lax.map(kernel, x), chunked_vmap(kernel, 1)]


@pytest.mark.skipif(REMAT3, reason="see the test below")
@pytest.mark.parametrize("fun", loops(too_large))
def test_a_gradient_of_a_loop_forgets_checks(fun):
    gradient = checkify.checkify(jax.grad(lambda x: fun(x).sum()))
    assert gradient(X)[0].get() is None


@pytest.mark.skipif(REMAT3, reason="see the test below")
@pytest.mark.skipif(getattr(jax.config, "jax_custom_vjp3", False), reason="mended there")
@pytest.mark.parametrize("fun", loops(inverse_back))
def test_a_gradient_of_checkify_fails_for_a_custom_vjp_in_a_loop(fun):
    checked = checkify.checkify(fun, errors=checkify.float_checks)
    with pytest.raises(ValueError, match=r"foreach\(\) argument 2 is shorter"):
        jax.grad(lambda x: checked(x)[1].sum())(X)


@pytest.mark.parametrize("fun", [*loops(plain), chunked_vmap(plain, 2)])
def test_jet_knows_no_loops(fun):
    with pytest.raises(KeyError):
        jet(fun, (X,), ((X, X),))


# References.


def doubled(x):
    ref = jax.new_ref(x)
    ref[...] *= 2
    return ref[...]


@pytest.mark.parametrize("options", [{}, slow({"reduce": "max"})], ids=["map", "max"])
def test_a_kernel_makes_a_reference(options):
    fun, by_hand = mapped(doubled, **options), mapped(lambda x: 2 * x, **options)
    assert_same(fun(X), by_hand(X))
    gradient, expected = (jax.grad(lambda x, f=f: (f(x) ** 2).sum()) for f in (fun, by_hand))
    assert_same(jax.jit(gradient)(X), expected(X))
    assert_same(gradient(X), expected(X))


@pytest.mark.parametrize(
    "scan",
    [
        sliced_scan,
        lambda *args: sliced_scan(*args, start=1, step=2),
        lambda *args: checkpoint_chunked_scan(*args, chunk_size=2),
    ],
    ids=["all", "sliced", "chunked"],
)
def test_a_scan_writes_a_reference_from_outside(scan):
    def total(x, scan):
        ref = jax.new_ref(jnp.float32(0))

        def body(carry, x):
            ref[...] += x * carry
            return carry + 1, carry

        scan(body, jnp.float32(0), x)
        return ref[...]

    want = total(X, lax.scan)
    assert_same(total(X, scan), want)
    assert_same(jax.jit(lambda x: total(x, scan))(X), want)


def test_a_kernel_reads_a_reference_from_outside():
    def both(x):
        ref = jax.new_ref(jnp.array([2.0, 3.0]))
        fun = chunked_vmap(lambda x: ref[1] * x, 2)
        return fun(x), jax.grad(lambda x: fun(x).sum())(x)

    want = (3 * X, np.full(5, 3.0, np.float32))
    assert_same(both(X), want)
    assert_same(jax.jit(both)(X), want)


def test_a_backward_rule_writes_a_reference():
    @jax.custom_vjp
    def stash(ref, x):
        del ref
        return x

    def backward(ref, cotangent):
        ref[...] = cotangent
        return None, cotangent

    stash.defvjp(lambda ref, x: (x, ref), backward)

    def product(x):
        def body(carry, x):
            carry = stash(ref, carry * x)
            return carry, carry

        ref = jax.new_ref(jnp.float32(0))
        gradient = jax.grad(lambda x: sliced_scan(body, jnp.float32(1), x)[0])(x)
        return gradient, ref[...]

    def squares(x):
        ref = jax.new_ref(jnp.float32(0))
        gradient = jax.grad(lambda x: chunked_vmap(lambda x: stash(ref, x * x), 1)(x).sum())(x)
        return gradient, ref[...]

    # The first step of the scan, whose rule runs last, gets the product of the others.
    for fun, x, want in (
        (product, X + 1, (120 / (X + 1), np.float32(120))),
        (squares, X, (2 * X, np.float32(1))),
    ):
        assert_same(fun(x), want)
        assert_same(jax.jit(fun)(x), want)


# What a map from outside sees.


def test_outputs_that_are_the_same_for_all():
    """By a sum over a named axis, and because a map leaves the argument alone."""
    rows = jnp.stack([X, X + 1])

    def kernel(x, y):
        return lax.psum(x**2, "i"), x * y, 2 * inverse(y + 1)

    @functools.partial(jax.jit, static_argnums=0)
    def of(inner):
        def total(rows):
            over_rows = jax.vmap(inner, (0, None), out_axes=(None, 0, None), axis_name="i")
            outs = over_rows(rows, X)
            return (outs[0] ** 2).sum() + (outs[1] @ outs[2]).sum(), outs

        return jax.value_and_grad(total, has_aux=True)(rows)

    assert_same(of(chunked_vmap(kernel, 2)), of(jax.vmap(kernel)))


# Rules with symbolic zeros. In JAX, a rule is not called for an input that has no tangent.


@pytest.mark.skipif(REMAT3, reason="a new checkpoint makes tangents of zeros")
@pytest.mark.parametrize(
    "loop",
    [
        lambda f: chunked_vmap(f, 1),
        lambda f: chunked_vmap(f, 2),
        lambda f: lambda x: mapped(f, reduce="max")(x)[None],
        lambda f: lambda x: sliced_scan(lambda c, x: (c, f(x)), 0, x)[1],
        lambda f: lambda x: sliced_scan(lambda c, x: (c, f(x)), 0, x, step=2)[1],
    ],
    ids=["even", "uneven", "max", "scan", "sliced"],
)
def test_a_tangent_of_zero_stays_symbolic(loop):
    calls = []

    @jax.custom_jvp
    def noted(x):
        return 2 * x

    def rule(primals, tangents):
        calls.append(tangents)
        return noted(*primals), 2 * tangents[0]

    noted.defjvp(rule, symbolic_zeros=True)

    def pushed(fun):
        return jax.eval_shape(lambda x: jax.jvp(fun, (x,), (x,)), X)

    pushed(lambda x: noted(loop(lax.stop_gradient)(x)))
    pushed(loop(lambda x: noted(lax.stop_gradient(x))))
    assert not calls
    pushed(loop(lambda x: noted(x)))
    assert calls


def test_a_rule_that_returns_a_constant():
    @jax.custom_jvp
    def constant(x):
        return x

    constant.defjvp(lambda p, t: (constant(*p), jnp.ones(())))

    def pushed(fun):
        return jax.jit(lambda x: jax.jvp(fun, (x,), (x,))[1])(X)

    assert_same(pushed(chunked_vmap(constant, 2)), pushed(jax.vmap(constant)))
