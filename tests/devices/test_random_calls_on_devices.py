# SPDX-License-Identifier: MIT
"""Random calls of one kernel with `devices` and any other options, and random programs."""

import dataclasses
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fuzz import programs
from helpers import weekly
from rankax import SplitKey, auto_vmap
from rankax import reductions as rd
from sharding import naming, on

COUNT = int(os.environ.get("RANKAX_PROGRAMS", "12"))

LAST = rd.Fold(0.0, lambda out: out["v"], lambda a, b: jnp.where(b == 0, a, b))
REDUCTIONS = [
    *("sum", "mean", "max", "argmin", "prod", "logsumexp", {"v": "sum"}, {"v": "argmax"}, LAST),
    *(rd.TopK(2), rd.BottomK(1), rd.Moments(), rd.Several("min", "argmax"), rd.Best("v")),
]


def total(tree):
    """Weigh every number differently."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    each = [jnp.cos(jnp.arange(x.size, dtype=x.dtype)) @ jnp.sin(x).ravel() for x in floats]
    return jnp.sum(jnp.array(each))


TRANSFORMATIONS = {
    "value": lambda f, x, y: f(x, y),
    "jit": lambda f, x, y: jax.jit(f)(x, y),
    "jvp": lambda f, x, y: jax.jvp(f, (x, y), (jnp.cos(x), y)),
    "vmap": lambda f, x, y: jax.vmap(f, (None, 0))(x, jnp.stack([y, y + 1])),
    "grad": lambda f, x, y: jax.grad(lambda x, y: total(f(x, y)), (0, 1))(x, y),
    "grad in jit": lambda f, x, y: jax.jit(jax.grad(lambda x: total(f(x, y))))(x),
    "jvp of grad": lambda f, x, y: jax.jvp(jax.grad(lambda y: total(f(x, y))), (y,), (y,)),
}


def kernel(x, y, key, *, ends, masked):
    """Return a number for an item, by a loop whose length depends on it if it ``ends``."""
    v = jnp.tanh(x).sum() * y + jnp.sin(x[0])
    if key is not None:
        v = v + jax.random.normal(key)
    if ends:
        v = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 0.4 + s[1], s[1]), (v, v * v))[0]
    return {"v": v, "ok": v > -1} if masked else {"v": v}


def draw(seed):
    """Return the options, the batch shapes of both arguments, the transformation; with a key?"""
    rng = random.Random(seed)
    sides = [rng.choice([1, 2, 5, 7, 8, 12]) for _ in range(rng.choice([1, 1, 2]))]
    shapes = [tuple(side if rng.random() < 0.8 else 1 for side in sides) for _ in range(2)]
    shapes[rng.randint(0, 1)] = tuple(sides)
    options = {"devices": rng.choice(["all", "all", 2, 3, 1])}
    options["chunk_size"] = rng.choice([None, 1, 2, 3, 5, 100])
    options["checkpoint"] = rng.choice([None, True, False])
    options["lockstep"] = rng.random() < 0.7
    if rng.random() < 0.1:
        options |= {"chunk_size": None, "memory_limit": "20 kB"}
    if rng.random() < 0.3:
        options |= {"jit": True, "bucket": rng.random() < 0.5}
    if rng.random() < 0.2:
        options["progress"] = lambda *_: None
    with_key = rng.random() < 0.3
    if with_key and rng.random() < 0.5:
        options["batch_shape"] = tuple(sides)
    if rng.random() < 0.6:
        options["reduce"] = rng.choice(REDUCTIONS)
        options["reduce_axis"] = rng.choice([None, 0, -1])
        if rng.random() < 0.3:
            options["where"] = "ok"
    return options, shapes, rng.choice(list(TRANSFORMATIONS)), with_key


def check(seed):
    """Assert that devices change nothing; return whether it is a call that is not refused."""
    options, shapes, transformation, with_key = draw(seed)
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(*shapes[0], 3)), jnp.float32)
    y = jnp.asarray(rng.normal(size=shapes[1]), jnp.float32)

    def called(devices):
        form = {"ends": not options["lockstep"], "masked": "where" in options}
        ranks = {"x": 1, "y": 0, "key": SplitKey if with_key else None}
        mapped = auto_vmap(ranks=ranks, **options | {"devices": devices})(
            lambda x, y, key=None: kernel(x, y, key, **form)
        )
        more = {"key": jax.random.key(7)} if with_key else {}
        return TRANSFORMATIONS[transformation](lambda x, y: mapped(x, y, **more), x, y)

    try:
        want = called(None)
    except ValueError as error:  # such as the two largest of one item
        with pytest.raises(type(error)):
            called(options["devices"])
        return False
    got = called(options["devices"])
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, 2e-4, 2e-5)
    return True


@pytest.mark.parametrize("seeds", [range(3), weekly(range(3, 3 + 2 * COUNT))], ids=str)
@on("Auto")
def test_random_calls_with_other_options(mesh, seeds):
    is_call = []
    for seed in seeds:
        with naming(f"{seed}: {draw(seed)}"):
            is_call.append(check(seed))
    assert sum(is_call) > len(seeds) // 2


@pytest.mark.weekly
@on("Auto")
def test_random_programs_on_all_devices(mesh):
    drawn = (programs.draw(seed) for seed in range(5 * COUNT))
    maps = [program for program in drawn if program.caller.endswith("_vmap")]
    for program in maps[:COUNT]:
        with naming(program):
            dataclasses.replace(program, options=program.options | {"devices": "all"}).check()
