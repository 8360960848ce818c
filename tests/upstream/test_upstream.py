# SPDX-License-Identifier: MIT
"""Faults of JAX that a user of rankax can meet. Each test fails when JAX has mended its fault.

Then delete the test, and the section of docs/limits.md that it names, once no supported JAX has the
fault any more; until then, let the test run below the version that mended it only.
"""

import contextlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rankax import auto_vmap, checkpoint_chunked_scan, chunked_vmap

pytestmark = pytest.mark.optimized


def middle(v):
    """Of three numbers the first two, summed and doubled: the gradient is 2, 2, 0."""
    return jnp.cumsum(2 * v)[1]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a fault of XLA on CPUs")
class TestRunningSumOfPadded:
    """XLA:CPU gets the running sum of one number among zeros wrong: as many in front as behind.

    The section of docs/limits.md: "Wrong gradients of a running sum".
    """

    right, wrong = [2.0, 2.0, 0.0], [2.0, 2.0, 2.0]

    def test_the_program_that_is_compiled_wrongly(self):
        def reverse_sum(v):
            padded = lax.pad(v, np.float32(0), ((0, 0, 0), (1, 1, 0)))
            return 2 * lax.cumsum(padded, axis=1, reverse=True)

        v = jnp.ones((4, 1))
        np.testing.assert_array_equal(reverse_sum(v)[0], self.right)  # one operation at a time
        np.testing.assert_array_equal(jax.jit(reverse_sum)(v)[0], self.wrong)

    @pytest.mark.parametrize(
        "mapped",
        [
            chunked_vmap(middle, 4),
            auto_vmap(1, chunk_size=4)(middle),
            auto_vmap(1, jit=True)(middle),
        ],
        ids=["chunked_vmap", "chunk_size", "jit"],
    )
    def test_a_compiled_call_inherits_it(self, mapped):
        x = jnp.ones((8, 3))
        np.testing.assert_array_equal(jax.grad(lambda x: mapped(x).sum())(x)[0], self.wrong)


@pytest.mark.parametrize("loops", ["lax.map", "chunked_vmap"])
def test_the_second_derivative_of_a_function_with_a_rule(loops):
    """`docs/how_it_works.md` says of loops of JAX that they forget rules, and in which versions.

    With JAX 0.12 as the lowest, `keep_rules` in `core/trace/derivatives.py` may go, and that
    sentence.
    """

    @jax.custom_jvp
    def clipped(x):
        return x**2

    clipped.defjvp(lambda x, t: (clipped(*x), jnp.clip(2 * x[0], -1, 1) * t[0]))

    def mapped(x):
        energy = lambda x: jnp.sin(clipped(x))  # noqa: E731
        return chunked_vmap(energy, 2)(x) if loops == "chunked_vmap" else lax.map(energy, x)

    x, t = jnp.full(4, 2.0), jnp.ones(4)
    second = jax.jvp(jax.grad(lambda x: mapped(x).sum()), (x,), (t,))[1]
    forgets = loops == "lax.map" and jax.__version_info__ < (0, 12)
    np.testing.assert_allclose(second, 3.02721 if forgets else 0.7568025, rtol=1e-5)


def test_a_loop_forgets_what_its_body_writes_into_a_ref():
    """`_Walk.loses_refs` refuses such derivatives in chunks; once mended, it may go.

    The section of docs/limits.md: "Scans".
    """

    def square(x):
        held = jax.new_ref(jnp.zeros(()))
        held[...] += x * x
        return held[...]

    def loss(x):
        return jnp.sum(jnp.sin(lax.map(square, x)))

    assert float(loss(jnp.ones(1))) > 0.8
    assert float(jax.value_and_grad(loss)(jnp.ones(1))[0]) == 0  # wrong


def test_the_gradient_of_a_ref_in_a_checkpointed_body_is_zero():
    """The section of docs/limits.md: "Of scans"."""

    def total(x, wrap):
        ref = jax.new_ref(jnp.float32(0))

        def body(carry, x):
            ref[...] += jnp.sin(x)
            return carry, None

        lax.scan(wrap(body), 0.0, x)
        return ref[...]

    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.grad(total)(x, lambda body: body), jnp.cos(x), rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(total)(x, jax.checkpoint), 0 * x)


