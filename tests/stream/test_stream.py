# SPDX-License-Identifier: MIT
"""Kernels on arrays that are read block by block, beside the same kernels called with NumPy's."""

import errno
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray
import zarr
from filelock import FileLock

import rankax.__main__
import rankax.stream
import stream_child
from helpers import assert_same, at_each_run, refusal, slow, weekly
from rankax import SplitKey, auto_vmap
from rankax.ext.blocks.on_streamed import STATES
from rankax.ext.blocks.programs import CONFIG
from rankax.reductions import BottomK, Fold, Moments
from rankax.stream import _job, _run

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 1, 3)).astype("float32")
Y = RNG.normal(size=(7, 3)).astype("float32")
M = RNG.normal(size=(300, 7, 3, 3)).astype("float32")


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """Let 300 items be 16 blocks of 19, not 100 of 3."""
    monkeypatch.setattr(_job, "_LEAST", 12)


class Recorded:
    """An array that counts its reads, and may fail."""

    def __init__(self, array, error=None, after=0):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.error, self.after, self.reads = error, after, []

    def __getitem__(self, region):
        self.reads.append(region)
        if self.error is not None and len(self.reads) > self.after:
            raise self.error
        return self.array[region]


def run(kernel, *args, **options):
    return rankax.stream.run(kernel, *args, **{"memory_limit": "5 MB", "progress": False} | options)


def values(tree):
    """What a run has stored, in memory."""
    assert all(isinstance(leaf, zarr.Array) for leaf in jax.tree.leaves(tree))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[...]), tree)


def mapped_file(tmp_path, array, name="x.npy"):
    np.save(tmp_path / name, array)
    return np.load(tmp_path / name, mmap_mode="r")


@auto_vmap(x=1, y=1, m=2, by=0)
def energy(x, y, m, by):
    return x @ m @ y * by, {"parts": x - y, "n": jnp.argmax(x)}


@auto_vmap(x=1, y=1)
def near(x, y):
    return jnp.sum((x - y) ** 2)


def test_outputs_of_all_kinds_of_sources_are_those_of_numpy(tmp_path):
    sources = mapped_file(tmp_path, X), zarr.array(Y, chunks=(3, 2)), Recorded(M), 2.0
    got = run(energy, *sources, out=tmp_path / "a.zarr")
    assert_same(values(got), energy(X, Y, M, 2.0))
    group = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert {name for name, _ in group.arrays()} == {"0"}
    assert {name for name, _ in group["1"].arrays()} == {"parts", "n"}
    assert got[0].shape == group["0"].shape == (300, 7)
    parts = xarray.open_zarr(tmp_path / "a.zarr", group="1", consolidated=False)["parts"]
    assert np.array_equal(parts, got[1]["parts"][...])
    # What is read is read in blocks, each of them once.
    sizes = [np.empty(M.shape, bool)[region].size for region in sources[2].reads[1:]]
    assert sum(sizes) == M.size
    assert len(sizes) == 16


def test_data_sets_of_hdf5(tmp_path, capsys):
    x = RNG.normal(size=(6000, 3)).astype("float32")
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.create_dataset("points/x", data=x, chunks=(60, 2))
    with h5py.File(tmp_path / "m.h5") as file:
        points = file["points/x"]
        (cuts,) = _job.prepared(near, (points, Y[0]), {}, "1 GB", "here", {}).stages
        got = run(near, points, Y[0], out=tmp_path / "a.zarr")
    assert cuts.block == (360,)  # of chunks of the source
    assert_same(values(got), near(x, Y[0]))
    inputs = (f"{name}={tmp_path / 'm.h5'}/points/x" for name in "xy")
    call = ["stream", KERNEL, "--out", tmp_path / "b.zarr", "--in", next(inputs), "--in", *inputs]
    assert shell(capsys, *call)[0] == 0
    assert np.array_equal(zarr.open_array(tmp_path / "b.zarr/sum")[...], 2 * x)


