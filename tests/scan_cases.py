# SPDX-License-Identifier: MIT
"""Scan bodies, losses and transformations that the tests of both scans share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def body(carry, x):
    """Depends on its inputs and on their order; has leaves of many kinds."""
    force, count = (jnp.full(3, 0.1), 1) if x is None else (x["force"], x["count"])
    position = jnp.sin(0.9 * carry["position"]) + force * jnp.array([1.0, -0.5, 0.3])
    total = carry["total"] * 3 + count
    ys = {
        "energy": jnp.sum(position * carry["position"]),
        "position": (position, None),
        "odd": total % 2 == 1,
        "empty": jnp.zeros((0, 2)),
        "weak": 1.0,
    }
    return {"position": position, "total": total}, ys


def inputs(length, with_xs=True):
    init = {"position": jnp.array([0.1, 0.2, -0.3]), "total": jnp.int32(1)}
    force = np.linspace(-1, 1, 3 * length, dtype=np.float32).reshape(length, 3)
    xs = {"force": jnp.asarray(force), "count": jnp.asarray(np.arange(length, dtype=np.int32))}
    return init, xs if with_xs else None


def drift(carry, x):
    carry = jnp.sin(carry) + x
    return carry, (carry * x, x)


XS = jnp.asarray(np.linspace(0.0, 1.0, 10))


def assert_same_weak_types(got, want):
    def weak(leaf):
        return getattr(jax.typeof(leaf), "weak_type", False)

    assert jax.tree.map(weak, got) == jax.tree.map(weak, want)


def loss_and_gradient(scan):
    """Compile a loss of ``(init, xs)`` and of a weight for each of the ``ys``.

    It returns ``((loss, (carry, ys)), gradient)``, the gradient in ``(init, xs)``: of dtype float0
    for integers.
    """

    def loss(inputs, weights):
        carry, ys = scan(*inputs)
        total = jnp.sum(jnp.cos(carry["position"])) + jnp.sum(weights * ys["energy"])
        return total + jnp.sum(weights[:, None] * ys["position"][0] ** 2), (carry, ys)

    return jax.jit(jax.value_and_grad(loss, has_aux=True, allow_int=True))


def outputs_and_loss(scan):
    """Compile what a scan returns, then the same by the gradient of a loss, in one program."""
    return jax.jit(
        lambda inputs, weights: (scan(*inputs), loss_and_gradient(scan)(inputs, weights))
    )


@functools.cache
def loss_and_gradient_of_scan(length, reverse):
    """Compile the same for `jax.lax.scan`, once for all slices and chunks of it."""
    return loss_and_gradient(lambda init, xs: lax.scan(body, init, xs, length, reverse))


def sum_of_squares(scan):
    """Sum up what a scan returns, to be transformed."""

    def of(init, xs):
        carry, ys = scan(drift, init, xs)
        return carry**2 + sum(jnp.sum(y**2) for y in ys)

    return of


def gradient_of_closed_over(scan):
    """Differentiate a scan in two values that its body closes over."""

    def of(scale, shift):
        def f(carry, x):
            return jnp.sin(carry * scale) + x, carry * shift

        carry, ys = scan(f, jnp.float32(0.3), XS)
        return carry + jnp.sum(ys**2)

    return jax.jit(jax.grad(of, (0, 1)))(2.0, 0.5)


TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "grad of grad": lambda f: jax.grad(lambda i, x: jnp.sum(jax.grad(f, 1)(i, x) ** 2), (0, 1)),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f, 0), 1),
    "jvp": lambda f: lambda i, x: jax.jvp(f, (i, x), (i + 1, jnp.cos(x))),
    "jvp in xs": lambda f: lambda i, x: jax.jvp(lambda x: f(i, x), (x,), (jnp.cos(x),)),
    "linearize": lambda f: lambda i, x: jax.linearize(f, i, x)[1](i + 1, jnp.cos(x)),
    "vmap of init": lambda f: lambda i, x: jax.vmap(f, (0, None))(i + jnp.arange(3.0), x),
    "vmap of xs": lambda f: lambda i, x: jax.vmap(f, (None, 1))(i, jnp.stack([x, -x], 1)),
    "vmap of grad": lambda f: (
        lambda i, x: jax.vmap(jax.grad(f, (0, 1)), (0, None))(i + jnp.arange(3.0), x)
    ),
    "grad of jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
}


@functools.cache
def transformed_scan(name, scan, length=None):
    """Evaluate a transformation of a plain scan, once for all that is compared with it."""
    transformed = jax.jit(TRANSFORMATIONS[name](sum_of_squares(scan)))
    return transformed(jnp.float32(0.3), XS[:length])


def traced(f):
    """Trace ``f`` under jit, without a program to compile."""
    return functools.partial(jax.eval_shape, jax.jit(f))


def traced_hessian(f):
    return traced(jax.hessian(f))


def here(f):
    code = f.__code__
    return f"{f.__name__}() at {code.co_filename}:{code.co_firstlineno}"
