# SPDX-License-Identifier: MIT
# ruff: noqa: T201
"""Random calls of one kernel with `devices` and any other options, compared with one device.

To try those of many seeds, on four devices::

    XLA_FLAGS=--xla_force_host_platform_device_count=4 PJRT_NPROC=8 PYTHONPATH=tests:tests/devices \
        python tests/devices/random_calls.py 0 200
"""

from __future__ import annotations

import random
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rankax import SplitKey, auto_vmap
from rankax import reductions as rd

LAST = rd.Fold(0.0, lambda out: out["v"], lambda a, b: jnp.where(b == 0, a, b))
REDUCTIONS = [
    *("sum", "mean", "max", "argmin", "prod", "logsumexp", {"v": "sum"}, {"v": "argmax"}, LAST),
    *(rd.TopK(2), rd.BottomK(1), rd.Moments(), rd.Several("min", "argmax"), rd.Best("v")),
]


def total(tree: Any) -> jax.Array:
    """Weigh every number differently."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    each = [jnp.cos(jnp.arange(x.size, dtype=x.dtype)) @ jnp.sin(x).ravel() for x in floats]
    return jnp.sum(jnp.array(each))


TRANSFORMATIONS: dict[str, Any] = {
    "value": lambda f, x, y: f(x, y),
    "jit": lambda f, x, y: jax.jit(f)(x, y),
    "jvp": lambda f, x, y: jax.jvp(f, (x, y), (jnp.cos(x), y)),
    "vmap": lambda f, x, y: jax.vmap(f, (None, 0))(x, jnp.stack([y, y + 1])),
    "grad": lambda f, x, y: jax.grad(lambda x, y: total(f(x, y)), (0, 1))(x, y),
    "grad in jit": lambda f, x, y: jax.jit(jax.grad(lambda x: total(f(x, y))))(x),
    "jvp of grad": lambda f, x, y: jax.jvp(jax.grad(lambda y: total(f(x, y))), (y,), (y,)),
}


def kernel(x: jax.Array, y: jax.Array, key: jax.Array | None, *, ends: bool, masked: bool) -> Any:
    """Return a number for an item, by a loop whose length depends on it if it ``ends``."""
    v = jnp.tanh(x).sum() * y + jnp.sin(x[0])
    if key is not None:
        v = v + jax.random.normal(key)
    if ends:
        v = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 0.4 + s[1], s[1]), (v, v * v))[0]
    return {"v": v, "ok": v > -1} if masked else {"v": v}


def draw(seed: int) -> tuple[dict[str, Any], list[tuple[int, ...]], str, bool]:
    """Return the options, the batch shapes of both arguments, the transformation; with a key?"""
    rng = random.Random(seed)
    sides = [rng.choice([1, 2, 5, 7, 8, 12]) for _ in range(rng.choice([1, 1, 2]))]
    shapes = [tuple(side if rng.random() < 0.8 else 1 for side in sides) for _ in range(2)]
    shapes[rng.randint(0, 1)] = tuple(sides)
    options: dict[str, Any] = {"devices": rng.choice(["all", "all", 2, 3, 1])}
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


def check(seed: int) -> bool:
    """Assert that devices change nothing; return whether it is a call that is not refused."""
    options, shapes, transformation, with_key = draw(seed)
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(*shapes[0], 3)), jnp.float32)
    y = jnp.asarray(rng.normal(size=shapes[1]), jnp.float32)

    def called(devices: Any) -> Any:
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
    assert jax.tree.structure(got) == jax.tree.structure(want), (seed, draw(seed))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (seed, draw(seed))
        if a.dtype == jax.dtypes.float0:
            continue
        np.testing.assert_allclose(a, b, 2e-4, 2e-5, err_msg=f"{seed}: {draw(seed)}")
    return True


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    for seed in range(first, first + count):
        try:
            print(seed, "as on one device" if check(seed) else "refused", flush=True)
        except Exception:
            print(f"{seed} differs: {draw(seed)}\n{traceback.format_exc(limit=-4)}", flush=True)
