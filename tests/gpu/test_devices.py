# SPDX-License-Identifier: MIT
"""Eight GPUs, and 1,024: what they send each other, and where; the memory of each."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from cases import compiled, distance, halved, modes, mostly_weekly, noisy
from h100 import mesh_of, shaped
from rankax import SplitKey, auto_vmap
from rankax.reductions import BottomK, Moments

EACH = 4096  # items of a device
SIZE = 512  # of a chunk
ROWS = 100  # kept beside those that the devices share


def layer(x, w):
    return jnp.sum(jnp.tanh(w @ x))


def on(mesh, uneven):
    """Return all calls with their shapes on a mesh."""
    count = EACH * mesh.size + uneven
    spec = () if uneven else ("d",)
    split = shaped(count, 3, mesh=mesh, spec=spec)
    scalars = shaped(count, mesh=mesh, spec=spec)
    weights, rows = shaped(3, 3, mesh=mesh), shaped(ROWS, 3, mesh=mesh)
    key = shaped(dtype=jax.random.key(0).dtype, mesh=mesh)
    shared = {"devices": PartitionSpec("d")}
    chunked = {**shared, "chunk_size": SIZE}

    def pairs(axis, reduce):
        kernel = auto_vmap(1, 1, reduce=reduce, reduce_axis=axis, **shared)(distance)
        return (lambda x, y: kernel(x[:, None], y)), (split, rows)

    reductions = ("sum", "mean", "prod", "max", "argmin", "logsumexp", "gram")
    return {
        "map": (auto_vmap(1, None, **chunked)(layer), (split, weights)),
        "keys": (auto_vmap(SplitKey, 1, **chunked)(noisy), (key, split)),
        "lanes": (auto_vmap(0, lockstep=False, **shared)(halved), (scalars,)),
        "lanes, sum": (auto_vmap(0, lockstep=False, reduce="sum", **shared)(halved), (scalars,)),
        "pairs, rows of a device": pairs(-1, "sum"),
        "pairs, rows of all": pairs(0, "sum"),
        **{
            str(reduce): (auto_vmap(1, None, reduce=reduce, **chunked)(layer), (split, weights))
            for reduce in (*reductions, Moments(), BottomK(3))
        },
    }


FEW = ("map", "sum", "logsumexp", "pairs, rows of all", "keys")
NAMES = [*on(jax.sharding.AbstractMesh((8,), ("d",)), 0)]
MESHES = list(itertools.product((1, 128), (AxisType.Auto, AxisType.Explicit)))
QUICK = [(*mesh, name) for mesh in (MESHES[0], MESHES[-1]) for name in FEW]


def programs(mesh, name, uneven=0):
    fun, args = on(mesh, uneven)[name]
    for mode, call in modes(name, fun, args):
        with jax.set_mesh(mesh):
            yield mode, compiled(call, *args)


@pytest.mark.parametrize(
    "case", mostly_weekly([(*mesh, name) for mesh in MESHES for name in NAMES], QUICK), ids=str
)
def test_they_send_once_a_pass_and_after_the_loops(case):
    hosts, kind, name = case
    for mode, program in programs(mesh_of(hosts, 8, kind), name):
        assert program.collectives_in_loops == program.host_copies == 0
        passes = {"forward": 1, "gradient": 2}[mode]
        assert program.collectives <= passes
        if name in ("map", "keys", "lanes", "pairs, rows of a device"):
            assert program.collectives == passes - 1 - (name in ("keys", "lanes")) * (passes - 1)
        assert program.temporaries < 64 * EACH * ROWS


def test_a_state_of_two_arrays_is_sent_in_two():
    """With rows that are kept, the devices merge them in two sums: the largest, and the total."""
    mesh = mesh_of(1, 8)
    split, rows = shaped(8 * EACH, 3, mesh=mesh, spec=("d",)), shaped(ROWS, 3, mesh=mesh)
    kernel = auto_vmap(
        1, 1, reduce="logsumexp", reduce_axis=0, chunk_size=SIZE, devices=PartitionSpec("d")
    )(distance)
    with jax.set_mesh(mesh):
        program = compiled(lambda x, y: kernel(x[:, None], y), split, rows)
    assert (program.collectives, program.collectives_in_loops) == (2, 0)


@pytest.mark.parametrize("name", mostly_weekly(["map", "sum", "max", "keys"], ["map", "sum"]))
def test_lengths_that_the_devices_do_not_divide(name):
    for _, program in programs(mesh_of(1, 8), name, uneven=3):
        assert program.collectives_in_loops == 0
        assert program.temporaries < 64 * EACH * ROWS


def test_more_devices_need_no_more_memory_each():
    few, many = (dict(programs(mesh_of(hosts, 8), "sum")) for hosts in (1, 128))
    for mode, program in many.items():
        assert program.temporaries <= few[mode].temporaries + 2**14
