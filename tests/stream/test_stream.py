# SPDX-License-Identifier: MIT
"""Kernels on arrays that are read block by block, beside the same kernels called with NumPy's."""

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
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
from helpers import assert_same, refusal, slow, weekly
from rankax import SplitKey, auto_vmap
from rankax.ext.blocks.programs import CONFIG
from rankax.ext.progress import Progress
from rankax.reductions import Fold
from rankax.stream import _job, _run
from rankax.stream._stages import STATES
from stream_child import Recorded, values

pytestmark = pytest.mark.usefixtures("few_blocks")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 1, 3)).astype("float32")
Y = RNG.normal(size=(7, 3)).astype("float32")
M = RNG.normal(size=(300, 7, 3, 3)).astype("float32")


def run(kernel, *args, **options):
    return rankax.stream.run(kernel, *args, **{"memory_limit": "5 MB", "progress": False} | options)


def mapped_file(tmp_path, array, name="x.npy"):
    np.save(tmp_path / name, array)
    return np.load(tmp_path / name, mmap_mode="r")


@auto_vmap(x=1, y=1, m=2, by=0)
def energy(x, y, m, by):
    return x @ m @ y * by, {"parts": x - y, "n": jnp.argmax(x)}


@auto_vmap(x=1, y=1)
def near(x, y):
    return jnp.sum((x - y) ** 2)


def test_outputs_of_all_kinds_of_sources_are_those_of_numpy(tmp_path, out):
    sources = mapped_file(tmp_path, X), zarr.array(Y, chunks=(3, 2)), Recorded(M), 2.0
    got = run(energy, *sources, out=out)
    assert_same(values(got), energy(X, Y, M, 2.0))
    group = zarr.open_group(out, mode="r")
    assert {name for name, _ in group.arrays()} == {"0"}
    assert {name for name, _ in group["1"].arrays()} == {"parts", "n"}
    assert got[0].shape == group["0"].shape == (300, 7)
    parts = xarray.open_zarr(out, group="1", consolidated=False)["parts"]
    assert np.array_equal(parts, got[1]["parts"][...])
    # What is read is read in blocks, each of them once.
    sizes = [np.empty(M.shape, bool)[region].size for region in sources[2].reads[1:]]
    assert sum(sizes) == M.size
    assert len(sizes) == 16


def test_data_sets_of_hdf5(tmp_path, out, capsys):
    x = RNG.normal(size=(6000, 3)).astype("float32")
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.create_dataset("points/x", data=x, chunks=(60, 2))
    with h5py.File(tmp_path / "m.h5") as file:
        points = file["points/x"]
        (stage,) = _job.prepared(near, (points, Y[0]), {}, "1 GB", "here", {}).stages
        got = run(near, points, Y[0], out=out)
    assert stage.block == (360,)  # of chunks of the source
    assert_same(values(got), near(x, Y[0]))
    inputs = (f"{name}={tmp_path / 'm.h5'}/points/x" for name in "xy")
    call = ["stream", KERNEL, "--out", tmp_path / "b.zarr", "--in", next(inputs), "--in", *inputs]
    assert shell(capsys, *call)[0] == 0
    assert np.array_equal(zarr.open_array(tmp_path / "b.zarr/sum")[...], 2 * x)


