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


@jax.custom_jvp
def self_calling(x):
    return jnp.sin(x) * x


@self_calling.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return self_calling(x), 1.25 * (jnp.cos(x) * x + jnp.sin(x)) * dx


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
    x, y = primals
    rates, zero = (2.0 * jnp.sin(y), 3.0 * x * jnp.cos(y)), jax.custom_derivatives.SymbolicZero
    pairs = zip(rates, tangents, strict=True)
    parts = [rate * tangent for rate, tangent in pairs if not isinstance(tangent, zero)]
    return with_symbolic_zeros(x, y), sum(parts, jnp.zeros_like(x))


with_symbolic_zeros.defjvp(_symbolic, symbolic_zeros=True)


scaled_back = jax.custom_vjp(lambda x: jnp.sin(x) * x)
scaled_back.defvjp(
    lambda x: (scaled_back(x), x),
    lambda x, g: (1.25 * (jnp.cos(x) * x + jnp.sin(x)) * g,),
)
straight_through = jax.custom_vjp(lambda x: jnp.round(x * 4) / 4 + 0.1 * self_calling(x))
straight_through.defvjp(lambda x: (straight_through(x), self_calling(x)), lambda y, g: (g * y,))

WITH_RULES = {
    "symbolic zeros": lambda x: with_symbolic_zeros(x, 0.3) + with_symbolic_zeros(0.3, x),
    "rule calls itself": self_calling,
    "a backward rule": scaled_back,
    "some outputs": uses_some_outputs,
    "nondiff_argnums": lambda x: scaled_by(x, 0.5),
    "in cond": lambda x: jax.lax.cond(x.sum() > 0, self_calling, jnp.cos, x),
    "in checkpoint": jax.checkpoint(self_calling),
    "a backward rule that rounds": straight_through,
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
    return SECOND[:1] if isinstance(fun, jax.custom_vjp) else SECOND


# Each takes seconds to compile; of each way through the library one is tested at each run.
@pytest.mark.parametrize("fun", at_each_run([*WITH_RULES][:3], WITH_RULES))
def test_chunked_derivatives_are_those_of_vmap(fun):
    kernel, kinds = kernel_of(fun), kinds_for(fun)  # seven items: the last chunk overlaps
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
    multiply = jax.custom_vjp(lambda a, b: a * b)
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
    """And a rule leaves nothing in the compiled program."""
    program = jax.make_jaxpr(chunked_vmap(lambda row: jnp.exp(row).sum(), 3))(X[:6])
    lowered = jax.jit(chunked_vmap(kernel_of(self_calling), 2)).lower(X)
    assert "rankax_call" not in str(program) + lowered.as_text()


@pytest.mark.skipif(REMAT3, reason="JAX does not transpose it, see test_switches.py")
def test_linear_transpose():
    weights = jnp.arange(1.0, 4.0)
    double = jax.custom_jvp(lambda x: 2.0 * x)
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
    maps = chunked_vmap(lambda x: jnp.sin(noted(x)), 2), jax.vmap(lambda x: jnp.sin(noted(x)))
    close(*(derivatives(mapped, SECOND, X[:, 0], V[:, 0]) for mapped in maps))
    jax.effects_barrier()
    assert seen
