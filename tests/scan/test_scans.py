# SPDX-License-Identifier: MIT
"""What holds of each scan: of a slice, of steps to keep, of windows, and of chunks."""

import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, at_each_run, compilations, enable_x64, slow, weekly
from rankax import checkpoint_chunked_scan, sliced_scan
from scan_cases import XS, assert_same_weak_types, drift


def body(carry, x):
    """Depends on its inputs and on their order; has leaves of many kinds."""
    position = jnp.sin(0.9 * carry["position"]) + x["force"] * jnp.array([1.0, -0.5, 0.3])
    total = carry["total"] * 3 + x["count"]
    ys = {
        "energy": jnp.sum(position * carry["position"]),
        "position": (position, None),
        "odd": total % 2 == 1,
        "empty": jnp.zeros((0, 2)),
        "weak": 1.0,
    }
    return {"position": position, "total": total}, ys


def inputs(length):
    init = {"position": jnp.array([0.1, 0.2, -0.3]), "total": jnp.int32(1)}
    force = np.linspace(-1, 1, 3 * length, dtype=np.float32).reshape(length, 3)
    xs = {"force": jnp.asarray(force), "count": jnp.asarray(np.arange(length, dtype=np.int32))}
    return init, xs


def outputs_and_gradient(scan):
    """Compile what a scan returns, and a loss of it with a weight for each of the ``ys``.

    The gradient in ``(init, xs)`` is of dtype float0 for integers.
    """

    def loss(inputs, weights):
        carry, ys = scan(*inputs)
        total = jnp.sum(jnp.cos(carry["position"])) + jnp.sum(weights * ys["energy"])
        return total + jnp.sum(weights[:, None] * ys["position"][0] ** 2)

    def call(inputs, weights):
        return scan(*inputs), jax.value_and_grad(loss, allow_int=True)(inputs, weights)

    return jax.jit(call)


@functools.cache
def of_plain_scan(length, reverse):
    return outputs_and_gradient(lambda init, xs: lax.scan(body, init, xs, length, reverse))


chunked = checkpoint_chunked_scan
LAST_BLOCK = {"step": 5, "checkpoint": True, "reverse": True}
ANY_ORDER = {"save_at": [5, 1, 1, -1], "reverse": True, "unroll": 2}
# A scan, its options and the number of steps. The first four are tested at each run.
CASES = {
    "blocks that tile": (sliced_scan, {"start": 1, "step": 4, "checkpoint": True, "unroll": 3}, 20),
    "from the end": (sliced_scan, {"start": -2, "stop": 3, "step": -3}, 20),
    "steps in any order, twice": (sliced_scan, ANY_ORDER, 13),
    "chunks in two levels": (chunked, {"chunk_size": [7, 3], "reverse": True, "unroll": 2}, 13),
    "no room for the last block": (sliced_scan, LAST_BLOCK, 13),
    "one in front": (sliced_scan, {"start": 1, "step": 2}, 7),
    "a slice of no steps": (sliced_scan, {"stop": 2, "unroll": True}, 0),
    "steps in order": (sliced_scan, {"save_at": [0, 3, 4, 12], "checkpoint": True}, 13),
    "a range of steps": (sliced_scan, {"save_at": [9, 6, 3]}, 13),
    "no steps kept": (sliced_scan, {"save_at": [], "checkpoint": True}, 7),
    "a prime length in chunks": (chunked, {"chunk_size": 3}, 13),
    "chunks of the square root": (chunked, {"chunk_size": "sqrt", "reverse": True}, 13),
    "longer chunks inside": (chunked, {"chunk_size": [3, 7, 2]}, 20),
    "chunks of no steps": (chunked, {"chunk_size": None, "unroll": True}, 0),
}


