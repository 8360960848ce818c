# SPDX-License-Identifier: MIT
"""The store of a run: arrays of zarr, of which each file says itself whether it is whole.

A block is one chunk of each array, in a file of its own. zarr writes a file under another name and
renames it. It ends with its checksum (the codec crc32c), which every reader of zarr compares. So
the blocks that are done are those whose files have their checksums, whenever the process was
killed, and no list can contradict the files. A thread flushes what was written to the disk, so that
no more than the last moments are lost with the power.

What the store is about is recorded in the attributes of one array, which is created last and holds
the states of blocks, if there are any. A lock beside it keeps other runs out; the system drops it
when the process ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import zarr
from filelock import FileLock, Timeout

from rankax.stream._cut import Block

__all__ = ["STATES", "Store", "opened", "recorded"]

STATES = "_rankax/states"  # the array of what is not a result


def recorded(path: Path) -> dict[str, Any]:
    """Return the record of a store; it is empty where there is none yet."""
    try:
        return zarr.open_array(path / STATES, mode="r").attrs.asdict()
    except FileNotFoundError:
        return {}


@contextlib.contextmanager
def opened(
    path: Path, record: dict[str, Any], stages: Sequence[Sequence[dict[str, Any]]]
) -> Generator[Store]:
    """Lock a store, which is created if it has no record; in the end, wait for the disk."""
    (path / STATES).mkdir(parents=True, exist_ok=True)
    with FileLock(path / STATES / "lock", blocking=False), ThreadPoolExecutor(1) as flusher:
        found = recorded(path)
        if not found:
            _create(path, record, {array["name"]: array for part in stages for array in part})
        elif found != record:  # it was made since this run began
            raise Timeout(str(path))
        store = Store(path, [[array["name"] for array in arrays] for arrays in stages], flusher)
        try:
            yield store
            store.flush().result()
        except BaseException as error:
            error.add_note(
                f"{store.whole} blocks are whole in {path}; the same call goes on with the others"
            )
            raise


def _create(path: Path, record: dict[str, Any], arrays: dict[str, dict[str, Any]]) -> None:
    """Create the arrays; again, if a run was killed here."""
    group: Any = zarr.open_group(path, mode="a")
    states = arrays.pop(STATES, {"name": STATES, "shape": (0,), "dtype": "uint8"})
    for array in arrays.values():
        group.create_array(**array, overwrite=True)
    group.create_array(**states, attributes=record)
    _flush(path.rglob("zarr.json"))


class Store:
    """A store that is locked."""

    def __init__(self, path: Path, names: Sequence[Sequence[str]], flusher: Executor) -> None:
        for partial in path.rglob("*.partial"):  # what a killed process was writing
            partial.unlink()
        with zarr.config.set({"array.write_empty_chunks": True}):  # else zeros have no file
            group: Any = zarr.open_group(path, mode="r+")
            self.arrays: list[list[Any]] = [[group[name] for name in part] for part in names]
        self.whole = 0  # blocks
        self._path, self._unflushed = path, list[Path]()
        self._flusher, self._flushed = flusher, flusher.submit(_flush, [])

    def is_whole(self, stage: int, block: Block) -> bool:
        """Whether the files of a block are those that were written."""
        is_whole = all(map(_has_checksum, self._files(stage, block)))
        if is_whole:
            self._count(stage, block)
        return is_whole

    def write(self, stage: int, block: Block, outs: Sequence[Any]) -> None:
        """Write a block of each array of a stage."""
        for array, out in zip(self.arrays[stage], outs, strict=True):
            if array.size:
                array.blocks[block.place] = out
        self._count(stage, block)
        if self._flushed.done():
            self.flush()

    def flush(self) -> Future[None]:
        """Begin to flush what was written since the last time."""
        self._flushed.result()
        files, self._unflushed = self._unflushed, []
        self._flushed = self._flusher.submit(_flush, files)
        return self._flushed

    def _count(self, stage: int, block: Block) -> None:
        self.whole += 1
        self._unflushed += self._files(stage, block)

    def _files(self, stage: int, block: Block) -> list[Path]:
        """Return the files of a block, one for each array that has numbers."""
        key, arrays = ".".join(map(str, ("c", *block.place))), self.arrays[stage]
        names = [(array, key + ".0" * (array.ndim - len(block.place))) for array in arrays]
        return [self._path / array.path / name for array, name in names if array.size]


def _has_checksum(file: Path) -> bool:
    data = file.read_bytes() if file.exists() else b""
    return len(data) > 4 and google_crc32c.value(data[:-4]).to_bytes(4, "little") == data[-4:]


def _flush(files: Iterable[Path]) -> None:
    """Wait until files, and the lists of files in their folders, are on the disk."""
    files = list(files)
    try:
        for path in (*files, *{folder for file in files for folder in file.parents[:2]}):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except OSError:
        for file in files:  # the disk may have it or not
            file.unlink(missing_ok=True)
        raise
