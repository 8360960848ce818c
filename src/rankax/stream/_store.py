# SPDX-License-Identifier: MIT
"""The store of a run: arrays of zarr, of which each file says itself whether it is whole.

A block is one chunk of each array, in a file of its own. zarr writes a file under another name and
renames it. It ends with its checksum (the codec crc32c), which every reader of zarr compares. So
the blocks that are done are those whose files have their checksums, whenever the process was
killed, and no list can contradict the files. What was written is flushed to the disk before it
counts as done; so little is lost with the power.

What the store is about is recorded in the attributes of one array, which is created last and holds
the states of blocks, if there are any. A lock beside it keeps other runs out; the system drops it
when the process ends.

A run may be stopped while it creates the store, which then has the folder of the lock, but no
record, and no files but those that describe arrays. The next run deletes these and begins anew. A
store that is made elsewhere and renamed would need no such rule, but a folder that is given cannot
always be replaced: it may be mounted, linked, or the current one.
"""

import contextlib
import json
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr
from filelock import FileLock, Timeout
from zarr.codecs import Crc32cCodec, ZstdCodec

from rankax.stream._stages import STATES, Block, Stage, Streamed

_LOCK = "lock"

Written = list[tuple[Block, list[Path]]]  # blocks, and the files of each


def recorded(path: Path) -> dict[str, Any]:
    """Return the record of a store; it is empty where there is none yet."""
    try:
        return zarr.open_array(path / STATES, mode="r").attrs.asdict()
    except (FileNotFoundError, json.JSONDecodeError):  # not JSON if the power failed
        return {}


def is_free(path: Path) -> bool:
    """Whether nothing is there, or only what a run had begun to create when it was stopped."""
    if not (path / STATES).parent.is_dir():
        return not path.exists() or (path.is_dir() and not any(path.iterdir()))
    names = {file.name for file in path.rglob("*") if not file.is_dir()}
    return all(name in ("zarr.json", _LOCK) or name.endswith(".partial") for name in names)


@contextlib.contextmanager
def opened(path: Path, record: dict[str, Any], stages: Sequence[Stage]) -> Generator[None]:
    """Lock a store, and open its arrays; create it if it has no record."""
    (path / STATES).mkdir(parents=True, exist_ok=True)
    with FileLock(path / STATES / _LOCK, blocking=False):
        before = recorded(path)
        if before not in ({}, record):  # it was made since this run began
            raise Timeout(str(path))
        try:
            if not before:
                _create(path, record, stages)
            for partial in path.rglob("*.partial"):  # what a killed process was writing
                partial.unlink()
            with zarr.config.set({"array.write_empty_chunks": True}):  # else zeros have no file
                group: Any = zarr.open_group(path, mode="r+")
                for out in [out for stage in stages for out in stage.outputs]:
                    out.value = group[out.path]
            yield
        except BaseException as error:
            error.add_note(f"{path} keeps the blocks that are whole; the same call resumes")
            raise


def _create(path: Path, record: dict[str, Any], stages: Sequence[Stage]) -> None:
    """Create the arrays, and the record when they are on the disk."""
    for file in sorted(path.rglob("*"), reverse=True):  # what is in a folder before the folder
        if file.is_dir() and not any(file.iterdir()):
            file.rmdir()
        elif not file.is_dir() and file.name != _LOCK:
            file.unlink()
    group: Any = zarr.open_group(path, mode="a")
    arrays = {out.path: _array(stage, out) for stage in stages for out in stage.outputs}
    states = arrays.pop(STATES, {"name": STATES, "shape": (0,), "dtype": "uint8"})
    for array in arrays.values():
        group.create_array(**array)
    flush([*path.rglob("zarr.json")])
    group.create_array(**states, attributes=record)
    flush([path / STATES / "zarr.json"])


def _array(stage: Stage, out: Streamed) -> dict[str, Any]:
    """Return how zarr creates an array; states have an entry for each block along reduced axes."""
    sizes = enumerate(zip(stage.shape, stage.block, stage.grid, strict=True))
    pairs = [(n, 1) if axis in stage.reduced else (size, c) for axis, (size, c, n) in sizes]
    pairs += [(n, max(1, n)) for n in out.shape[len(pairs) - len(stage.reduced) :]]
    return {
        "name": out.path,
        "shape": tuple(size for size, _ in pairs),
        "chunks": tuple(chunk for _, chunk in pairs),
        "dimension_names": [f"{out.path}_{axis}" for axis in range(len(pairs))],  # for xarray
        "dtype": out.dtype,
        "compressors": [ZstdCodec(), Crc32cCodec()],
        "fill_value": np.nan if out.dtype.kind in "fc" else 0,
        "chunk_key_encoding": {"name": "default", "separator": "."},
    }


def is_whole(stage: Stage, block: Block) -> bool:
    """Whether the files of a block are those that were written."""
    files = _files(stage, block)
    whole = all(map(_has_checksum, files))
    if whole:  # the process that wrote them may have been killed before it flushed them
        flush(files)
    return whole


def write(stage: Stage, batch: Sequence[tuple[Block, Sequence[Any]]]) -> Written:
    """Write blocks of each array of a stage, in the order of blocks; return them and their files.

    Zarr writes the chunks of a row at the same time, in a third of the time of one by one.
    """
    blocks, outs = zip(*batch, strict=True)
    axes = [axis for axis, n in enumerate(stage.grid) if n > 1]
    first, last = (blocks[i].place[axes[0]] if axes else 0 for i in (0, -1))
    is_row = len(axes) == 1 and 0 < last - first == len(blocks) - 1
    for array, *parts in zip(stage.outputs, *outs, strict=True):
        if not parts[0].size:
            continue
        if is_row:
            _write_row(stage, array.value, axes[0], slice(first, last + 1), parts)
        else:
            for block, out in zip(blocks, parts, strict=True):
                array.value.blocks[block.place] = out
    return [(block, _files(stage, block)) for block in blocks]


def _write_row(stage: Stage, array: Any, axis: int, places: slice, parts: list[Any]) -> None:
    """Write the blocks at some places along an axis, the only one that is cut."""
    if axis in stage.reduced:  # states have no such axis
        shape = [*array.shape]
        shape[axis] = 1
        parts = [np.reshape(part, shape) for part in parts]
    array.blocks[(*(0,) * axis, places)] = np.concatenate(parts, axis)


def _files(stage: Stage, block: Block) -> list[Path]:
    """Return the files of a block, one for each array that has numbers."""
    key, arrays = ".".join(map(str, ("c", *block.place))), [out.value for out in stage.outputs]
    names = [(array, key + ".0" * (array.ndim - len(block.place))) for array in arrays]
    return [Path(array.store.root, array.path, name) for array, name in names if array.size]


def _has_checksum(file: Path) -> bool:
    data = file.read_bytes() if file.exists() else b""
    return len(data) > 4 and google_crc32c.value(data[:-4]).to_bytes(4, "little") == data[-4:]


def flush(files: Sequence[Path]) -> None:
    """Wait until files, and the lists of files in their folders, are on the disk."""
    try:
        for path in (*files, *{file.parent for file in files}):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except OSError:
        for file in files:  # the disk may have it or not
            file.unlink(missing_ok=True)
        raise
