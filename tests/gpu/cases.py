# SPDX-License-Identifier: MIT
"""The calls of `benchmarks/program_cases.py`, kernels, and gradients of any call."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import h100
from h100 import shaped
from hlo import read
from program_cases import CASES, NO_GRADIENT


def halved(x):
    return lax.while_loop(lambda x: x > 0.3, lambda x: x / 2, x)


def noisy(key, x):
    return x * jax.random.normal(key, x.shape)


def distance(x, y):
    return jnp.sum((x - y) ** 2)


def compiled(fun, *args):
    """Return what `hlo` reads of a program for an H100."""
    return read(h100.compiled(fun, *args))


# It measures a chunk, which needs a device: see `test_pairs.py`.
ELSEWHERE = {"auto_vmap, memory_limit"}


def mostly_weekly(names, quick):
    """Return the cases of a test, of which only a few run before a merge."""
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.weekly) for name in names
    ]


def total(tree):
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in floats)


def gradient(fun, *args):
    """Return the gradient by all arguments with floating numbers; None if there is none."""
    leaves, tree = jax.tree.flatten(args)
    moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    outs = jax.tree.leaves(jax.eval_shape(fun, *args))
    if not moving or not any(jnp.issubdtype(x.dtype, jnp.floating) for x in outs):
        return None

    def of_leaves(*leaves):
        return total(fun(*tree.unflatten(leaves)))

    return lambda *args: jax.grad(of_leaves, tuple(moving))(*jax.tree.leaves(args))


def modes(name, fun, args):
    """Yield the call, and its gradient if it has one."""
    yield "forward", fun
    back = None if name in NO_GRADIENT else gradient(fun, *args)
    if back is not None:
        yield "gradient", back


def program_cases():
    """Yield name, function and shapes; without those that need several devices."""
    for group, make in CASES.items():
        for label, (fun, args) in {} if group == "sharded" else make().items():
            if (name := f"{group}, {label}") not in ELSEWHERE:
                yield name, fun, jax.tree.map(lambda x: shaped(*x.shape, dtype=x.dtype), args)