def test_hdf5_needs_h5py(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    call = ["stream", "stream_child:both", "--out", tmp_path / "b.zarr", "--in", "x=m.h5/x"]
    assert shell(capsys, *call) == (1, "m.h5/x needs h5py: pip install h5py\n")


def test_a_kernel_with_buckets(tmp_path):
    kernel = near.with_options(jit=True, bucket=True)
    assert_same(values(run(kernel, X, Y, out=tmp_path / "a.zarr")), near(X, Y))


def test_arrays_of_jax_and_numpy_keys_and_pytrees(tmp_path):
    @auto_vmap(pose=1, key=0)
    def moved(pose, key, name):
        assert name == "shift"
        return pose["a"] + pose["b"][0] * jax.random.normal(key)

    keys = jax.random.split(jax.random.key(0), 300)
    pose = {"a": jnp.asarray(X[:, 0]), "b": [X[:1, 0]]}
    got = run(moved, pose, keys, name="shift", out=tmp_path / "a.zarr")
    assert_same(values(got), moved(pose, keys, name="shift"))
    assert Path(got.store.root).name == "output"


def test_a_method_and_options_of_the_kernel(tmp_path):
    class Model:
        scale = 3.0

        @auto_vmap(x=1, chunk_size=2, jit=True)
        def near(self, x):
            return jnp.sum(x) * self.scale

    got = run(Model().near, X[:, 0], out=tmp_path / "a.zarr")
    assert_same(values(got), Model().near(X[:, 0]))


# The last items weigh most.
RECENT = Fold(
    (jnp.float32(1), jnp.float32(0)),
    lambda out: (jnp.float32(0.99), out),
    lambda f, g: (f[0] * g[0], f[1] * g[0] + g[1]),
)
REDUCTIONS = {
    "sum": ("sum", (0,)),
    "argmax": ("argmax", None),
    "top": (BottomK(3), (0, 1)),
    "moments": (Moments(), 1),
    "fold": (RECENT, None),
}


@pytest.mark.parametrize("name", [name if name == "fold" else slow(name) for name in REDUCTIONS])
def test_reductions_are_those_of_numpy(tmp_path, name):
    reduce, axis = REDUCTIONS[name]
    kernel = near.with_options(reduce=reduce, reduce_axis=axis)
    got = run(kernel, mapped_file(tmp_path, X), Y, out=tmp_path / "a.zarr")
    assert_same(values(got), jax.jit(kernel)(X, Y), rtol=1e-4)


def test_outputs_that_are_kept_beside_a_reduction(tmp_path):
    kernel = auto_vmap(x=1, y=1, reduce=("max", None))(lambda x, y: (x @ y, x - y))
    assert_same(values(run(kernel, X, Y, out=tmp_path / "a.zarr")), kernel(X, Y))


def test_reductions_and_maps_of_no_items(tmp_path):
    none = X[:0, 0]
    total = auto_vmap(1, reduce="sum")(jnp.sum)
    assert_same(values(run(total, none, out=tmp_path / "a.zarr")), total(none))
    each = auto_vmap(1)(jnp.sum)
    assert_same(values(run(each, none, out=tmp_path / "b.zarr")), each(none))


def test_blocks_follow_the_chunks_of_a_source(tmp_path, monkeypatch):
    monkeypatch.setattr(_job, "_LEAST", 100)
    tall = zarr.create_array(tmp_path / "t", shape=(1000, 1000), chunks=(10, 1000), dtype="f4")
    wide = zarr.create_array(tmp_path / "w", shape=(1000, 1000), chunks=(1000, 10), dtype="f4")
    each = auto_vmap(0)(jnp.tanh)

    def blocks(kernel, *args):
        return [cuts.block for cuts in _job.prepared(kernel, args, {}, "1 GB", "here", {}).stages]

    assert blocks(each, tall) == [(10, 1000)]
    assert blocks(each, wide) == [(1000, 10)]
    # About as many rows as columns, because each is read again for each block of the other.
    (rows, columns), *_ = blocks(near, np.ones((1000, 1, 3), "f4"), np.ones((1000, 3), "f4"))
    assert (rows, columns) == (63, 125)
    # Items in their order: only the first axis may be cut.
    ordered = near.with_options(reduce=RECENT)
    assert blocks(ordered, X[:2], np.ones((1000, 3), "f4"))[0] == (1, 1000)


def test_the_smallest_block_must_fit(tmp_path):
    x = np.ones((3, 1000), "f4")
    assert refusal(ValueError, run, near, x, x, out=tmp_path / "a", memory_limit="50 kB") == (
        "rankax.stream.run(near): the smallest block, of shape (1,), needs 32 kB in flight, more "
        "than half of memory_limit=50 kB; raise it to at least 64040 bytes"
    )
    assert not (tmp_path / "a").exists()


# Resume.


def files(store):
    """The contents of all files of numbers."""
    root = Path(store)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("c.*")}


