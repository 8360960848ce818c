# SPDX-License-Identifier: MIT
"""Derivatives of every order of kernels whose rules are not the derivative of what they compute.

`jax.custom_jvp` and `jax.custom_vjp` say how a function is differentiated. Where that differs from
the derivative of its body, a rule that a loop forgets is a wrong number, and nothing says so.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import REMAT3, assert_same, at_each_run, name_of, slow
from rankax import auto_vmap, checkpoint_chunked_scan, chunked_vmap, sliced_scan

# Functions with rules. Each rule is 1.25 times the truth, or further from it.


def scaled(primal_of_rule):
    """A function whose rule computes the value in the given way."""

    def body(x):
        return jnp.sin(x) * x

    fun = jax.custom_jvp(body)

    @fun.defjvp
    def rule(primals, tangents):
        (x,), (dx,) = primals, tangents
        value = fun(x) if primal_of_rule == "itself" else body(x)
        return value, 1.25 * (jnp.cos(x) * x + jnp.sin(x)) * dx

    return fun


@jax.custom_jvp
def two_to_three(x, y):
    return x * y, jnp.round(4 * x), jnp.cos(y)


@two_to_three.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    value = two_to_three(x, y)
    return value, (2 * y * dx + jnp.sin(x) * dy, 0.0 * dx, x * dy)


def uses_some_outputs(x):
    product, rounded, _ = two_to_three(x, 0.5 * x)  # one is dropped
    return product * jnp.where(rounded > 1, 2.0, 1.0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled_by(x, scale):
    return jnp.exp(scale * x)


@scaled_by.defjvp
def _(scale, primals, tangents):
    (x,), (dx,) = primals, tangents
    return scaled_by(x, scale), 3.0 * scaled_by(x, scale) * dx


@jax.custom_jvp
def with_symbolic_zeros(x, y):
    return x * jnp.sin(y)


def _symbolic(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    out = jnp.zeros_like(x)
    if not isinstance(dx, jax.custom_derivatives.SymbolicZero):
        out = out + 2.0 * jnp.sin(y) * dx
    if not isinstance(dy, jax.custom_derivatives.SymbolicZero):
        out = out + 3.0 * x * jnp.cos(y) * dy
    return with_symbolic_zeros(x, y), out


with_symbolic_zeros.defjvp(_symbolic, symbolic_zeros=True)


@jax.custom_vjp
def scaled_back(x):
    return jnp.sin(x) * x


scaled_back.defvjp(
    lambda x: (scaled_back(x), x),
    lambda x, g: (1.25 * (jnp.cos(x) * x + jnp.sin(x)) * g,),
)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x * 4) / 4 + 0.1 * scaled("itself")(x)


straight_through.defvjp(lambda x: (straight_through(x), scaled("itself")(x)), lambda y, g: (g * y,))

self_calling = scaled("itself")

WITH_JVP = {
    "symbolic zeros": lambda x: with_symbolic_zeros(x, 0.3) + with_symbolic_zeros(0.3, x),
    "rule calls itself": self_calling,
    "some outputs": uses_some_outputs,
    "nondiff_argnums": lambda x: scaled_by(x, 0.5),
    "in cond": lambda x: jax.lax.cond(x.sum() > 0, self_calling, jnp.cos, x),
    "in checkpoint": jax.checkpoint(self_calling),
}

# What is done with a function of one array. Where a rule is forgotten, these two show it.


def reverse_over_reverse(f, x, v):
    return jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x)


def forward_over_reverse(f, x, v):
    return jax.jvp(jax.grad(f), (x,), (v,))[1]


SECOND = [reverse_over_reverse, forward_over_reverse]

X = jnp.asarray(np.linspace(-1.0, 1.6, 14).reshape(7, 2))
V = jnp.asarray(np.cos(np.arange(14.0)).reshape(7, 2))


def kernel_of(fun):
    return lambda row: jnp.sin(fun(row[0]) * row[1]) * row[0]


def derivatives(fun, kinds, x=X, v=V):
    """Every derivative of the sum of squares of ``fun``, in one program that is compiled once."""

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def all_of_them(x, v):
        return {kind.__name__: kind(lambda x: jnp.sum(fun(x) ** 2), x, v) for kind in kinds}

    return all_of_them(x, v[: len(x)])


def close(actual, expected):
    assert_same(actual, expected, rtol=2e-4, atol=2e-4)


def kinds_for(fun):
    return SECOND[:1] if fun is scaled_back else SECOND


# Each takes seconds to compile; of each way through the library one is tested at each run.
@pytest.mark.parametrize("fun", at_each_run(["symbolic zeros", "rule calls itself"], WITH_JVP))
def test_chunked_derivatives_are_those_of_vmap(fun):
    kernel = kernel_of(fun)  # seven items: the last chunk overlaps
    close(derivatives(chunked_vmap(kernel, 2), SECOND), derivatives(jax.vmap(kernel), SECOND))


@pytest.mark.parametrize("fun", [scaled_back, slow(straight_through)])
def test_chunked_derivatives_by_a_backward_rule(fun):
    kernel, kinds = kernel_of(fun), SECOND[:1]
    close(derivatives(chunked_vmap(kernel, 2), kinds), derivatives(jax.vmap(kernel), kinds))


@pytest.mark.parametrize("options", [{"checkpoint": False}, slow({})], ids=str)
def test_pairs_inside_a_scan(options):
    """`jax.lax.scan` forgets the rules of its body, but not those of a map inside."""

    def pair(x, y):
        return jnp.sin(self_calling(x) * y)

    def scanned(x):
        pairs = auto_vmap(0, 0, chunk_size=2, **options)(pair)
        return jax.lax.scan(lambda c, s: (c + pairs(s * x[:, None], x).mean(0), None), x, scales)[0]

    def unrolled(x):
        by_hand = jax.vmap(jax.vmap(pair, (None, 0)), (0, None))
        return x + sum(by_hand(s * x, x).mean(0) for s in scales)

    scales, x, v = jnp.asarray(np.float32([0.5, 1.5])), X[:3, 0], V[:3, 0]
    close(*(derivatives(f, [forward_over_reverse], x, v) for f in (scanned, unrolled)))


# Scans, against a Python loop: `jax.lax.scan` itself forgets.


def body_of(fun):
    def body(carry, x):
        carry = jnp.sin(fun(carry) * x[0]) + fun(x[1])
        return carry, carry * x[0]

    return body


def unrolled(fun):
    def run(xs):
        carry, ys = jnp.float32(0.3), []
        for x in xs:
            carry, y = body_of(fun)(carry, x)
            ys.append(y)
        return jnp.stack([*ys[1::2], carry])

    return run


def chunked(body, init, xs):
    carry, ys = checkpoint_chunked_scan(body, init, xs, chunk_size=3)
    return carry, ys[1::2]


sliced = functools.partial(sliced_scan, start=1, step=2)


@pytest.mark.parametrize(
    ("fun", "scan"),
    [
        (self_calling, sliced),
        (scaled_back, chunked),
        slow(self_calling, functools.partial(sliced, checkpoint=True)),
    ],
)
def test_scan_derivatives_are_those_of_a_loop(fun, scan):
    def scanned(xs):
        carry, ys = scan(body_of(fun), jnp.float32(0.3), xs)
        return jnp.append(ys, carry)

    kinds = kinds_for(fun)
    want = derivatives(unrolled(fun), kinds, X[:4])
    close(derivatives(scanned, kinds, X[:4]), want)


def test_grad_of_vmap_of_a_custom_vjp():
    # A batched factor and an unbatched carry: JAX's own rule would differentiate, then map.
    @jax.custom_vjp
    def multiply(a, b):
        return a * b

    multiply.defvjp(lambda a, b: (a * b, (a, b)), lambda ab, g: (2 * ab[1] * g, 3 * ab[0] * g))

    def body(carry, x):
        return multiply(carry, x), carry

    def total(scale, xs, scan):
        return jnp.sum(jax.vmap(lambda s: scan(body, jnp.float32(1.5), s * xs)[0])(scale))

    scales, xs = jnp.array([0.5, 1.0, 1.5]), jnp.linspace(0.5, 1.5, 7)
    gradient = jax.jit(jax.grad(total), static_argnums=2)
    expected = gradient(scales, xs, jax.lax.scan)
    for scan in (
        functools.partial(sliced_scan, step=2, checkpoint=True),
        functools.partial(checkpoint_chunked_scan, chunk_size=3),
    ):
        close(gradient(scales, xs, scan), expected)


def test_no_rule_leaves_the_program_as_it_was():
    program = jax.make_jaxpr(chunked_vmap(lambda row: jnp.exp(row).sum(), 3))(X[:6])
    assert "rankax_call" not in str(program)


def test_a_rule_leaves_nothing_in_the_compiled_program():
    lowered = jax.jit(chunked_vmap(kernel_of(self_calling), 2)).lower(X)
    assert "rankax_call" not in lowered.as_text()


@pytest.mark.skipif(REMAT3, reason="JAX does not transpose it, see test_switches.py")
def test_linear_transpose():
    weights = jnp.arange(1.0, 4.0)

    @jax.custom_jvp
    def double(x):
        return 2.0 * x

    double.defjvp(lambda p, t: (double(*p), 2.0 * t[0]))
    mapped = chunked_vmap(lambda row: double(row) @ weights, 3)
    shape = jax.ShapeDtypeStruct((7, 3), jnp.float32)
    (actual,) = jax.linear_transpose(mapped, shape)(jnp.arange(7.0))
    close(actual, 2 * jnp.outer(jnp.arange(7.0), weights))


def test_what_a_map_does_not_map_is_not_broadcast():
    def program(x, y):
        return jax.vmap(lambda y: chunked_vmap(kernel_of(self_calling), 2)(x).sum() + y)(y)

    jaxpr = jax.make_jaxpr(program)(X, jnp.ones(5)).jaxpr
    (call,) = (eqn for eqn in jaxpr.eqns if name_of(eqn) == "rankax_call")
    assert [v.aval.shape for v in call.outvars] == [(7,)]


def test_a_callback_runs_though_nobody_uses_the_result():
    seen = []

    def kernel(x):
        jax.debug.callback(seen.append, x)
        return self_calling(x)

    jax.jit(lambda x: (chunked_vmap(kernel, 2)(x), x + 1)[1])(X[:, 0])
    jax.effects_barrier()
    assert set(map(float, seen)) == set(X[:, 0].tolist())


def test_a_rule_of_a_function_with_an_effect_is_kept():
    seen = []

    @jax.custom_jvp
    def noted(x):
        jax.debug.callback(seen.append, x)
        return jnp.sin(x) * x

    noted.defjvp(lambda p, t: (noted(*p), 1.25 * jnp.cos(p[0]) * t[0]))
    x, v = X[:, 0], V[:, 0]
    close(
        derivatives(chunked_vmap(lambda x: jnp.sin(noted(x)), 2), SECOND, x, v),
        derivatives(jax.vmap(lambda x: jnp.sin(noted(x))), SECOND, x, v),
    )
    jax.effects_barrier()
    assert seen
