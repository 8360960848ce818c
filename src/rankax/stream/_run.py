# SPDX-License-Identifier: MIT
"""``run``: a kernel on data larger than memory, block by block, from disk to disk.

`_job` checks the call and cuts it into blocks, and `_store` keeps what is written. While a
block is evaluated, one thread reads the next one, and another one writes the one before.
"""

import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import zarr
from filelock import Timeout

from rankax.core.base.messages import check_bool, first_of
from rankax.core.protocols import Observer
from rankax.ext.blocks.programs import unpacked
from rankax.ext.progress import Progress, checked_progress, progress_of_call, show
from rankax.stream._job import Job, prepared
from rankax.stream._stages import Block, Stage
from rankax.stream._store import Written, flush, is_free, is_whole, opened, recorded, write

_SECONDS = 1  # for which blocks wait for others to be written with them
_MOST_HELD = 1 << 22  # bytes of them


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
    failed or was killed resumes when the same call is made again.

    Parameters
    ----------
    kernel : callable
        Decorated with `rankax.auto_vmap`; a bound method too.
    *args, **kwargs
        Its arguments. An array with a rank, also inside a pytree, may be anything with ``shape``,
        ``dtype`` and slicing, such as an array of zarr, a data set of h5py or a `numpy.memmap`.
        Batch axes broadcast as in a call. So may the values of a `rankax.Ragged`.
    out : str or path
        A folder on a local disk that is empty, does not exist yet, or was made by an equal call. It
        becomes a group of zarr, in which a single array is called ``output``:
        ``zarr.open_group(out)["output"]``. With ``"x.zarr/name"`` it is called ``name``, in the
        group ``x.zarr``; several arrays are then ``x.zarr/name/key``.
    memory_limit : int or str, optional
        Bytes, a string with a unit (``"2 GB"``), or a share of the free memory (``"50%"``). Half of
        it bounds what the kernel needs beyond inputs and outputs, and half the blocks in flight. A
        run needs at most 30 MB more, besides what Python, JAX and zarr need to start.
    resume : bool, optional
        Whether to resume with a store that exists. If False, such a store is an error. No store is
        ever overwritten.
    progress : bool, str or callable, optional
        As in `rankax.auto_vmap`.
    on_nan : {"keep", "raise"}, optional
        ``"raise"`` ends the run at the first block with NaN, and names the batch indices of ten
        items at most. In a reduction, these are the items whose own value is not finite; or the
        block, if there is none, as where a product overflows and is then multiplied by 0.

    Returns
    -------
    zarr.Array, or a pytree of those
        Like the output of the kernel, also if it reduces the batch. A `rankax.Ragged` holds a flat
        array of zarr.

    Raises
    ------
    FileExistsError
        ``out`` exists and is not the store of a run, or ``resume=False``.
    TypeError
        An array has 64 bits, which JAX would narrow, or a mask, which it would ignore.
    ValueError
        ``out`` was written by another call; the message says what differs. Or it is a URL.
    BlockingIOError
        Another process is writing to ``out``.
    FloatingPointError
        NaN, with ``on_nan="raise"``.
    KeyboardInterrupt
        Ctrl-C; the text says that the same call resumes.

    Notes
    -----
    *Resume.* A block is written to files that end with their checksums, renamed when they are
    whole, and flushed to the disk: small ones together, once a second. Blocks without them are
    computed again. The store records the
    program of the kernel and of its reduction with all arrays in them, its options, shape, dtype,
    chunks and numbers of each argument (samples of a file above 1 MB), ``memory_limit``, and the
    versions of rankax and JAX.

    *Blocks.* There are at least a hundred, if there are as many items. They follow the chunks of
    the sources, and read as little as possible more than once. Each is a chunk of the store.

    *Reductions.* The states of blocks are stored and merged in the order of the blocks. Outputs
    that are kept beside a reduction are evaluated in a separate pass.

    *Ragged items.* A block is a number of items. In all blocks, these are padded to the same few
    lengths, and to a few numbers of items of each length, so blocks share their programs. Outputs
    with a row for each row are evaluated in a separate pass, in blocks of equal numbers of rows.

    *Random numbers.* A key for each item is an array like others. The rank `rankax.SplitKey` is
    refused. The option ``bucket`` has no effect, because blocks have few shapes.

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
    site = f"rankax.stream.run({getattr(kernel, '__name__', type(kernel).__name__)})"
    check_bool(resume, site, "resume")
    shows = checked_progress(progress, site)
    if isinstance(shows, Observer):
        raise TypeError(
            f"{site}: progress must be True, False, a label, or a function of (done, total); an "
            f"observer is told of the steps of a loop, got {type(shows).__name__} {shows!r}"
        )
    if on_nan not in ("keep", "raise"):
        raise ValueError(f"{site}: on_nan must be 'keep' or 'raise', got {on_nan!r}")
    if re.match(r"[a-zA-Z][\w+.-]+:/", text := os.fspath(out)):
        raise ValueError(
            f"{site}: out must be a folder on a local disk, but it is {text!r}; write to a local "
            "folder, and copy the finished store there"
        )
    store, ending, name = text.partition(".zarr/")
    path = Path(store + ending)
    if recorded(Path(out)):  # a store itself, wherever it is
        path, name = Path(out), ""
    record = recorded(path)
    if not (resume if record else is_free(path)):
        why = "resume=False" if record else "it is not a store of rankax.stream"
        raise FileExistsError(f"{site}: {path} exists, and {why}; give another out")
    job = prepared(kernel, args, kwargs, memory_limit, site, record, name.strip("/"))
    try:
        with opened(path, job.record, job.stages), progress_of_call(shows, job.name) as shown:
            _run(job, shown, site if on_nan == "raise" else None)
    except Timeout:
        raise BlockingIOError(
            f"{site}: another process is writing to {path}; wait for it, or give another out"
        ) from None
    except KeyboardInterrupt as stop:  # without the traceback of JAX
        raise KeyboardInterrupt(*getattr(stop, "__notes__", ())[-1:]) from None
    return jax.tree.map(lambda out: zarr.open_array(path / out.path, mode="r"), job.tree)


