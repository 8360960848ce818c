# SPDX-License-Identifier: MIT
"""Kernels on a cluster of real processes, on stores of zarr: dask's and cubed's."""

import cubed
import dask
import dask.array as da
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
import zarr
from cubed.runtime.create import create_executor
from distributed import Client, LocalCluster

import rankax.xarray
from cluster_kernels import heat, hottest
from rankax import auto_vmap

# Nothing of this compiles here, and workers are new processes that import JAX.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of other packages, on threads of their own
]

P = np.linspace(1000, 100, 7, dtype="float32")
T = np.random.default_rng(0).uniform(200, 300, size=(24, 10, 7)).astype("float32")


@pytest.fixture(scope="module")
def client():
    slow_start = {"distributed.comm.timeouts.connect": "300s"}  # all cores may be at work
    with (
        dask.config.set(slow_start),
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit="2 GiB"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def store(tmp_path):
    """A store of zarr with the temperature."""
    path = str(tmp_path / "t.zarr")
    array = zarr.create_array(path, shape=T.shape, chunks=(4, 10, 7), dtype=T.dtype)
    array[:] = T
    return path


def test_from_zarr_to_zarr_on_a_cluster(client, store, tmp_path):
    t = xr.DataArray(da.from_zarr(store), dims=("time", "x", "level"), name="t")
    p = xr.DataArray(P, dims="level")
    result = rankax.xarray.apply(heat, p, t, output_dims={"mean": (), "theta": "level"})
    result.to_zarr(tmp_path / "out.zarr", consolidated=False)
    stored = xr.open_zarr(tmp_path / "out.zarr", consolidated=False).load()
    want = heat(P, T)
    np.testing.assert_allclose(stored["mean"], want["mean"], rtol=1e-5)
    np.testing.assert_allclose(stored["theta"], want["theta"], rtol=1e-5)


def test_a_kernel_that_was_written_in_place_goes_to_the_workers(client):
    scale = 3.0

    def norm(v):
        return jnp.sqrt(v @ v) * scale

    x = da.ones((8, 4), chunks=(2, 4), dtype="float32")
    lazy = auto_vmap(v=1, reduce="sum", chunk_size=1)(norm)(x)
    assert float(client.compute(lazy).result()) == 8 * 6


@pytest.mark.weekly
def test_cubed_in_processes(store, tmp_path):
    spec = cubed.Spec(work_dir=str(tmp_path / "work"), allowed_mem="500MB", reserved_mem="0MB")
    t = cubed.from_zarr(store, spec=spec)
    executor = create_executor("processes", {"max_workers": 2})
    theta, best = cubed.compute(heat(P, t)["theta"], hottest(P, t), executor=executor)
    np.testing.assert_allclose(theta, heat(P, T)["theta"], rtol=1e-5)
    assert int(best) == int(hottest(P, T))
