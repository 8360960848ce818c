# SPDX-License-Identifier: MIT
"""What a reverse pass reads again: where it is kept, and that derivatives stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, primitives, slow
from rankax import auto_vmap, chunked_vmap
from rankax.ext.xla_cpu import kept_residuals, kept_values, library

pytestmark = pytest.mark.skipif(not library.IS_TUNED, reason="from JAX 0.12 on")

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(7, 40)).astype(np.float32))
WAVE = jnp.asarray(np.sin(np.arange(40, dtype=np.float32)))
WEIGHTS = (0.1, 0.2, 0.4, 0.2, 0.1)


def windows(x):
    return sum(w * x[i : i + 36] for i, w in enumerate(WEIGHTS))


def stencil(x):
    y = windows(x)
    return jnp.sum(jnp.tanh(y) * y)


@jax.custom_vjp
def reversed_by_rule(x):
    return jnp.tanh(x)


reversed_by_rule.defvjp(lambda x: (jnp.tanh(x), x), lambda x, cotangent: (7 * cotangent * x,))


def refuses(x):
    return x


refuses = jax.custom_vjp(refuses)
refuses.defvjp(lambda x: (x, None), lambda _, cotangent: 1 / 0)


def flow(u):
    for _ in range(3):
        flux = 0.5 * u * u
        u = u[1:-1] - 0.1 * (flux[2:] - flux[:-2]) + 0.05 * (u[2:] - 2 * u[1:-1] + u[:-2])
    return jnp.sum(u**2), jnp.argmax(u)


STENCILS = {
    "stencil": stencil,
    "jit": jax.jit(lambda x: jax.jit(jnp.sum)(jnp.where(x[:36] > 0, jax.jit(windows)(x), 0) ** 2)),
    "flow, and an index": flow,
    "custom_vjp": lambda x: jnp.sum(reversed_by_rule(windows(x)) ** 2 * windows(x)),
    "a constant, and a key": lambda x: (
        stencil(x * WAVE) + jax.random.normal(jax.random.key(jnp.int32(9 * jnp.abs(x[0]))))
    ),
}


def value(fun):
    return lambda x: jnp.sum(jnp.sin(jax.tree.leaves(fun(x))[0]))


def barriers(fun, *args):
    return primitives(fun, *args)["optimization_barrier"]


@pytest.mark.parametrize(
    ("name", "length"),
    [("stencil", 6), ("jit", 7), ("custom_vjp", 7), slow("a constant, and a key", 7)],
)
def test_only_what_is_differentiated_has_barriers(name, length, monkeypatch):
    fun = STENCILS[name]
    mapped, x = value(chunked_vmap(fun, 3)), X[:length]
    forward, back = barriers(mapped, x), barriers(jax.grad(mapped), x)
    monkeypatch.setattr(kept_residuals, "keep_residuals", lambda jaxpr: jaxpr)
    assert barriers(mapped, x) == forward
    assert barriers(jax.grad(mapped), x) < back
    whole = value(chunked_vmap(fun, 7))  # one chunk is plain `jax.vmap`
    assert barriers(jax.grad(whole), X) == 0


CHEAP = {
    "one slice": lambda x: jnp.sum(jnp.sin(x[3:])),
    "linear": lambda x: jnp.sum((x[1:] - 2 * x[:-1]) / 3),
    "all pairs": lambda x: jnp.sum(jnp.sqrt((x[:, None] - x[None]) ** 2 + 1e-3)),
}


@pytest.mark.parametrize("fun", CHEAP.values(), ids=CHEAP)
def test_cheap_reverse_passes_keep_nothing(fun):
    assert barriers(jax.grad(value(chunked_vmap(fun, 3))), X) == 0


TRANSFORMED = {
    "gradient": jax.grad,
    "jvp of gradient": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),)),
    "vmap of gradient": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
}


@pytest.mark.parametrize(
    ("kernel", "transformation", "length"),
    [
        ("flow, and an index", "gradient", 6),  # even chunks
        ("custom_vjp", "gradient", 7),
        slow("stencil", "jvp of gradient", 7),
        slow("a constant, and a key", "gradient", 7),
        slow("jit", "vmap of gradient", 7),
    ],
)
def test_derivatives_are_those_of_vmap(kernel, transformation, length):
    fun, make = STENCILS[kernel], TRANSFORMED[transformation]
    got, want = (jax.jit(make(value(f)))(X[:length]) for f in (chunked_vmap(fun, 3), jax.vmap(fun)))
    assert_same(got, want, rtol=2e-4, atol=2e-4)


def test_the_gradient_of_a_sum_of_several_arguments():
    def kernel(x, w, n):
        return stencil(x * w) * n.astype(x.dtype)

    def slopes(fun):
        return jax.grad(lambda x, w: jnp.sum(fun(x, w, jnp.arange(7))), (0, 1))(X, X[0])

    mapped = auto_vmap(x=1, w=1, n=0, reduce="sum", chunk_size=3)(kernel)
    got, want = jax.jit(lambda: (slopes(mapped), slopes(jax.vmap(kernel, (0, None, 0)))))()
    assert_same(got, want, rtol=2e-4, atol=2e-4)


def test_what_has_no_reverse_pass_is_left_alone():
    def until_small(x):
        return lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x / 2, x)

    loop = value(chunked_vmap(lambda x: stencil(until_small(x)), 3))
    by_hand = value(jax.vmap(lambda x: stencil(until_small(x))))
    got, want = (jax.jit(lambda x, f=f: jax.jvp(f, (x,), (x,)))(X) for f in (loop, by_hand))
    assert_same(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ZeroDivisionError):  # by the rule itself
        jax.grad(value(chunked_vmap(lambda x: stencil(refuses(x)), 3)))(X)


# What it costs to trace.


def kepler(anomaly, eccentricity):
    e = anomaly
    for _ in range(10):
        e = e - (e - eccentricity * jnp.sin(e) - anomaly) / (1 - eccentricity * jnp.cos(e))
    return e


def inverse(x):
    """Single numbers of an array, and an array that is never sliced."""
    a, b, c, d = x[0], x[1], x[2], x[3]
    return jnp.tanh(jnp.stack([d, -b, -c, a]) / (a * d - b * c))


def traced(fun, *args):
    """Return how many programs are traced, and in how many the rule looks for slices."""
    kept_values._barrier_primitive()  # which is traced once in a process
    programs, looked = [], []
    with pytest.MonkeyPatch.context() as patch:
        make, look = jax.make_jaxpr, kept_residuals._read_again
        patch.setattr(jax, "make_jaxpr", lambda *a, **k: programs.append(0) or make(*a, **k))
        patch.setattr(kept_residuals, "_read_again", lambda jaxpr: looked.append(0) or look(jaxpr))
        make(fun)(*args)
    return len(programs), len(looked)


PROGRAMS = {
    "Kepler": (chunked_vmap(kepler, 256), (jnp.ones(2561), jnp.ones(2561)), 0),
    "inverse": (chunked_vmap(inverse, 3), (X,), 0),
    "stencil": (chunked_vmap(stencil, 3), (X,), 1),
    "stencil, even": (chunked_vmap(stencil, 3), (X[:6],), 1),
}


@pytest.mark.parametrize(("fun", "args", "looks"), PROGRAMS.values(), ids=PROGRAMS)
def test_only_a_derivative_traces_one_more_program(fun, args, looks):
    programs, forward = traced(fun, *args)
    assert programs <= 3  # the item, a chunk, and the call, if its derivative is another program
    assert forward == 0
    loss = lambda *args: jnp.sum(fun(*args))  # noqa: E731
    assert traced(jax.grad(loss), *args)[1] == looks
    assert traced(lambda *args: jax.jvp(jax.grad(loss), args, args), *args)[1] == looks


# What is compiled.


def wave(u):
    y = sum(w * u[i : i + 36] for i, w in enumerate(WEIGHTS))
    return jnp.sum(jnp.log1p(y * y) * jnp.exp(y))


@pytest.mark.optimized
@pytest.mark.parametrize("xla_cpu", [True, False])
def test_a_cotangent_is_not_computed_for_each_slice(xla_cpu):
    """In a loop with the sum of its padded slices, an exponential is computed for each of them."""
    mapped = value(auto_vmap(1, chunk_size=30, xla_cpu=xla_cpu)(wave))
    x = jax.ShapeDtypeStruct((6000, 40), jnp.float32)
    loops = jax.jit(jax.grad(mapped)).lower(x).compile().as_text().split("\n\n")
    (padded,) = (text for text in loops if text.count(" pad(") > 1)
    # If not: XLA:CPU no longer needs `keep_residuals`.
    assert (" exponential(" in padded) == (not xla_cpu)