def test_a_run_that_failed_goes_on_where_it_was(tmp_path):
    out = tmp_path / "a.zarr"
    source = Recorded(X, OSError("gone"), after=9)
    with pytest.raises(OSError, match="gone") as info:
        run(near, source, Y, out=out)
    (note,) = info.value.__notes__
    assert note == f"{out} keeps the blocks that are whole; the same call resumes"
    done = len(files(out))
    assert 4 < done < 10
    again, once, seen = Recorded(X), Recorded(Y), []
    got = run(near, again, once, out=out, progress=lambda *counts: seen.append(counts))
    assert_same(values(got), near(X, Y))
    assert len(again.reads) == 16 - done + 1  # one of them for the digest
    assert len(once.reads) == 1  # for the digest and all blocks
    assert (seen[0], seen[-1]) == ((0, 2100), (2100, 2100))
    assert seen[1][0] >= done * 19 * 7
    run(near, X, Y, out=tmp_path / "b.zarr")
    assert files(out) == files(tmp_path / "b.zarr")


def test_a_single_output_has_the_name_in_out(tmp_path):
    store = tmp_path / "a.zarr"
    want = near(X, Y)
    assert_same(values(run(near, X, Y, out=store / "deep/near")), want)
    assert_same(jnp.asarray(zarr.open_array(store / "deep/near", mode="r")[...]), want)
    assert_same(values(run(near, X, Y, out=store / "deep/near")), want)  # resumes
    with pytest.raises(ValueError, match="another call: name was deep/near and is far;"):
        run(near, X, Y, out=store / "far")
    both = rankax.auto_vmap(x=1)(lambda x: {"a": x[0], "b": x[1]})
    run(both, X[:, 0], out=tmp_path / "b.zarr/pair")
    assert {*zarr.open_group(tmp_path / "b.zarr/pair", mode="r").array_keys()} == {"a", "b"}


def test_a_store_inside_a_store_of_zarr_stays_one(tmp_path):
    inside = tmp_path / "a.zarr/inside"
    run(near, X, Y, out=tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", inside)
    assert_same(values(run(near, X, Y, out=inside)), near(X, Y))
    assert (inside / "output").is_dir()


def test_ctrl_c_leaves_a_store_that_resumes(tmp_path):
    source = Recorded(X, KeyboardInterrupt(), after=6)
    with pytest.raises(KeyboardInterrupt) as info:
        run(near, source, Y, out=tmp_path / "a.zarr")
    text = f"{tmp_path / 'a.zarr'} keeps the blocks that are whole; the same call resumes"
    assert str(info.value) == text
    assert info.value.__suppress_context__  # no traceback of JAX
    assert_same(values(run(near, X, Y, out=tmp_path / "a.zarr")), near(X, Y))


def test_a_full_disk_leaves_a_store_that_resumes(tmp_path, monkeypatch):
    out, flushed, lost, paths = tmp_path / "a.zarr", [], [], {}
    fsync, open_ = os.fsync, os.open

    def known(path, *args, **kwargs):
        handle = open_(path, *args, **kwargs)
        paths[handle] = Path(path)
        return handle

    def full(handle):
        flushed.append(handle)
        if len(flushed) > 20 and paths[handle].is_file():
            lost.append(paths[handle])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "open", known)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as info:
        run(near, X, Y, out=out)
    assert "the same call resumes" in info.value.__notes__[0]
    monkeypatch.setattr(os, "fsync", fsync)
    # What may not be on the disk is computed again.
    assert lost
    assert not any(path.exists() for path in lost)
    assert 0 < len(files(out)) < 10
    assert_same(values(run(near, X, Y, out=out)), near(X, Y))


def test_a_file_that_became_shorter_is_told(tmp_path):
    x = mapped_file(tmp_path, X)
    assert_same(values(run(near, x, Y, out=tmp_path / "a.zarr")), near(X, Y))
    os.truncate(tmp_path / "x.npy", 1000)
    assert refusal(OSError, run, near, x, Y, out=tmp_path / "b.zarr") == (
        "the file of x has 1000 bytes now, and had at least 3728"
    )
    short = Recorded(X)
    short.array = X[:100]
    with pytest.raises(OSError, match=r"but .* is expected"):
        run(near, short, Y, out=tmp_path / "c.zarr")


def told(out, kernel, *args):
    """Return what is said of NaN."""
    text = refusal(FloatingPointError, run, kernel, *args, out=out, on_nan="raise")
    begin, end = f"rankax.stream.run({kernel.__name__}): ", "; on_nan='keep' stores NaN"
    assert (text[: len(begin)], text[-len(end) :]) == (begin, end)
    return text[len(begin) : -len(end)]