@pytest.mark.parametrize("case", at_each_run([*CASES][:4], CASES))
def test_values_and_gradients_are_those_of_scan(case):
    scan, options, length = case
    window = slice(*(options.get(bound) for bound in ("start", "stop", "step")))
    kept = np.asarray(options.get("save_at", np.arange(length)[window]), int)
    weights = np.arange(1.0, 1 + len(kept), dtype=np.float32)
    at_all = np.zeros(length, np.float32)
    np.add.at(at_all, kept, weights)
    plain = of_plain_scan(length, options.get("reverse", False))
    (carry, ys), of_want = plain(inputs(length), at_all)
    mine = outputs_and_gradient(lambda init, xs: scan(body, init, xs, length, **options))
    got, of_got = mine(inputs(length), weights)
    assert_same(got, (carry, jax.tree.map(lambda y: np.asarray(y)[kept], ys)))
    assert_same_weak_types(got, (carry, ys))
    assert_same(of_got, of_want)


KEPT = {"save_at": (7, 0, 2), "checkpoint": True}
# Each step belongs to the window that the next kept step ends.
MEANS = np.zeros((3, 10), np.float32)
MEANS[0, 3:8], MEANS[1, :1], MEANS[2, 1:3] = 1 / 5, 1, 1 / 2
# Each scan, and what it makes of the outputs of all steps.
SCANS = {
    "slice": (functools.partial(sliced_scan, start=1, step=4), lambda y: y[1::4]),
    "checkpoint": (
        functools.partial(sliced_scan, start=1, step=4, checkpoint=True),
        lambda y: y[1::4],
    ),
    "steps": (functools.partial(sliced_scan, **KEPT), lambda y: y[jnp.array(KEPT["save_at"])]),
    "windows": (functools.partial(sliced_scan, reduce="mean", **KEPT), lambda y: MEANS @ y),
    "chunks": (functools.partial(checkpoint_chunked_scan, chunk_size=(5, 2)), lambda y: y),
}


def plain(name, f, init, xs):
    """Scan by `jax.lax.scan`."""
    carry, ys = lax.scan(f, init, xs)
    return carry, jax.tree.map(SCANS[name][1], ys)


def both(name):
    """Return a scan, and the same by `jax.lax.scan`."""
    return SCANS[name][0], functools.partial(plain, name)


def sum_of_squares(scan):
    def of(init, xs):
        carry, ys = scan(drift, init, xs)
        return carry**2 + sum(jnp.sum(y**2) for y in ys)

    return of


TRANSFORMATIONS = {
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "grad of grad": lambda f: jax.grad(lambda i, x: jnp.sum(jax.grad(f, 1)(i, x) ** 2), (0, 1)),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f, 0), 1),
    "jvp in xs": lambda f: lambda i, x: jax.jvp(lambda x: f(i, x), (x,), (jnp.cos(x),)),
    "linearize": lambda f: lambda i, x: jax.linearize(f, i, x)[1](i + 1, jnp.cos(x)),
    "vmap of xs": lambda f: lambda i, x: jax.vmap(f, (None, 1))(i, jnp.stack([x, -x], 1)),
    "vmap of grad": lambda f: (
        lambda i, x: jax.vmap(jax.grad(f, (0, 1)), (0, None))(i + jnp.arange(3.0), x)
    ),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
}


@pytest.mark.parametrize(
    ("transformation", "name"),
    [
        ("grad of checkpoint", "checkpoint"),
        ("jvp in xs", "steps"),
        ("grad of checkpoint", "chunks"),
        slow("hessian", "checkpoint"),
        slow("linearize", "slice"),
        slow("vmap of grad", "windows"),
        slow("hessian", "chunks"),
        weekly("grad of grad", "slice"),
        weekly("jacrev of jacfwd", "checkpoint"),
        weekly("vmap of xs", "steps"),
        weekly("hessian", "windows"),
        weekly("jacrev of jacfwd", "chunks"),
    ],
)
def test_transformations(transformation, name):
    transformed = [TRANSFORMATIONS[transformation](sum_of_squares(scan)) for scan in both(name)]
    with jax.checking_leaks():
        got, want = (jax.jit(f)(jnp.float32(0.3), XS) for f in transformed)
    assert_same(got, want, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "length", "transform"),
    [
        *((name, 10, jax.grad) for name in SCANS if name != "slice"),
        *((name, 0, jax.jit) for name in ("slice", "chunks")),
        slow("slice", 10, jax.hessian),
        slow("chunks", 10, jax.hessian),
    ],
)
def test_the_body_is_traced_once(name, length, transform):
    traces = []

    def counted(carry, x):
        traces.append(x)
        return drift(carry, x)

    def total(init):
        carry, ys = SCANS[name][0](counted, init, jnp.ones(length))
        return carry + sum(jnp.sum(y) for y in ys)

    jax.eval_shape(jax.jit(transform(total)), jnp.array(0.3))
    assert len(traces) == 1


