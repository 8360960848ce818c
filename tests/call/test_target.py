# SPDX-License-Identifier: MIT
"""Where a call runs decides how it is scheduled, not where JAX runs by default.

A process that also has a GPU is a pretence here; `tests/gpu` compiles for a real one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from rankax import auto_vmap, chunked_vmap
from rankax.core.base.arrays import Target, target_of

CPU = jax.devices("cpu")[0]


@pytest.fixture
def with_gpu(monkeypatch):
    """A process whose default is a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def on_cpu(*shape):
    return jax.device_put(np.ones(shape, "float32"), CPU)


def halved(x):
    return jax.lax.while_loop(lambda x: x > 0.3, lambda x: x / 2, x)


def lanes(*args, **options):
    """Return how many lanes there are, of 5000 at most 256 on a CPU."""
    return auto_vmap(0, lockstep=False, **options)(halved).plan(*args).lanes


def test_by_default_it_is_where_jax_runs():
    x = jnp.ones(5000)
    assert target_of([x, 2.0, None, np.ones(3), jax.random.key(0)]) is None
    assert lanes(x) == 256


@pytest.mark.usefixtures("with_gpu")
def test_arrays_on_a_cpu_in_a_process_with_a_gpu():
    x, anywhere = on_cpu(5000), jnp.ones(5000)
    assert target_of([2.0, anywhere]) is None
    assert target_of([2.0, x]) == Target("cpu", CPU)
    assert (lanes(x), lanes(anywhere)) == (256, 5000)
    got = chunked_vmap(jnp.cumsum, 2)(on_cpu(7, 3))
    np.testing.assert_array_equal(got, np.cumsum(np.ones((7, 3)), 1))
    assert got.devices() == {CPU}


@pytest.mark.usefixtures("with_gpu")
def test_under_transformations():
    found = []

    def of(x):
        found.append(target_of([x]))
        return jnp.sum(x)

    x = on_cpu(3, 2)
    jax.grad(of)(x)
    jax.vmap(of)(x)
    jax.jvp(of, [x], [x])
    assert found == [Target("cpu", CPU)] * 3


@pytest.mark.usefixtures("with_gpu")
def test_what_is_set_around_the_call():
    x = jax.ShapeDtypeStruct((5000,), jnp.float32)
    with jax.default_device(CPU):
        assert lanes(x) == 256
        found = []
        jax.make_jaxpr(lambda x: found.append(lanes(x)))(np.ones(5000))
        assert found == [256]
    with jax.default_device("cpu"):
        assert lanes(x) == 256
    assert lanes(x) == 5000


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_of_a_shape(kind, monkeypatch):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found, on_mesh = [], NamedSharding(mesh, PartitionSpec("d"))
    for sharding in (SingleDeviceSharding(CPU), on_mesh):
        x = jax.ShapeDtypeStruct((5000,), jnp.float32, sharding=sharding)
        assert target_of([x]) == Target("cpu", CPU)
    jax.jit(lambda x: found.append(target_of([x]))).trace(x)
    with jax.set_mesh(mesh):
        jax.jit(lambda x: found.append(target_of([x]))).trace(x)
        found.append(target_of())
    assert found == [Target("cpu")] * 3


@pytest.mark.usefixtures("with_gpu")
def test_calls_inside_a_compiled_kernel():
    found = []

    @auto_vmap(0, chunk_size=2)
    def inner(x):
        return 2 * x

    @auto_vmap(1, jit=True)
    def outer(x):
        found.append(target_of([x]))
        return jnp.sum(inner(x))

    for x, target in ((on_cpu(3, 4), Target("cpu", CPU)), (jnp.ones((3, 4)), None)):
        np.testing.assert_array_equal(outer(x), [8, 8, 8])
        assert found.pop() == target
        assert not found


def test_a_limit_is_measured_where_the_call_runs(monkeypatch):
    x = on_cpu(3000, 8)
    kernel = auto_vmap(1, memory_limit="20 kB")(lambda x: jnp.sum(jnp.outer(x, x)))
    want = kernel.plan(x).memory
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert kernel.plan(x).memory == want
    monkeypatch.undo()
    with jax.default_device("gpu"):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        message = "memory_limit cannot measure a call compiled for a gpu, because this process"
        with pytest.raises(ValueError, match=message):
            kernel.plan(shape)