def test_nan_is_told_with_its_indices(tmp_path):
    x = X.copy()
    x[200] = np.nan
    assert told(tmp_path / "a", near, x, Y) == (
        "output is NaN at the batch indices (200, 0), (200, 1), (200, 2), (200, 3), (200, 4), "
        "(200, 5), (200, 6)"
    )
    assert_same(values(run(near, x, Y, out=tmp_path / "a")), near(x, Y))
    x[201] = np.nan
    ten = ", ".join(str((200 + i // 7, i % 7)) for i in range(10))
    assert (
        told(tmp_path / "b", near, x, Y) == f"output is NaN at the batch indices {ten} and 4 more"
    )


NAN_IN_REDUCTIONS = {
    "sum": near.with_options(reduce="sum"),
    "one axis": near.with_options(reduce="logsumexp", reduce_axis=0, memory_limit="1 MB"),
    "the other": near.with_options(reduce="max", reduce_axis=1, progress=True),
    "compiled": near.with_options(reduce=Moments(), jit=True, bucket=True),
    "narrow": auto_vmap(x=1, y=1, reduce="argmax")(lambda x, y: jnp.sum(x - y).astype("bfloat16")),
}


@pytest.mark.parametrize("kernel", at_each_run(("narrow",), NAN_IN_REDUCTIONS))
def test_nan_in_a_reduction_is_told_with_its_indices(tmp_path, kernel):
    x = X.copy()
    x[200, 0, 1], x[203] = np.nan, np.inf
    ten = ", ".join(str((200 + i // 7 * 3, i % 7)) for i in range(10))
    said = f"what is reduced is not finite at the batch indices {ten} and 4 more"
    assert told(tmp_path, kernel, x, Y) == said


def test_items_that_do_not_count_are_not_told(tmp_path):
    @auto_vmap(x=1, y=1, reduce="sum", where="ok")
    def masked(x, y):
        return {"d": jnp.sum((x - y) ** 2), "ok": y[0] > x[0]}

    x = X.copy()
    x[200, 0, 0] = np.nan
    out = run(masked, x, Y, out=tmp_path / "a", on_nan="raise")
    assert_same(values(out), masked(x, Y), rtol=1e-4)
    x[204, 0] = -9, np.nan, 0
    first = ", ".join(str((204, i)) for i in range(7))
    said = f"what is reduced is not finite at the batch indices {first}"
    assert told(tmp_path / "b", masked, x, Y) == said


def test_a_block_that_becomes_nan_is_told(tmp_path):
    x = np.full(300, 1e30, np.float32)
    x[200] = 0
    said = "what is reduced is not finite at the batch indices [190:209]"
    assert told(tmp_path, auto_vmap(x=0, reduce="prod")(lambda x: 2 * x), x) == said


@pytest.mark.parametrize("kernel", [near, slow(near.with_options(reduce="sum", reduce_axis=0))])
@pytest.mark.parametrize(
    "damage", ["flip", slow("delete"), slow("shorten"), "zeros", slow("empty")]
)
def test_a_block_that_was_damaged_is_computed_again(tmp_path, kernel, damage):
    out = tmp_path / "a.zarr"
    run(kernel, X, Y, out=out)
    whole = files(out)
    name = sorted(whole)[len(whole) // 2]
    data = whole[name]
    (out / name).unlink()
    if damage != "delete":
        damaged = {
            "flip": data[:3] + bytes([data[3] ^ 1]) + data[4:],
            "shorten": data[:-5],
            "zeros": bytes(len(data)),
            "empty": b"",
        }
        (out / name).write_bytes(damaged[damage])
    source = Recorded(X)
    run(kernel, source, Y, out=out)
    assert files(out) == whole
    assert len(source.reads) == 2  # one of them for the digest


def test_a_reader_is_told_of_damage(tmp_path):
    got = run(near, X, Y, out=tmp_path / "a.zarr")
    name, data = max(files(tmp_path / "a.zarr").items())
    (tmp_path / "a.zarr" / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="checksum"):
        got[...]


@pytest.fixture(scope="module")
def processes():
    """Start processes that have imported JAX."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rankax.stream"])
    return context


@pytest.mark.slow
def test_a_run_killed_twenty_times_is_that_of_one_piece(tmp_path, monkeypatch, processes):
    monkeypatch.setattr(_job, "_LEAST", 100)  # as in the other processes

    def kill(kind):
        chance = random.Random(28)
        for _ in range(20):
            begun = processes.Event()
            process = processes.Process(
                target=stream_child.run_slowly, args=(kind, tmp_path / kind, begun)
            )
            process.start()
            assert begun.wait(120)
            time.sleep(chance.uniform(0, 0.12))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL  # it was not at its end

    with ThreadPoolExecutor() as threads:  # for they sleep most of the time
        list(threads.map(kill, stream_child.KERNELS))
    for kind, kernel in stream_child.KERNELS.items():
        assert 10 < len(files(tmp_path / kind)) < 250
        got = stream_child.run(kind, tmp_path / kind)
        stream_child.run(kind, tmp_path / f"{kind} at once")
        assert files(tmp_path / kind) == files(tmp_path / f"{kind} at once")
        x, y = stream_child.points()
        assert_same(values(got), kernel(x[:, None], y))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_store_that_exists_is_never_overwritten(tmp_path):
    out = tmp_path / "a.zarr"
    run(near, X, Y, out=out)
    assert refusal(FileExistsError, run, near, X, Y, out=out, resume=False) == (
        f"rankax.stream.run(near): {out} exists, and resume=False; give another out"
    )
    assert refusal(FileExistsError, run, near, X, Y, out=tmp_path) == (
        f"rankax.stream.run(near): {tmp_path} exists, and it is not a store of rankax.stream; give "
        "another out"
    )
    (tmp_path / "file").touch()
    assert refusal(FileExistsError, run, near, X, Y, out=tmp_path / "file") == (
        f"rankax.stream.run(near): {tmp_path / 'file'} exists, and it is not a store of "
        "rankax.stream; give another out"
    )
    zarr.create_group(tmp_path / "other.zarr")
    with pytest.raises(FileExistsError, match="not a store of"):
        run(near, X, Y, out=tmp_path / "other.zarr")


def test_a_resume_that_differs_says_in_what(tmp_path):
    out = tmp_path / "a.zarr"
    kernels = [
        auto_vmap(x=1, y=1)(lambda x, y, weight=weight: jnp.sum(x * y * weight))
        for weight in (jnp.arange(3.0), jnp.ones(3))
    ]
    run(kernels[0], X, Y, out=out)
    other = X.copy()
    other[17, 0, 2] = 5

    def different(*args, **options):
        text = refusal(ValueError, run, *args, out=out, **options)
        begin = "rankax.stream.run(<lambda>): out was written by another call: "
        assert text.startswith(begin)
        assert text.endswith("; repeat that call, or give another out")
        return [part.split(" was ")[0] for part in text.removeprefix(begin).split("; ")[:-1]]

    assert different(kernels[0], other, Y) == ["x"]
    assert different(kernels[0], X[:20], Y) == ["blocks", "x"]
    assert different(kernels[0].with_options(chunk_size=5), X, Y) == ["options: chunk_size"]
    assert different(kernels[0], X, Y, memory_limit="6 MB") == ["memory_limit"]
    assert different(kernels[0].with_options(reduce="sum"), X, Y) == [
        "blocks",
        "options: reduce",
        "program",
    ]
    # The constants of a kernel count, too, and so does its name.
    assert different(kernels[1], X, Y) == ["program"]
    assert "kernel was <lambda> and is near" in refusal(ValueError, run, near, X, Y, out=out)


def test_two_folds_of_one_name_are_two_programs(tmp_path):
    ends = [Fold(jnp.float32(0), jnp.abs, by) for by in (jnp.minimum, jnp.maximum)]
    kernels = [near.with_options(reduce=fold) for fold in ends]
    run(kernels[0], X, Y, out=tmp_path / "a.zarr")
    with pytest.raises(ValueError, match="call: program was"):
        run(kernels[1], X, Y, out=tmp_path / "a.zarr")


def test_a_second_run_on_one_store_is_told(tmp_path):
    out = tmp_path / "a.zarr"
    run(near, X, Y, out=out)
    with FileLock(out / STATES / "lock"):
        assert refusal(BlockingIOError, run, near, X, Y, out=out) == (
            f"rankax.stream.run(near): another process is writing to {out}; wait for it, or give "
            "another out"
        )
    run(near, X, Y, out=out)


def test_of_two_runs_that_begin_at_once_one_is_told(tmp_path, monkeypatch):
    out, prepared = tmp_path / "a.zarr", _run.prepared

    def late(*args):
        monkeypatch.setattr(_run, "prepared", prepared)
        run(near, X, Y, out=out)
        return prepared(*args)

    monkeypatch.setattr(_run, "prepared", late)
    with pytest.raises(BlockingIOError, match="another process is writing to"):
        run(near.with_options(chunk_size=5), X, Y, out=out)


# What is refused.


def test_what_cannot_be_streamed_is_refused(tmp_path):
    out = tmp_path / "a.zarr"
    where = "rankax.stream.run(near): "
    assert refusal(TypeError, run, jnp.sum, X, out=out) == (
        "rankax.stream.run(sum): kernel must be decorated with rankax.auto_vmap"
    )
    assert refusal(TypeError, run, X, near, out=out) == (
        "rankax.stream.run(ndarray): kernel must be decorated with rankax.auto_vmap"
    )
    assert refusal(ValueError, run, near, X, Y, out=out, on_nan="stop") == (
        where + "on_nan must be 'keep' or 'raise', got 'stop'"
    )
    assert refusal(TypeError, run, near, X, Y, out=out, memory_limit=None) == (
        where + "memory_limit must not be None; it sets the size of blocks"
    )
    assert refusal(TypeError, run, auto_vmap(x=1)(lambda x: x), "stars.npy", out=out) == (
        "rankax.stream.run(<lambda>): no argument with a rank is an array with axes; x is str"
    )
    narrow = auto_vmap(1)(lambda x: x.astype(jnp.bfloat16))
    assert refusal(TypeError, run, narrow, X, out=out) == (
        "rankax.stream.run(<lambda>): output has dtype bfloat16, which zarr does not store; return "
        "another one, such as .astype(jnp.float32)"
    )
    assert refusal(TypeError, run, near, zarr.array(X.astype("float64")), Y, out=out) == (
        "near(): x is a streamed array of dtype float64, but JAX computes with float32 by default, "
        'which would silently lose digits; call jax.config.update("jax_enable_x64", True) first, '
        "or convert x to float32"
    )
    noise = auto_vmap(x=1, key=SplitKey)(lambda x, key: x[0] * jax.random.normal(key))
    assert refusal(TypeError, run, noise, X, jax.random.key(0), out=out) == (
        "<lambda>(): key has the rank SplitKey, but rankax.stream evaluates block by block, and "
        "each block would count its items from 0 and draw the same numbers; pass a key for each "
        "item: jax.random.split(key, (300, 1))"
    )
    wide = near.with_options(batch_shape=(300, 7))
    assert refusal(TypeError, run, wide, X, Y, out=out) == (
        "near(): batch_shape=(300, 7) has no chunks, by which rankax.stream would evaluate it; "
        "pass a streamed array that has these axes, and near.with_options(batch_shape=None)"
    )
    twice = auto_vmap(1)(lambda x: {"a/b": x, "a": {"b": x}})
    assert refusal(ValueError, run, twice, X, out=out) == (
        "rankax.stream.run(<lambda>): two outputs would be stored as one array; rename their keys"
    )
    with pytest.raises(rankax.CoreDimensionError):
        run(auto_vmap(x="n", y="n")(lambda x, y: x @ y), X, Y[:, :2], out=out)
    assert not out.exists()


def test_pickles_are_not_read(tmp_path, capsys):
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    zarr.create_array(tmp_path / "z", shape=(3, 3), chunks=(3, 3), dtype="f4", zarr_format=2)
    file = tmp_path / "z" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), "compressor": {"id": "pickle"}}))
    for name, words in (("o.npy", "Python objects in dtype"), ("z", "pickle")):
        status, text = shell(
            capsys, "stream", KERNEL, "--out", tmp_path / "a", "--in", f"x={tmp_path / name}"
        )
        assert status == 1
        assert words in text


# Memory and devices.


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read on Linux")
@pytest.mark.parametrize("limit", [20_000_000, weekly(100_000_000)])
def test_memory_stays_within_the_limit_on_ten_times_as_much(tmp_path, limit):
    shape = (10 * limit // 4000, 1000)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype="float32", shape=shape)
    for i in range(0, len(x), 5000):
        x[i : i + 5000] = RNG.random((5000, 1000), "float32")
    del x
    args = [stream_child.__file__, tmp_path / "x.npy", tmp_path / "a.zarr", str(limit)]
    peak = int(subprocess.check_output([sys.executable, *args]))
    assert peak < limit + 30_000_000  # as the docstring says


def test_what_is_in_memory_only_is_read_from_there(tmp_path):
    """A scalar of zarr, and a mapped file with changes of this process."""
    scale = zarr.open_array(tmp_path / "s.zarr", mode="w", shape=(), dtype="float32")
    scale[...] = 3
    np.save(tmp_path / "x.npy", X[:, 0])
    x = np.load(tmp_path / "x.npy", mmap_mode="c")
    x[7] = 5
    kernel = auto_vmap(x=1, s=0)(lambda x, s: s * x)
    assert_same(values(run(kernel, x, scale, out=tmp_path / "a.zarr")), kernel(x, np.float32(3)))


def test_copies_of_a_mapped_file_are_in_memory(tmp_path):
    x = mapped_file(tmp_path, X[:, 0])
    each = auto_vmap(x=1)(lambda x: 2 * x)
    copies = x.copy(), x.astype("float16"), x + 1, x.copy()[3:], x[::2], np.asarray(x)[::-1]
    for i, array in enumerate(copies):
        got = run(each, array, out=tmp_path / f"{i}.zarr")
        assert_same(values(got), each(np.asarray(array)))


def test_arrays_in_the_other_byte_order(tmp_path):
    swapped = X[:, 0].astype(">f4")
    each = auto_vmap(x=1)(lambda x: 2 * x)
    for i, array in enumerate((swapped, mapped_file(tmp_path, swapped))):
        assert_same(values(run(each, array, out=tmp_path / f"{i}.zarr")), each(X[:, 0]))


def test_arrays_of_64_bits_are_refused_wherever_they_are(tmp_path):
    wide, ints = X[:, 0].astype("float64"), np.arange(300)
    scale = zarr.open_array(tmp_path / "s.zarr", mode="w", shape=(), dtype="float64")
    kernel = auto_vmap(x=1, s=0)(lambda x, s: s * x)
    mapped = mapped_file(tmp_path, wide)
    narrow = X[:, 0]
    for x, s, name in [
        *((wide, 2.0, "x"), (mapped, 2.0, "x"), (zarr.array(wide), 2.0, "x")),
        *((mapped.copy(), 2.0, "x"), (wide.astype(">f8"), 2.0, "x"), (narrow, wide[:, 0], "s")),
        *((narrow, scale, "s"), (narrow, np.array(2.0), "s"), (narrow, ints, "s")),
    ]:
        text = refusal(TypeError, run, kernel, x, s, out=tmp_path / "a.zarr")
        bits = "int64" if s is ints else "float64"
        assert text == (
            f"<lambda>(): {name} is a streamed array of dtype {bits}, but JAX computes with "
            f"{bits[:-2]}32 by default, which would silently lose digits; call "
            f'jax.config.update("jax_enable_x64", True) first, or convert {name} to {bits[:-2]}32'
        )
    assert not (tmp_path / "a.zarr").exists()
    with CONFIG["jax_enable_x64"](True):
        got = run(kernel, wide, 0.1, out=tmp_path / "b.zarr")
        assert np.array_equal(got[...], 0.1 * wide)
    # A number is a number.
    got = run(kernel, narrow, np.float64(2), out=tmp_path / "c.zarr")
    assert_same(values(got), 2 * jnp.asarray(narrow))


def test_masks_are_not_dropped(tmp_path):
    each = auto_vmap(x=1)(lambda x: 2 * x)
    masked = np.ma.masked_array(X[:, 0], X[:, 0] > 2)
    assert refusal(TypeError, run, each, masked, out=tmp_path / "a.zarr") == (
        "rankax.stream.run(<lambda>): x is a masked array, whose mask would be lost; pass "
        "x.filled(...) and the mask as an argument of its own"
    )
    assert not (tmp_path / "a.zarr").exists()
    # A file may make them of missing values, block by block.
    assert refusal(TypeError, run, each, Recorded(masked), out=tmp_path / "b.zarr") == (
        "x has a block with masked items, whose mask would be lost"
    )
    whole = Recorded(np.ma.masked_array(X[:, 0], mask=False))
    assert_same(values(run(each, whole, out=tmp_path / "c.zarr")), each(X[:, 0]))


@pytest.mark.parametrize("out", ["s3://bucket/a.zarr", Path("s3://bucket/a.zarr"), "file:///a"])
def test_a_url_is_no_folder(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    assert refusal(ValueError, run, near, X, Y, out=out) == (
        f"rankax.stream.run(near): out must be a folder on a local disk, but it is {str(out)!r}; "
        "write to a local folder, and copy the finished store there"
    )
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_was_writing_is_deleted(tmp_path):
    out = tmp_path / "a.zarr"
    run(near, X, Y, out=out)
    half = out / "output" / "0.partial"
    half.parent.mkdir(exist_ok=True)
    half.touch()
    run(near, X, Y, out=out)
    assert not half.exists()


def test_without_its_packages_it_is_said_how_to_install_them(monkeypatch):
    monkeypatch.delitem(sys.modules, "rankax.stream")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert refusal(ImportError, importlib.import_module, "rankax.stream") == (
        "rankax.stream needs filelock, tqdm and zarr: pip install filelock tqdm zarr"
    )


@pytest.mark.slow
def test_devices_share_each_block(tmp_path):
    code = f"""
import jax, numpy as np, rankax.stream
from rankax import SplitKey, auto_vmap
x = np.ones((1000, 3), "float32")
kernel = auto_vmap(1, chunk_size=2, devices=2)(lambda x: x @ x)
got = rankax.stream.run(kernel, x, out={str(tmp_path / "a.zarr")!r}, progress=False)
assert np.array_equal(got[...], kernel(x))
total = kernel.with_options(reduce="sum")
got = rankax.stream.run(total, x, out={str(tmp_path / "b.zarr")!r}, progress=False)
assert got[...] == 3000, got[...]
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


# The shell command.


def shell(capsys, *arguments):
    """The exit status of a command, and what it writes."""
    status = rankax.__main__.main([str(argument) for argument in arguments])
    written = capsys.readouterr()
    return status, written.out + written.err


KERNEL = "stream_child:both"


def test_the_command_streams_and_resumes(tmp_path, capsys):
    x, y = stream_child.points()
    np.save(tmp_path / "x.npy", x[:, None])
    zarr.save_array(tmp_path / "s.zarr" / "y", y)
    call = [
        *(
            "stream",
            KERNEL,
            "--in",
            f"x={tmp_path / 'x.npy'}",
            "--in",
            f"y={tmp_path / 's.zarr/y'}",
        ),
        *("--out", tmp_path / "a.zarr", "--memory-limit", "20MB"),
    ]
    status, text = shell(capsys, *call, "--plan")
    assert status == 0
    assert text == (
        "both: memory limit 20 MB\n"
        "  16 blocks of (63, 5) over (1000, 5): each reads 816 B and writes 5.04 kB; "
        "28.5 kB in flight\n"
        "    distance  (1000, 5)  float32\n"
        "    sum  (1000, 5, 3)  float32\n"
    )
    assert not (tmp_path / "a.zarr").exists()
    status, text = shell(capsys, *call)
    assert status == 0
    assert "both" in text
    assert "items/s" in text
    for line in (
        f'zarr.open_array("{tmp_path / "a.zarr"}/distance")  (1000, 5)  float32',
        f'zarr.open_array("{tmp_path / "a.zarr"}/sum")  (1000, 5, 3)  float32',
    ):
        assert line in text.splitlines()
    stored = zarr.open_group(tmp_path / "a.zarr", mode="r")
    want = stream_child.both(x[:, None], y)
    assert_same({name: jnp.asarray(stored[name][...]) for name in want}, want)
    status, text = shell(capsys, *call)
    assert status == 1
    assert text == (
        f"rankax.stream.run(both): {tmp_path / 'a.zarr'} exists, and resume=False; give another "
        "out\n"
    )
    assert shell(capsys, *call, "--resume")[0] == 0


def test_the_command_plans(capsys):
    status, text = shell(capsys, "plan", KERNEL, "x=1000x1x3", "y=5000x3:int32")
    assert status == 0
    assert text.startswith("both: batch shape (1000, 5000), 5000000 evaluations")


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    call = ["stream", KERNEL, "--out", tmp_path / "a.zarr", "--in"]
    with pytest.raises(SystemExit, match="2"):
        shell(capsys, *call, "x")
    assert "argument --in: x must be NAME=VALUE, NAME being a parameter" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        shell(capsys, "plan", KERNEL, "x=3yx")
    assert "argument NAME=SHAPE: invalid _shape value: 'x=3yx'" in capsys.readouterr().err
    assert shell(capsys, "plan", "math:sin") == (
        *(1, "math:sin must be MODULE:KERNEL, decorated with rankax.auto_vmap\n"),
    )
    assert shell(capsys, "plan", "stream_child", "x=3") == (
        *(1, "stream_child must be MODULE:KERNEL, decorated with rankax.auto_vmap\n"),
    )


@pytest.mark.parametrize("command", ["stream", "plan"])
def test_help_is_a_page(capsys, command):
    with pytest.raises(SystemExit):
        rankax.__main__.main([command, "--help"])
    text = capsys.readouterr().out
    assert f"\n  python -m rankax {command} sky.kernels:distance" in text
    assert max(map(len, text.splitlines())) <= 100