def test_chunks_in_double_precision():
    """Of other scans, front/test_strict_modes.py has one at each run."""
    with enable_x64():
        got, want = (scan(drift, 0.3, jnp.linspace(0.0, 1.0, 10)) for scan in both("chunks"))
        assert got[0].dtype == jnp.float64
        assert_same(got, want, rtol=1e-12)


@pytest.mark.parametrize("name", ["slice", "chunks", *map(slow, ("checkpoint", "steps"))])
def test_random_keys_in_xs_carry_and_ys(name):
    def walk(carry, x):
        position, key = carry
        key, draw = jax.random.split(key)
        kick = jax.random.uniform(draw) * jax.random.uniform(x["key"])
        return (position + x["scale"] * kick, key), (x["key"], draw, position)

    def outputs_and_slope(scan):
        def end(scale):
            keys = jax.random.split(jax.random.key(1), 10)
            init = jnp.array(0.5), jax.random.key(2)
            carry, ys = scan(walk, init, {"key": keys, "scale": scale})
            return carry[0], (carry, ys)

        return jax.grad(end, has_aux=True)

    mine, plain = map(outputs_and_slope, both(name))
    assert_same(mine(XS), jax.jit(plain)(XS))


@pytest.mark.parametrize(
    "name", ["checkpoint", "chunks", *map(slow, ("slice", "steps", "windows"))]
)
def test_a_warm_eager_call_compiles_nothing(name):
    def loss(scan, scale, xs):
        def step(carry, x):  # another function in each call
            return carry * scale + x, jnp.sin(carry)

        carry, ys = scan(step, np.float32(0.5), xs)
        return jnp.sum(ys) + carry

    mine, plain = (jax.value_and_grad(functools.partial(loss, scan), (0, 1)) for scan in both(name))
    for _ in range(2):
        mine(jnp.float32(0.5), XS)
    got, compiled = compilations(mine, jnp.float32(0.8), XS)
    assert compiled == 0
    assert_same(got, jax.jit(plain)(jnp.float32(0.8), XS))


@pytest.mark.parametrize("name", ["slice", "chunks", *map(slow, ("steps", "windows"))])
def test_debugging_runs_the_body_on_values(name):
    seen = []

    def printing(carry, x):
        seen.append(float(x))
        return carry + x, carry

    with jax.disable_jit():
        got = SCANS[name][0](printing, jnp.float32(1.0), XS)
    assert seen == XS.tolist()
    assert_same(got, plain(name, lambda c, x: (c + x, c), jnp.float32(1.0), XS))


@pytest.mark.parametrize("name", ["slice", "windows"])
def test_callbacks_and_reports_happen_at_every_step(name):
    seen, reports = [], []

    def note(x):
        seen.append(float(x))
        return np.float32(x)

    def noting(carry, x):
        x = jax.experimental.io_callback(note, jax.ShapeDtypeStruct((), "float32"), x, ordered=True)
        return carry + x, carry

    report = lambda *pair: reports.append(pair)  # noqa: E731
    jax.block_until_ready(SCANS[name][0](noting, jnp.float32(0.0), XS, progress=report))
    jax.effects_barrier()
    assert seen == XS.tolist()
    assert reports[-1] == (10, 10)
