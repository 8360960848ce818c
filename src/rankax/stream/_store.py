# SPDX-License-Identifier: MIT
"""The store of a run: arrays of zarr, and a journal of the blocks that are whole.

A block is one chunk of each array, in a file of its own. It is written, flushed to the disk, and
only then marked in the journal, with a checksum of each file. The lines of the journal have
checksums too, so half a line, the last thing that a killed process wrote, is no mark. What the
store is about is recorded in an attribute of its group. The group is made under another name and
renamed, so that it has this record from the start. A lock on its folder, which the system drops
when the process ends, keeps other runs out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import zarr

from rankax.stream._cut import Block

__all__ = ["OWN", "Store", "create", "locked", "recorded"]

OWN = "_rankax"  # the group of what is not a result
_SECONDS = 1  # between two marks, because a disk takes some milliseconds to flush anything


def create(path: Path, record: dict[str, Any], arrays: Sequence[dict[str, Any]]) -> None:
    """Make a store without blocks, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    with locked(path.parent):  # of runs that begin at once, the first makes it
        if path.exists():
            return
        shutil.rmtree(new, ignore_errors=True)  # of a run that was killed here
        group: Any = zarr.create_group(new, attributes={"rankax": record})
        group.create_group(OWN)
        for array in arrays:
            group.create_array(**array)
        for folder, _, files in os.walk(new):
            for name in (*files, "."):
                _flush(Path(folder, name))
        new.rename(path)
        _flush(path.parent)


def recorded(path: Path) -> Any:
    """Return the record of a store; None if this is something else."""
    try:
        return zarr.open_group(path, mode="r").attrs.asdict().get("rankax")
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def locked(folder: Path, refusal: str | None = None) -> Generator[None]:
    """Lock a folder until the end of this context or process; by default, wait for it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if refusal is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise BlockingIOError(refusal) from None
    finally:
        os.close(handle)


class Store:
    """A store whose folder is locked."""

    def __init__(self, path: Path, stages: Sequence[Sequence[dict[str, Any]]]) -> None:
        with zarr.config.set({"array.write_empty_chunks": True}):  # else zeros have no file
            self.arrays: list[list[Any]] = [
                [zarr.open_array(path / array["name"], mode="r+") for array in arrays]
                for arrays in stages
            ]
        for partial in path.rglob("*.partial"):  # what a killed process was writing
            partial.unlink()
        self.marks: dict[tuple[int, ...], list[int]] = {}
        self._waiting: dict[tuple[int, ...], list[Path]] = {}  # blocks that are to be marked
        self._due = time.monotonic() + _SECONDS
        self._journal = open(path / OWN / "journal", "a+b")  # noqa: SIM115
        length = self._journal.seek(0)
        for line in self._journal:
            checksum, _, text = line.partition(b" ")
            if checksum != b"%08x" % zlib.crc32(text):
                break
            block, checksums = json.loads(text)
            self.marks[tuple(block)] = checksums
            length += len(line)
        self._journal.truncate(length)

    def is_whole(self, stage: int, block: Block) -> bool:
        """Whether a block is marked, and its files are those that were written."""
        mark = self.marks.pop((stage, *block.place), None)
        with contextlib.suppress(FileNotFoundError):
            if mark is not None and mark == _checksums(self._files(stage, block)):
                self.marks[stage, *block.place] = mark
        return (stage, *block.place) in self.marks

    def write(self, stage: int, block: Block, region: Any, outs: Sequence[Any]) -> int:
        """Write a block of each array of a stage, to be marked soon; return its items."""
        for array, out in zip(self.arrays[stage], outs, strict=True):
            array[(*region, ...)] = out
        self._waiting[stage, *block.place] = self._files(stage, block)
        if time.monotonic() > self._due:
            self.mark()
        return block.items

    def mark(self) -> None:
        """Mark the blocks that were written, once they are on the disk."""
        waiting, self._waiting = self._waiting, {}  # what cannot be flushed is never marked
        marks = {block: _checksums(files) for block, files in waiting.items()}
        written = [file for files in waiting.values() for file in files]
        for path in dict.fromkeys([*written, *(file.parent for file in written)]):
            _flush(path)
        for mark in marks.items():
            text = json.dumps(mark).encode() + b"\n"
            self._journal.write(b"%08x %b" % (zlib.crc32(text), text))
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self.marks |= marks
        self._due = time.monotonic() + _SECONDS

    def close(self) -> None:
        """Mark what was written, and close the journal."""
        with self._journal:
            self.mark()

    def _files(self, stage: int, block: Block) -> list[Path]:
        """Return the files of a block, one for each array that has numbers."""
        files: list[Path] = []
        for array in self.arrays[stage]:
            core = (0,) * (array.ndim - len(block.place))
            if array.size:
                files.append(Path(array.store.root, ".".join(map(str, ("c", *block.place, *core)))))
        return files


def _checksums(files: Sequence[Path]) -> list[int]:
    return [zlib.crc32(file.read_bytes()) for file in files]


def _flush(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
