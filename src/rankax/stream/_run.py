# SPDX-License-Identifier: MIT
"""``run``: a kernel on data larger than memory, block by block, from disk to disk.

`_job` checks the call, `_cut` cuts it into blocks, and `_store` keeps what is written. While a
block is evaluated, one thread reads the next one, and another one writes the one before.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import zarr

from rankax._base.checks import check_bool
from rankax._base.words import shortened
from rankax._progress.bars import Progress, checked_progress, progress_of_call, show
from rankax.stream._cut import Block, Cuts
from rankax.stream._job import Job, prepared
from rankax.stream._sources import read
from rankax.stream._store import Store, create, locked, recorded

__all__ = ["run"]


def run(
    kernel: Callable[..., Any],
    /,
    *args: Any,
    out: str | os.PathLike[str],
    memory_limit: int | str = "1 GB",
    resume: bool = True,
    progress: bool | str | Callable[[int, int], object] = True,
    on_nan: str = "keep",
    **kwargs: Any,
) -> Any:
    r"""Call a kernel of `rankax.auto_vmap` on arrays larger than memory, and store what it returns.

    With an output that is one array, equivalent to ::

        stored = zarr.create_array(out, shape=..., dtype=...)
        for block in blocks:
            stored[block] = kernel(*(array[block] for array in args))

    where the next block is read, and the last one written, while one is evaluated. A run that
    failed or was killed goes on where it was when the same call is made again.

    Parameters
    ----------
    kernel : callable
        Decorated with `rankax.auto_vmap`; a bound method too.
    *args, **kwargs
        Its arguments. An array with a rank, also inside a pytree, may be anything with ``shape``,
        ``dtype`` and slicing, such as an array of zarr, a data set of h5py or a `numpy.memmap`.
        Batch axes broadcast as in a call.
    out : str or path
        A folder on a local disk that does not exist yet, or that an equal call has made.
    memory_limit : int or str, optional
        Bytes, a string with a unit (``"2 GB"``), or a share of the free memory (``"50%"``). Half of
        it bounds what the kernel needs beyond inputs and outputs, and half the blocks in flight.
    resume : bool, optional
        Whether to go on with a store that exists. If False, such a store is an error. No store is
        ever overwritten.
    progress : bool, str or callable, optional
        As in `rankax.auto_vmap`.
    on_nan : {"keep", "raise"}, optional
        ``"raise"`` ends the run at the first block with NaN, and names the batch indices. Of a
        reduction it names those of the block.

    Returns
    -------
    zarr.Array, or a pytree of those
        Like the output of the kernel, also if it reduces the batch.

    Raises
    ------
    FileExistsError
        ``out`` exists, and is another thing, or ``resume=False``.
    ValueError
        ``out`` was begun by a call that differs; the message says in what.
    BlockingIOError
        Another process is writing to ``out``.
    FloatingPointError
        NaN, with ``on_nan="raise"``.

    Notes
    -----
    *Resume.* A block is written, flushed to the disk, and then marked with a checksum, at least
    once a second. Blocks without a mark, or of another checksum, are computed again. The store
    records the program of the kernel, its options, shape, dtype and some of the numbers of each
    argument (all of those below 1 MB), ``memory_limit``, and the versions of rankax and JAX.

    *Blocks.* There are at least a hundred, if there are as many items. They follow the chunks of
    the sources, and read as little as possible more than once. Each is a chunk of the store.

    *Reductions.* The states of blocks are stored and merged in the order of the blocks. Outputs
    that are kept beside a reduction are evaluated in a pass of their own.

    *Random numbers.* A key for each item is an array like others. The rank `rankax.SplitKey` is
    refused.

    Examples
    --------
    >>> import os, tempfile, numpy as np, jax.numpy as jnp
    >>> import rankax, rankax.stream
    >>> norm = rankax.auto_vmap(1)(lambda v: jnp.sqrt(v @ v))
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "v.npy")
    >>> np.save(path, np.ones((1000, 4), "float32"))
    >>> v = np.load(path, mmap_mode="r")
    >>> out = os.path.join(folder.name, "norm.zarr")
    >>> norms = rankax.stream.run(norm, v, out=out, progress=False)
    >>> norms.shape, float(norms[999])
    ((1000,), 2.0)
    >>> folder.cleanup()
    """
    where = f"rankax.stream.run({getattr(kernel, '__name__', kernel)})"
    check_bool(resume, where, "resume")
    progress = checked_progress(progress, where)
    if on_nan not in ("keep", "raise"):
        raise ValueError(f"{where}: on_nan must be 'keep' or 'raise', got {on_nan!r}")
    path = Path(out)
    found = recorded(path) if path.exists() else None
    if path.exists() and not (found and resume):
        why = "resume=False" if found else "it is no store of rankax.stream"
        raise FileExistsError(f"{where}: {path} exists, and {why}; give another out")
    job = prepared(kernel, args, kwargs, memory_limit, where, found)
    if found is None:
        create(path, job.record, [array for arrays in job.arrays for array in arrays])
    busy = f"{where}: another process is writing to {path}; wait for it, or give another out"
    with locked(path, busy):
        if recorded(path) != job.record:  # it was made since this run began
            raise BlockingIOError(busy)
        store = Store(path, job.arrays)
        try:
            with contextlib.closing(store), progress_of_call(progress, job.name) as shown:
                _run(job, store, shown, on_nan)
        except BaseException as error:
            count = sum(math.prod(cuts.grid) for cuts in job.stages)
            error.add_note(
                f"{where}: {len(store.marks)} of {count} blocks are whole in {path}; the same call "
                "goes on with the others"
            )
            raise
    return jax.tree.map(lambda out: zarr.open_array(path / job.names[out], mode="r"), job.tree)


def _run(job: Job, store: Store, shown: Progress | None, on_nan: str) -> None:
    """Evaluate the blocks that are not whole in the store."""
    todo = [
        [block for block in cuts if not store.is_whole(i, block)]
        for i, cuts in enumerate(job.stages)
    ]
    total = sum(math.prod(cuts.stage.shape) for cuts in job.stages)
    left = sum(block.items for blocks in todo for block in blocks)

    def report(items: int) -> None:
        nonlocal left
        left -= items
        if shown is not None:
            show(shown.target, total - left, total)

    if shown is not None:
        show(shown.target, 0, total)
    report(0)
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        for number, blocks in enumerate(todo):
            cuts, written = job.stages[number], writer.submit(int)
            for block, inputs in _ahead(reader, _loader(job, store, cuts), blocks):
                outs = cuts.stage.fun(*inputs)
                del inputs
                outs = outs if isinstance(outs, tuple) else (outs,)
                if on_nan == "raise":
                    _refuse_nan(job, number, block, outs)
                report(written.result())
                written = writer.submit(store.write, number, block, cuts.target(block), outs)
                del outs
            report(written.result())


def _loader(job: Job, store: Store, cuts: Cuts) -> Callable[[Block], list[Any]]:
    """Return a function that reads a block of each input of a stage."""
    last: dict[int, tuple[Any, Any]] = {}  # region and block of each input
    for array, *_ in cuts.stage.inputs:
        for i, before in enumerate(job.stages):
            if before.stage is array.stage:
                array.value = _Merged(before, store.arrays[i][0])

    def load(block: Block) -> list[Any]:
        for i, (array, axes, _) in enumerate(cuts.stage.inputs):
            part = cuts.part(array, axes, block)
            if i not in last or last[i][0] != part:  # else it is the same as in the last block
                last.pop(i, None)  # free that first
                last[i] = part, read(array, part)
        return [last[i][1] for i in range(len(last))]

    return load


def _ahead(
    reader: ThreadPoolExecutor, load: Callable[[Block], Any], blocks: Sequence[Block]
) -> Iterator[tuple[Block, Any]]:
    """Yield blocks with their inputs, while those of the next one are read."""
    futures = [reader.submit(load, block) for block in blocks[:1]]
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        inputs = futures.pop().result()
        if following is not None:
            futures.append(reader.submit(load, following))
        yield block, inputs
        del inputs


def _refuse_nan(job: Job, number: int, block: Block, outs: Sequence[Any]) -> None:
    """Refuse NaN among the outputs of a block, or in its states."""
    stage, found = job.stages[number].stage, ""
    if stage.merge is not None:
        states = stage.merge.unpacked(outs[0])
        if any(x.dtype.kind in "fc" and np.isnan(x).any() for x in states):
            items = ", ".join(f"{part.start}:{part.stop}" for part in block.region)
            found = f"what is reduced is NaN among the batch indices [{items}]"
    for array, out in zip(job.arrays[number], outs, strict=True):
        if out.dtype.kind in "fc":
            core = tuple(range(len(block.region), out.ndim))
            places = np.argwhere(np.isnan(out).any(core)) + [part.start for part in block.region]
            if len(places):
                indices = shortened([str(tuple(place)) for place in places.tolist()])
                found = f"{array['name']} is NaN at the batch indices {indices}"
    if found:
        raise FloatingPointError(f"{job.where}: {found}; on_nan='keep' stores NaN")


class _Merged:
    """The states of all blocks along the reduced axes, merged as they are read."""

    def __init__(self, cuts: Cuts, states: Any) -> None:
        self._grid, self._stage, self._states = cuts.grid, cuts.stage, states

    def __getitem__(self, region: Sequence[slice]) -> Any:
        reduced, merge, merged = self._stage.reduced, self._stage.merge, None
        assert merge is not None
        for place in itertools.product(*(range(self._grid[axis]) for axis in reduced)):
            index = list(region[:-1])
            for axis, i in zip(reduced, place, strict=True):
                index.insert(axis, slice(i, i + 1))
            state = self._states[(*index, ...)].squeeze(reduced)
            both = state if merged is None else np.stack([merged, state])
            merged = both if merged is None else merge(both, axis=(0,), keepdims=False)
        return merged
