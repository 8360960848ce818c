# SPDX-License-Identifier: MIT
"""Runs that are killed at any step, or stopped while they begin. The same call goes on."""

import contextlib
import signal

import jax
import jax.numpy as jnp
import pytest
import zarr

import rankax.stream
import stream_child
from helpers import assert_same, slow, weekly
from rankax.stream import _job
from rankax.stream._stages import STATES
from stream_child import KERNELS, STEPS, values

pytestmark = pytest.mark.usefixtures("few_blocks")

LEAST = 12


def files(store):
    return {str(p.relative_to(store)): p.read_bytes() for p in store.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of runs in one piece, how often they take each step, and what they return."""
    runs = {}
    x, y = stream_child.points()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_job, "_LEAST", LEAST)
        for kind, kernel in KERNELS.items():
            out = tmp_path_factory.mktemp("whole") / "a.zarr"
            with contextlib.ExitStack() as stack:
                calls = {
                    step: stack.enter_context(stream_child.stopped(step, 0, None, after=False))
                    for step in STEPS
                }
                got = values(stream_child.run(kind, out))
            assert_same(got, jax.jit(kernel)(x[:, None], y), rtol=1e-4)
            runs[kind] = files(out), {step: len(own) for step, own in calls.items()}
    return runs


# A step of a run, at its first or last time, and whether the run ends before the step or after it.
CASES = [(step, last, after) for step in STEPS for last in (False, True) for after in (False, True)]
CASES = [case for case in CASES if case[:2] != ("finish", False)]  # a store is looked for
AT_EACH_RUN = [("write", True, False), ("flush", False, True)]
AT_MERGE = [("folder", False, True), ("array", True, True), ("create", True, False)]


def mark(case):
    return case if case in AT_EACH_RUN else slow(*case) if case in AT_MERGE else weekly(*case)


@pytest.mark.parametrize("kind", ["map", slow("reduce")])
@pytest.mark.parametrize(("step", "last", "after"), [*map(mark, CASES)])
def test_a_run_that_is_killed_goes_on(out, processes, whole, kind, step, last, after):
    number = whole[kind][1][step] if last else 1
    arguments = kind, out, LEAST, step, number, after
    process = processes.Process(target=stream_child.run_killed, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    stream_child.run(kind, out)
    assert files(out) == whole[kind][0]


def begun(out):
    """Leave a store that was not finished."""

    def stop():
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        stream_child.stopped("metadata", 1, stop, after=False),
    ):
        stream_child.run("map", out)
    assert [path for path in out.iterdir() if path.name != "_rankax"]


def test_another_call_may_take_a_store_that_was_not_created(out):
    begun(out)
    x, _ = stream_child.points()
    near = rankax.auto_vmap(x=1)(lambda x: jnp.sum(x))
    got = rankax.stream.run(near, x, out=out, progress=False)
    assert_same(jnp.asarray(got[...]), jax.jit(near)(x))
    assert {name for name, _ in zarr.open_group(out, mode="r").arrays()} == {"output"}
    assert not (out / "distance").exists()


def test_a_store_that_was_not_created_needs_no_resume(out):
    begun(out)
    x, y = stream_child.points()
    rankax.stream.run(KERNELS["map"], x[:, None], y, out=out, resume=False, progress=False)
    with pytest.raises(FileExistsError, match="resume=False"):
        rankax.stream.run(KERNELS["map"], x[:, None], y, out=out, resume=False, progress=False)


def test_files_of_others_are_never_deleted(out):
    begun(out)
    (out / "notes").mkdir()
    (out / "notes" / "a.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="it is not a store of rankax"):
        stream_child.run("map", out)
    assert (out / "notes" / "a.txt").read_text() == "mine"
    assert (out / "distance" / "zarr.json").exists()


def test_a_record_that_the_power_cut_off_is_none(out, whole):
    begun(out)
    (out / STATES / "zarr.json").write_bytes(b"")
    stream_child.run("map", out)
    assert files(out) == whole["map"][0]


def test_a_folder_that_is_empty_linked_or_current(tmp_path, whole, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    stream_child.run("map", tmp_path / "link")
    assert files(tmp_path / "empty") == whole["map"][0]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    stream_child.run("map", ".")
    assert files(tmp_path / "here") == whole["map"][0]