def _run(job: Job, shown: Progress | None, no_nan: str | None) -> None:
    """Evaluate the blocks that are not whole in the store."""
    done, total = 0, sum(math.prod(stage.shape) for stage in job.stages)

    def report(items: int) -> None:
        nonlocal done
        done += items
        if shown is not None and items:
            show(shown.target, done, total)

    if shown is not None:
        show(shown.target, 0, total)
    thread = functools.partial(ThreadPoolExecutor, 1)
    with thread() as reader, thread() as writer, thread() as flusher:
        for stage in job.stages:
            blocks = [block for block in stage.blocks() if not is_whole(stage, block)]
            evaluate = functools.partial(_evaluated, stage, no_nan)
            outs = map(evaluate, blocks, _ahead(reader, stage.read, blocks))
            batches = _batches(zip(blocks, outs, strict=True))
            files = _ahead(writer, functools.partial(write, stage), batches)
            report(math.prod(stage.shape) - sum(block.items for block in blocks))
            for whole in _ahead(flusher, _flushed, files):
                for block in whole:
                    report(block.items)


def _flushed(written: Written) -> list[Block]:
    """Return blocks when their files are on the disk."""
    flush([file for _, files in written for file in files])
    return [block for block, _ in written]


def _batches(pairs: Iterable[tuple[Block, Any]]) -> Iterator[list[tuple[Block, Any]]]:
    """Yield blocks with their outputs, those of a second together.

    To write a small block takes much longer than to evaluate it.
    """
    held, begin, size = list[tuple[Block, Any]](), time.monotonic(), 0
    try:
        for block, outs in pairs:
            held.append((block, outs))
            size += sum(out.nbytes for out in outs)
            if size > _MOST_HELD or time.monotonic() - begin > _SECONDS:
                yield held
                held, begin, size = [], time.monotonic(), 0
    except (Exception, KeyboardInterrupt):  # of a block; those before it are whole
        if held:
            yield held
        raise
    if held:
        yield held


def _ahead(executor: Executor, fun: Callable[..., Any], *items: Iterable[Any]) -> Iterator[Any]:
    """Map a function as `map` does, but in a thread, and one item ahead."""
    waiting: list[Future[Any]] = []
    for arguments in zip(*items, strict=True):
        waiting.append(executor.submit(fun, *arguments))
        if len(waiting) > 1:
            yield waiting.pop(0).result()
    yield from (future.result() for future in waiting)


def _evaluated(stage: Stage, no_nan: str | None, block: Block, inputs: Sequence[Any]) -> Any:
    """Return the outputs of a block; refuse NaN among them in the name of ``no_nan``."""
    outs = stage.program(*stage.numbers, *inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    outs = [stage.part(block.region, out) for out in outs]
    for array, out in zip(stage.outputs, outs, strict=True) if no_nan else ():
        parts = [out] if stage.merge is None else unpacked(stage.program.returns, out)
        if any(np.isnan(part).any() for part in parts):
            raise FloatingPointError(f"{no_nan}: {_items(stage, block, inputs, array.path, out)}")
    return outs


def _items(stage: Stage, block: Block, inputs: Sequence[Any], path: str, out: Any) -> str:
    """Name the first ten items of a block that are NaN; where they are reduced, not finite."""
    begins = [part.start for part in block.region]
    if stage.merge is None:
        is_nan = np.isnan(out).any(tuple(range(len(begins), out.ndim)))
        what, indices, count = f"{path} is NaN", np.argwhere(is_nan), is_nan.sum()
        if stage.bounds is not None:  # the items that have these rows
            indices = np.unique(stage.items(indices + begins, 0)[0])[:, None]
            begins, count = [0], len(indices)
    else:
        report = stage.program.nonfinite(*stage.numbers, *inputs)
        what, indices, count = "what is reduced is not finite", report.indices, report.count
    named = [str(tuple(index)) for index in (indices[:10] + begins).tolist()]
    # Finite items may become NaN, such as the product of a number that overflows and 0.
    region = f"[{', '.join(f'{part.start}:{part.stop}' for part in block.region)}]"
    items = first_of(named, count) if named else region
    return f"{what} at the batch indices {items}; on_nan='keep' stores NaN"