@pytest.mark.parametrize("scan", ["jax.lax.scan", "checkpoint_chunked_scan"])
def test_batched_gradient_of_a_scan_in_a_checkpoint_in_a_scan(scan):
    """With `jax_enable_checks`, JAX refuses a program of its own making, of loops in checkpoints.

    The section of docs/limits.md: "Of scans".
    """

    def decay(carry, x):
        return jnp.sin(carry * x), None

    def chunk(carry, xs):
        return lax.scan(decay, carry, xs)

    def end(init, xs):
        if scan == "jax.lax.scan":
            return lax.scan(jax.checkpoint(chunk), init, xs.reshape(2, 5))[0]
        return checkpoint_chunked_scan(decay, init, xs, chunk_size=5)[0]

    def gradients():
        with jax.enable_checks(True):
            return jax.vmap(jax.grad(end), (0, None))(jnp.ones(3), jnp.linspace(0.5, 1, 10))

    if jax.__version_info__ < (0, 12):
        with pytest.raises(TypeError, match="_check_closed_call"):
            gradients()
    else:
        assert gradients().shape == (3,)


@pytest.mark.skipif(
    jax.default_backend() != "cpu" or jax.__version_info__ < (0, 12),
    reason="the rules that this is for are for XLA:CPU of JAX 0.12",
)
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.min, lambda x, axis: x @ x])
def test_short_sums_of_many_numbers_go_to_a_library(reduce):
    """It is slow there, which is why chunks are cut into tiles: `rankax.ext.xla_cpu.rules`."""

    def calls_library(items, *core):
        x = jnp.ones((items, *core))
        compiled = jax.jit(jax.vmap(lambda x: reduce(2 * x, axis=-1))).lower(x).compile()
        return "__ynn_fusion" in compiled.as_text()

    assert [calls_library(items, 3) for items in (1365, 1366)] == [False, True]
    assert [calls_library(items, 8) for items in (511, 512)] == [False, True]


def run(program, devices, timeout=None, **environment):
    """Run a program on some CPU devices, and return what it prints."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), **environment}
    command = [sys.executable, "-c", program]
    found = subprocess.run(
        command, env=env, capture_output=True, text=True, check=True, timeout=timeout
    )
    return found.stdout


SHARDED = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",))
x = jnp.arange(8.0).at[3].set(jnp.nan)
x = jax.device_put(x, NamedSharding(mesh, P("d")))
print(*(float(f(x)) for f in (jnp.max, jnp.min, jnp.sum)), int(jnp.argmax(x)))
"""


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a fault of all-reduce on CPUs")
def test_extremes_of_a_sharded_array_lose_nan():
    """The line of docs/limits.md: "`jnp.max` and `jnp.min` of a sharded array lose NaN"."""
    assert run(SHARDED, 4) == "7.0 0.0 nan 3\n"


FACTORS = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

def density(x, y):
    kernel = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 0.1 * jnp.eye(12)
    factor = jnp.linalg.cholesky(kernel)
    white = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
    return -0.5 * white @ white - jnp.sum(jnp.log(jnp.diag(factor)))

def chunks(x, y):
    rows = x.reshape(2, 2500, 12), y.reshape(2, 2500, 12)
    return lax.map(lambda row: jax.vmap(density)(*row), rows)

mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
call = jax.jit(jax.shard_map(chunks, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
x, y = jax.random.normal(jax.random.key(0), (2, 10_000, 12))
for _ in range(100):
    call(x, y).block_until_ready()
"""


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a fault of XLA on CPUs")
@pytest.mark.parametrize("threads", [2, 4])
def test_lapack_hangs_on_as_many_devices_as_threads(threads):
    """The line of docs/limits.md: "LAPACK on all cores of a CPU can hang"."""
    hangs = threads == 2 and jax.__version_info__[:2] == (0, 10)
    with pytest.raises(subprocess.TimeoutExpired) if hangs else contextlib.nullcontext():
        run(FACTORS, 2, timeout=60 if hangs else 300, PJRT_NPROC=str(threads))


CLOSED_OVER = """
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P, use_abstract_mesh

kind = AxisType.Explicit
mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("d")))

def on_device(w, x):
    return lax.map(lambda x: jnp.sin(w * x), x)

def gradient(mesh_inside):
    specs = {"in_specs": (P(), P("d")), "out_specs": P("d"), "check_vma": False}
    mapped = jax.shard_map(on_device, mesh=mesh_inside, **specs)

    def loss(w):
        with use_abstract_mesh(mesh.abstract_mesh):
            return jnp.sum(jax.sharding.auto_axes(mapped, out_sharding=P("d"))(w, x))

    return jax.jit(jax.grad(loss)).lower(1.0).compile()(1.0)

try:
    gradient(None)  # the mesh that is entered, without its devices
except jax.errors.JaxRuntimeError as error:
    print("GlobalToLocalShape" in str(error))
print(round(float(gradient(Mesh(mesh.devices, "d", axis_types=(AxisType.Auto,)))), 3))
"""


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it needs four devices")
def test_an_abstract_mesh_hides_its_devices():
    """`Parts.mesh_here` gives `jax.shard_map` the devices; once mended, it need not."""
    assert run(CLOSED_OVER, 4) == "True\n6.58\n"