def test_hdf5_needs_h5py(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    Path("m.h5").touch()
    call = ["stream", "stream_child:both", "--out", tmp_path / "b.zarr", "--in", "x=m.h5/x"]
    assert shell(capsys, *call) == (1, "m.h5/x needs h5py: pip install h5py\n")


def test_arrays_of_jax_and_numpy_keys_and_pytrees(out):
    @auto_vmap(pose=1, key=0)
    def moved(pose, key, name):
        assert name == "shift"
        return pose["a"] + pose["b"][0] * jax.random.normal(key)

    keys = jax.random.split(jax.random.key(0), 300)
    pose = {"a": jnp.asarray(X[:, 0]), "b": [X[:1, 0]]}
    got = run(moved, pose, keys, name="shift", out=out)
    assert_same(values(got), moved(pose, keys, name="shift"))
    assert Path(got.store.root).name == "output"


# The last items weigh most.
RECENT = Fold(
    (jnp.float32(1), jnp.float32(0)),
    lambda out: (jnp.float32(0.99), out),
    lambda f, g: (f[0] * g[0], f[1] * g[0] + g[1]),
)


def test_reductions_are_those_of_numpy(tmp_path, out):
    kernel = near.with_options(reduce=RECENT)
    got = run(kernel, mapped_file(tmp_path, X), Y, out=out)
    assert_same(values(got), jax.jit(kernel)(X, Y), rtol=1e-4)


def test_reductions_and_maps_of_no_items(tmp_path, out):
    none = X[:0, 0]
    total = auto_vmap(1, reduce="sum")(jnp.sum)
    assert_same(values(run(total, none, out=out)), total(none))
    each = auto_vmap(1)(jnp.sum)
    assert_same(values(run(each, none, out=tmp_path / "b.zarr")), each(none))


def test_blocks_follow_the_chunks_of_a_source(tmp_path, monkeypatch):
    monkeypatch.setattr(_job, "_LEAST", 100)
    tall = zarr.create_array(tmp_path / "t", shape=(1000, 1000), chunks=(10, 1000), dtype="f4")
    wide = zarr.create_array(tmp_path / "w", shape=(1000, 1000), chunks=(1000, 10), dtype="f4")
    each = auto_vmap(0)(jnp.tanh)

    def blocks(kernel, *args):
        return [stage.block for stage in _job.prepared(kernel, args, {}, "1 GB", "here", {}).stages]

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
    """The contents of all files of numbers, without those that are being written."""
    whole = (path for path in store.rglob("c.*") if path.suffix != ".partial")
    return {str(path.relative_to(store)): path.read_bytes() for path in whole}


def test_a_run_that_failed_goes_on_where_it_was(tmp_path, out):
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


def test_a_single_output_has_the_name_in_out(tmp_path, out):
    store = out
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


def test_ctrl_c_leaves_a_store_that_resumes(out):
    source = Recorded(X, KeyboardInterrupt(), after=6)
    with pytest.raises(KeyboardInterrupt) as info:
        run(near, source, Y, out=out)
    assert str(info.value) == f"{out} keeps the blocks that are whole; the same call resumes"
    assert info.value.__suppress_context__  # no traceback of JAX
    assert_same(values(run(near, X, Y, out=out)), near(X, Y))


def test_a_full_disk_leaves_a_store_that_resumes(out, monkeypatch):
    monkeypatch.setattr(_run, "_MOST_HELD", 0)  # each block is written by itself
    flush, lost = _run.flush, []

    def fsync(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:

        def full(written):
            if len(files(out)) > 4:
                patch.setattr(os, "fsync", fsync)
                lost.extend(written)
            flush(written)

        patch.setattr(_run, "flush", full)
        with pytest.raises(OSError, match="No space left on device") as info:
            run(near, X, Y, out=out)
    assert "the same call resumes" in info.value.__notes__[0]
    # What may not be on the disk is computed again.
    assert lost
    assert not any(path.exists() for path in lost)
    assert 0 < len(files(out)) < 10
    assert_same(values(run(near, X, Y, out=out)), near(X, Y))


@pytest.mark.parametrize("seconds", [1e9, slow(-1)])
@pytest.mark.parametrize(
    ("shape", "reduce", "stages"),
    [
        ((303, 3), None, 1),
        ((303, 3), "sum", 2),
        slow((303, 2, 3), "sum", 2),
        slow((2, 303, 3), "logsumexp", 2),
        slow((1, 303, 3), ("max", None), 3),
    ],
)
def test_small_blocks_are_written_together(out, monkeypatch, seconds, shape, reduce, stages):
    kernel = auto_vmap(x=1, reduce=reduce, reduce_axis=reduce and -1)(
        lambda x: (jnp.sum(x), x) if isinstance(reduce, tuple) else x
    )
    x, batches, write = RNG.normal(size=shape).astype("float32"), [], _run.write

    def noted(stage, batch):
        batches.append(len(batch))
        return write(stage, batch)

    monkeypatch.setattr(_run, "_SECONDS", seconds)
    monkeypatch.setattr(_run, "write", noted)
    assert_same(values(run(kernel, x, out=out)), jax.jit(kernel)(x), rtol=1e-4, atol=1e-4)
    assert sum(batches) > 10
    assert len(batches) == (stages if seconds > 0 else sum(batches))


def test_a_file_that_became_shorter_is_told(tmp_path, out):
    x = mapped_file(tmp_path, X)
    assert_same(values(run(near, x, Y, out=out)), near(X, Y))
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
    seven = ", ".join(str((200, i)) for i in range(7))
    assert told(tmp_path / "a", near, x, Y) == f"output is NaN at the batch indices {seven}"
    assert_same(values(run(near, x, Y, out=tmp_path / "a")), near(x, Y))
    x[201] = np.nan
    ten = ", ".join(str((200 + i // 7, i % 7)) for i in range(10))
    said = f"output is NaN at the batch indices {ten} and 4 more"
    assert told(tmp_path / "b", near, x, Y) == said


in_parts = near.with_options(reduce="logsumexp", reduce_axis=0, memory_limit="1 MB")
narrow = auto_vmap(x=1, y=1, reduce="argmax")(lambda x, y: jnp.sum(x - y).astype("bfloat16"))


@pytest.mark.parametrize("kernel", [narrow, slow(in_parts)])
def test_nan_in_a_reduction_is_told_with_its_indices(tmp_path, kernel):
    x = X.copy()
    x[200, 0, 1], x[203] = np.nan, np.inf
    ten = ", ".join(str((200 + i // 7 * 3, i % 7)) for i in range(10))
    said = f"what is reduced is not finite at the batch indices {ten} and 4 more"
    assert told(tmp_path, kernel, x, Y) == said


def test_a_block_that_becomes_nan_is_told(tmp_path):
    x = np.full(300, 1e30, np.float32)
    x[200] = 0
    said = "what is reduced is not finite at the batch indices [190:209]"
    assert told(tmp_path, auto_vmap(x=0, reduce="prod")(lambda x: 2 * x), x) == said


DAMAGE = {
    "flip": lambda data: data[:3] + bytes([data[3] ^ 1]) + data[4:],
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "delete": None,
}


@pytest.mark.parametrize(
    ("kernel", "damage"),
    [
        *((near, "flip"), (near, "zeros"), slow(near, "empty"), slow(near, "delete")),
        slow(near.with_options(reduce="sum", reduce_axis=0), "flip"),
    ],
)
def test_a_block_that_was_damaged_is_computed_again(out, kernel, damage):
    run(kernel, X, Y, out=out)
    whole = files(out)
    name = sorted(whole)[len(whole) // 2]
    (out / name).unlink()
    if damaged := DAMAGE[damage]:
        (out / name).write_bytes(damaged(whole[name]))
    source = Recorded(X)
    run(kernel, source, Y, out=out)
    assert files(out) == whole
    assert len(source.reads) == 2  # one of them for the digest


def test_a_reader_is_told_of_damage(out):
    got = run(near, X, Y, out=out)
    name, data = max(files(out).items())
    (out / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="checksum"):
        got[...]


def test_a_store_that_exists_is_never_overwritten(tmp_path, out):
    run(near, X, Y, out=out)
    assert refusal(FileExistsError, run, near, X, Y, out=out, resume=False) == (
        f"rankax.stream.run(near): {out} exists, and resume=False; give another out"
    )
    (tmp_path / "file").touch()
    zarr.create_group(tmp_path / "other.zarr")
    for other in (tmp_path, tmp_path / "file", tmp_path / "other.zarr"):
        assert refusal(FileExistsError, run, near, X, Y, out=other) == (
            f"rankax.stream.run(near): {other} exists, and it is not a store of rankax.stream; "
            "give another out"
        )


def test_a_resume_that_differs_says_in_what(out):
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
    # The constants of a kernel count, too, and so does its name.
    assert different(kernels[1], X, Y) == ["program"]
    assert "kernel was <lambda> and is near" in refusal(ValueError, run, near, X, Y, out=out)


def test_a_second_run_on_one_store_is_told(out):
    run(near, X, Y, out=out)
    with FileLock(out / STATES / "lock"):
        assert refusal(BlockingIOError, run, near, X, Y, out=out) == (
            f"rankax.stream.run(near): another process is writing to {out}; wait for it, or give "
            "another out"
        )
    run(near, X, Y, out=out)


def test_of_two_runs_that_begin_at_once_one_is_told(out, monkeypatch):
    prepared = _run.prepared

    def late(*args):
        monkeypatch.setattr(_run, "prepared", prepared)
        run(near, X, Y, out=out)
        return prepared(*args)

    monkeypatch.setattr(_run, "prepared", late)
    with pytest.raises(BlockingIOError, match="another process is writing to"):
        run(near.with_options(chunk_size=5), X, Y, out=out)


# What is refused.


def doubled(x):
    return 2 * x


def test_what_cannot_be_streamed_is_refused(out):
    def said(*args, **options):
        return refusal((TypeError, ValueError), run, *args, out=out, **options)

    assert "run(ndarray): kernel must be decorated with rankax.auto_vmap" in said(X, near)
    assert "on_nan must be 'keep' or 'raise', got 'stop'" in said(near, X, Y, on_nan="stop")
    observer = Progress("pull")
    words = "an observer is told of the steps of a loop, got Progress"
    assert words in said(near, X, Y, progress=observer)
    assert "must not be None; it sets the size of blocks" in said(near, X, Y, memory_limit=None)
    strings = auto_vmap(x=1)(doubled), "stars.npy"
    assert "no argument with a rank is an array with axes; x is str" in said(*strings)
    narrow = auto_vmap(1)(lambda x: x.astype(jnp.bfloat16))
    assert "output has dtype bfloat16, which zarr does not store; return" in said(narrow, X)
    noise = auto_vmap(x=1, key=SplitKey)(lambda x, key: x[0] * jax.random.normal(key))
    text = said(noise, X, jax.random.key(0))
    assert "key has the rank SplitKey, but rankax.stream evaluates block by block, and" in text
    assert "pass a key for each item: jax.random.split(key, (300, 1))" in text
    text = said(near.with_options(batch_shape=(300, 7)), X, Y)
    assert text.startswith("near(): batch_shape=(300, 7) has no chunks, by which rankax.stream")
    twice = auto_vmap(1)(lambda x: {"a/b": x, "a": {"b": x}})
    assert "two outputs would be stored as one array; rename their keys" in said(twice, X)
    with pytest.raises(rankax.CoreDimensionError):
        run(auto_vmap(x="n", y="n")(lambda x, y: x @ y), X, Y[:, :2], out=out)
    assert not out.exists()


def test_pickles_are_not_read(tmp_path, capsys):
    np.save(tmp_path / "o.npy", np.array([{}], object), allow_pickle=True)
    zarr.create_array(tmp_path / "z", shape=(3, 3), chunks=(3, 3), dtype="f4", zarr_format=2)
    file = tmp_path / "z" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), "compressor": {"id": "pickle"}}))
    for name, words in (("o.npy", "or it has Python objects"), ("z", "pickle")):
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
def test_memory_stays_within_the_limit_on_ten_times_as_much(tmp_path, out, limit):
    shape = (10 * limit // 4000, 1000)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype="float32", shape=shape)
    for i in range(0, len(x), 5000):
        x[i : i + 5000] = RNG.random((5000, 1000), "float32")
    del x
    args = [stream_child.__file__, tmp_path / "x.npy", out, str(limit)]
    peak = int(subprocess.check_output([sys.executable, *args]))
    assert peak < limit + 30_000_000  # as the docstring says


def test_what_is_in_memory_only_is_read_from_there(tmp_path, out):
    """A scalar of zarr, and a mapped file with changes of this process."""
    scale = zarr.open_array(tmp_path / "s.zarr", mode="w", shape=(), dtype="float32")
    scale[...] = 3
    np.save(tmp_path / "x.npy", X[:, 0])
    x = np.load(tmp_path / "x.npy", mmap_mode="c")
    x[7] = 5
    kernel = auto_vmap(x=1, s=0)(lambda x, s: s * x)
    assert_same(values(run(kernel, x, scale, out=out)), kernel(x, np.float32(3)))


ARRAYS = {
    "the file": lambda x: x,
    "a copy": lambda x: x.copy(),
    "a part of a copy": lambda x: x.copy()[3:],
    "backwards": lambda x: np.asarray(x)[::-2],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_a_mapped_file_in_the_other_byte_order(tmp_path, out, name):
    array = ARRAYS[name](mapped_file(tmp_path, X[:, 0].astype(">f4")))
    got = run(auto_vmap(1)(doubled), array, out=out)
    assert_same(values(got), jnp.asarray(2 * np.asarray(array, "float32")))


def test_arrays_of_64_bits_are_refused_wherever_they_are(tmp_path, out):
    wide, narrow, ints = X[:, 0].astype("float64"), X[:, 0], np.arange(300)
    scale = zarr.open_array(tmp_path / "s.zarr", mode="w", shape=(), dtype="float64")
    kernel = auto_vmap(x=1, s=0)(lambda x, s: s * x)
    for x, s, text in [
        *((mapped_file(tmp_path, wide), 2.0, "x float64"), (wide.astype(">f8"), 2.0, "x float64")),
        *((narrow, scale, "s float64"), (narrow, ints, "s int64")),
    ]:
        name, dtype = text.split()
        narrower = f"{dtype[:-2]}32"
        assert refusal(TypeError, run, kernel, x, s, out=out) == (
            f"<lambda>(): {name} is a streamed array of dtype {dtype}, but JAX computes with "
            f"{narrower} by default, which would silently lose digits; call "
            f'jax.config.update("jax_enable_x64", True) first, or convert {name} to {narrower}'
        )
    with CONFIG["jax_enable_x64"](True):
        got = run(kernel, wide, 0.1, out=tmp_path / "b.zarr")
        assert np.array_equal(got[...], 0.1 * wide)
    # A number is a number.
    got = run(kernel, narrow, np.float64(2), out=tmp_path / "c.zarr")
    assert_same(values(got), 2 * jnp.asarray(narrow))


def test_masks_are_not_dropped(tmp_path, out):
    each = auto_vmap(x=1)(doubled)
    masked = np.ma.masked_array(X[:, 0], X[:, 0] > 2)
    assert refusal(TypeError, run, each, masked, out=out) == (
        "rankax.stream.run(doubled): x is a masked array, whose mask would be lost; pass "
        "x.filled(...) and the mask as an argument of its own"
    )
    assert not out.exists()
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


def test_what_a_killed_process_was_writing_is_deleted(out):
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
def test_devices_share_each_block(tmp_path, out):
    code = f"""
import jax, numpy as np, rankax.stream
from rankax import SplitKey, auto_vmap
x = np.ones((1000, 3), "float32")
kernel = auto_vmap(1, chunk_size=2, devices=2)(lambda x: x @ x)
got = rankax.stream.run(kernel, x, out={str(out)!r}, progress=False)
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


def test_the_command_streams_and_resumes(tmp_path, out, capsys):
    x, y = stream_child.points()
    np.save(tmp_path / "x.npy", x[:, None])
    zarr.save_array(tmp_path / "s.zarr" / "y", y)
    inputs = f"x={tmp_path / 'x.npy'}", "--in", f"y={tmp_path / 's.zarr/y'}"
    options = "--out", out, "--memory-limit", "20MB"
    call = ["stream", KERNEL, "--in", *inputs, *options]
    status, text = shell(capsys, *call, "--plan")
    assert (status, text.splitlines()[0]) == (0, "both: memory limit 20 MB")
    blocks = "16 blocks of (63, 5) over (1000, 5): each reads 816 B and writes 5.04 kB; 28.5 kB"
    assert f"  {blocks} in flight\n    distance  (1000, 5)  float32\n" in text
    assert not out.exists()
    status, text = shell(capsys, *call)
    assert status == 0
    assert "both" in text
    assert "items/s" in text
    assert f'zarr.open_array("{out}/distance")  (1000, 5)  float32' in text.splitlines()
    assert f'zarr.open_array("{out}/sum")  (1000, 5, 3)  float32' in text.splitlines()
    stored = zarr.open_group(out, mode="r")
    want = stream_child.both(x[:, None], y)
    assert_same({name: jnp.asarray(stored[name][...]) for name in want}, want)
    why = "--resume is not given"
    exists = f"rankax.stream.run(both): {out} exists, and {why}; give another out\n"
    assert shell(capsys, *call) == (1, exists)
    assert shell(capsys, *call, "--resume")[0] == 0
    nowhere = tmp_path / "x.npy" / "s"
    status, text = shell(capsys, *call, "--out", nowhere)
    assert text.startswith(f"--out {nowhere}: a store cannot be written there: ")


def test_the_command_plans(capsys):
    status, text = shell(capsys, "plan", KERNEL, "x=1000x1x3", "y=5000x3:int32")
    assert status == 0
    assert text.startswith("both: batch shape (1000, 5000), 5000000 evaluations")
    with pytest.raises(SystemExit, match="0"):
        shell(capsys, "--version")
    assert capsys.readouterr().out == f"rankax {rankax.__version__}, JAX {jax.__version__}\n"


def test_the_command_says_what_is_wrong(out, capsys):
    call = ["stream", KERNEL, "--out", out, "--in"]
    with pytest.raises(SystemExit, match="2"):
        shell(capsys, *call, "x")
    assert "argument --in: x must be NAME=VALUE, NAME being a parameter" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        shell(capsys, "plan", KERNEL, "x=3yx")
    like = "x=100000x3, x=100000x3:int32 or, for a number, x="
    assert f"argument NAME=SHAPE: x=3yx must be like {like}" in capsys.readouterr().err
    kernel = "must be MODULE:KERNEL, decorated with rankax.auto_vmap"
    for words, text in {
        ("math:sin",): f"math:sin {kernel}: math has no kernel\n",
        ("stream_child", "x=3"): f"stream_child {kernel}: stream_child has both\n",
        ("stream_child:nobody", "x=3"): "stream_child:nobody must be MODULE:KERNEL, and there is "
        "no 'nobody': stream_child has both\n",
        ("no.such:kernel", "x=3"): "No module named 'no'\nno.such is looked for in ",
        ("./no/such.py:f",): "./no/such.py:f must be a name as in import, not a file: no.such:f\n",
        (KERNEL, "x=3"): f"{KERNEL}: missing a required argument: 'y'; its parameters: x, y\n",
        (KERNEL, "x=3", "x=4"): "x= is given 2 times; keep one\n",
    }.items():
        status, written = shell(capsys, "plan", *words)
        assert status == 1
        assert written.startswith(text)


def test_errors_in_a_module_or_kernel_show_their_lines(tmp_path, out, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    np.save(tmp_path / "x.npy", np.ones((5, 3), "float32"))
    for name, code, shown in [
        ("of_syntax", "def f(x)", "\n    def f(x)\n            ^\nSyntaxError: expected"),
        ("of_name", "f = WRONG", ", in <module>\n    f = WRONG\n"),
        ("of_rank", "auto_vmap(y=1)(abs)", ", in <module>\n    auto_vmap(y=1)(abs)\n"),
        ("of_call", "f = auto_vmap(x=1)(lambda x: x / y)", ", in <lambda>\n    f = auto_vmap("),
    ]:
        file = tmp_path / f"{name}.py"
        file.write_text(f"from rankax import auto_vmap\n{code}\n")
        call = "stream", f"{name}:f", "--in", f"x={tmp_path / 'x.npy'}", "--out", out
        status, text = shell(capsys, *call)
        assert status == 1
        assert f'File "{file}", line 2{shown}' in text
        assert "JAX_TRACEBACK_FILTERING" not in text
        assert "/rankax/" not in text


def test_a_file_that_cannot_be_read_is_named(tmp_path, out, capsys):
    np.savez(tmp_path / "x.npz", one=np.ones(3), two=np.ones(3))
    np.savetxt(tmp_path / "x.csv", np.ones((3, 3)), delimiter=",")
    (tmp_path / "empty.npy").touch()
    (tmp_path / "folder").mkdir()
    zarr.create_array(tmp_path / "group.zarr/one", data=np.ones(3))
    zarr.open_group(tmp_path / "group.zarr")
    for name, words in {
        "x.npz": "it has one, two; in Python, numpy.save(",
        "x.csv": "numpy.loadtxt(",
        "empty.npy": "numpy.save did not write this, or it has Python objects",
        "folder": "must be an array of zarr, but is another folder",
        "group.zarr": "/one\n",
        "none.npy": "there is no such file in ",
        "none.zarr/x": "there is no such file in ",
    }.items():
        path = tmp_path / name
        status, text = shell(capsys, "stream", KERNEL, "--in", f"x={path}", "--out", out)
        assert status == 1
        assert text.startswith(f"--in x={path}: ")
        assert words in text
        assert not out.exists()
