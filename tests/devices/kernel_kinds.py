# SPDX-License-Identifier: MIT
"""Kernels of one vector of three numbers, one for each kind of program that JAX can trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax import auto_vmap, chunked_vmap

# Closed over, and on no mesh.
WEIGHTS = jnp.asarray(np.cos(np.arange(9.0)).reshape(3, 3))
SHIFT = np.array([0.5, -1.0, 2.0], np.float32)


@jax.custom_jvp
def sine(v):
    return jnp.sin(v)


sine.defjvp(lambda primals, tangents: (sine(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def cosine(v):
    return jnp.cos(v)


cosine.defvjp(lambda v: (cosine(v), v), lambda v, g: (-g * jnp.sin(v),))


def scanned(v):
    return lax.scan(lambda s, a: (jnp.tanh(WEIGHTS @ s) + a, s * a), v, v)


def looped(v):
    return lax.while_loop(lambda s: s[1] < 5, lambda s: (s[0] * v, s[1] + 1), (v, 0))[0]


def drawn(v):
    return v * jax.random.normal(jax.random.fold_in(jax.random.key(3), v[0].astype(int)), (3,))


def matrix(v):
    return jnp.outer(v, v) + 2 * jnp.eye(3)


KINDS = {
    "arithmetic": lambda v: jnp.sin(v) * 2 + v / (1 + v**2),
    "jit": lambda v: jax.jit(lambda v: jnp.sin(v) @ WEIGHTS)(v),
    "scan": scanned,
    "fori_loop": lambda v: lax.fori_loop(0, 4, lambda _, s: jnp.sin(s) + v, v),
    "while_loop": looped,
    "cond": lambda v: lax.cond(v[0] > 1.5, jnp.sin, jnp.square, v),
    "switch": lambda v: lax.switch(v[0].astype(int), [jnp.sin, jnp.cos, jnp.square], v),
    "map": lambda v: lax.map(lambda a: jnp.sin(a) * v[0], v),
    "nested auto_vmap": lambda v: auto_vmap(0, 1, chunk_size=2)(lambda a, u: a * u.sum())(v, v),
    "nested chunked_vmap": lambda v: chunked_vmap(lambda a: jnp.sin(a) * v, 2)(v),
    "hessian": jax.hessian(lambda v: jnp.sin(v).prod()),
    "grad": jax.grad(lambda v: jnp.sin(v).sum() ** 2),
    "custom_jvp": lambda v: sine(v) ** 2,
    "custom_vjp": lambda v: cosine(v) ** 2,
    "checkpoint": jax.checkpoint(lambda v: jnp.sin(WEIGHTS @ v)),
    # Without `inv`, which JAX (0.12) cannot map over an explicit axis.
    "linalg": lambda v: (jnp.linalg.solve(matrix(v), v), jnp.linalg.eigvalsh(matrix(v))),
    "fft": lambda v: jnp.abs(jnp.fft.fft(v)),
    "sort": lambda v: jnp.sort(v * SHIFT),
    "index": lambda v: v[jnp.array([2, 0, 1, 1])] * v[jnp.argmax(v)],
    "key": drawn,
    "associative_scan": functools.partial(lax.associative_scan, jnp.multiply),
    "cumsum": lambda v: jnp.cumsum(v * v),
    "einsum": lambda v: jnp.einsum("i,ij,j->", v, WEIGHTS, v) + jnp.dot(v, v),
    "pytree": lambda v: {"a": (v[0], jnp.sin(v)), "b": [v[1:].sum()]},
    "integer": lambda v: jnp.round(v * 10).astype(jnp.int32),
    "bool": lambda v: v > 1.2,
    "constant": lambda v: v * SHIFT + WEIGHTS[0],
}
WITHOUT_GRADIENT = ("while_loop", "integer", "bool")
