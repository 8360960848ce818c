# SPDX-License-Identifier: MIT
"""Check a call and plan its run: the stages, their blocks, what is stored, what is recorded.

The call is checked and evaluated as with arrays of dask (`ext/blocks/call.py`), but its arrays are
stand-ins (`ext/blocks/on_streamed.py`), and it returns arrays that name the stages that write them.

Of the memory limit, one half is for what the kernel needs beyond its inputs and outputs, and one
half is for the blocks in flight: one that is read, one that is evaluated, one that is written. Of
inputs there are at most four copies at a time, and of outputs five:

* read: the block, and what the source decodes to make it;
* evaluated: the block, and its copy on the device; outputs there, and their copy on the host;
* written: the outputs, their copy in the shape of a chunk, and the compressed chunk.
"""

import dataclasses
import hashlib
import itertools
import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

import rankax
from rankax._front.kernel import Kernel
from rankax.core.base.messages import listed, plural
from rankax.core.call.bind import flatten
from rankax.core.hooks import is_node
from rankax.core.plan.schedule import Shape
from rankax.ext.blocks.backend import small_blocks
from rankax.ext.blocks.call import call_on_blocks
from rankax.ext.blocks.checksum import checksum
from rankax.ext.blocks.on_streamed import STATES, Stage, Streamed
from rankax.ext.memory.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax.ext.memory.limit import free_bytes
from rankax.ext.ragged.call import RaggedCall
from rankax.ext.ragged.type import Ragged
from rankax.stream._ragged import filled_up, share_shapes, with_rows

# How the kernel is compiled, and shows its progress; the memory limit is that of the run.
_NOT_RECORDED = ("jit", "progress", "checkpoint", "bucket", "memory_limit", "xla_cpu", "target")
_COPIES_IN, _COPIES_OUT = 4, 5
_WHOLE = 1 << 20  # bytes; of a larger array that is not in memory, samples are read
_SAMPLES = 16
_IN_A_SAMPLE = 256  # items along the last axis
_LEAST = 100  # blocks, so that a run that is killed loses a few percent at most


# Blocks.


class Block(NamedTuple):
    """A block of a stage."""

    place: Shape  # in the grid of blocks
    region: tuple[slice, ...]  # of the batch

    @property
    def items(self) -> int:
        """The number of its items."""
        return math.prod(part.stop - part.start for part in self.region)


@dataclasses.dataclass(frozen=True)
class Cuts:
    """The blocks of a stage, all of one shape except at the ends of axes."""

    stage: Stage
    block: Shape

    @property
    def grid(self) -> Shape:
        """The number of blocks along each axis; a reduction of no items has one."""
        sizes, least = zip(self.stage.shape, self.block, strict=True), len(self.stage.reduced[:1])
        return tuple(max(-(-size // length), least) for size, length in sizes)

    def __iter__(self) -> Iterator[Block]:
        for place in itertools.product(*map(range, self.grid)):
            ends = zip(place, self.block, self.stage.shape, strict=True)
            yield Block(place, tuple(slice(i * n, min(i * n + n, size)) for i, n, size in ends))

    def read(self, block: Block) -> list[Any]:
        """Read a block of each input; an axis of length 1 is stretched."""
        regions = [[slice(0, n) for n in array.shape] for array, *_ in self.stage.inputs]
        of_batch = [slice(*self.stage.items(part.start, part.stop)) for part in block.region]
        for region, (array, axes, _) in zip(regions, self.stage.inputs, strict=True):
            for i, axis in self._mapped_axes(array, axes):
                region[i] = of_batch[axis]
        pairs = zip(self.stage.inputs, regions, strict=True)
        return [read(array, tuple(region)) for (array, *_), region in pairs]

    def _mapped_axes(self, array: Streamed, axes: Shape) -> list[tuple[int, int]]:
        """Return each axis of an array that the blocks cut, and that of the batch."""
        return [(i, a) for i, a in enumerate(axes) if array.shape[i] == self.stage.batch[a]]

    def items(self, axis: int) -> tuple[Any, Any]:
        """Return the first item of each block along an axis, and the end of its items."""
        size, length = self.stage.shape[axis], self.block[axis]
        starts = np.arange(0, size, length)
        return self.stage.items(starts, np.minimum(starts + length, size))

    def sizes(self) -> tuple[int, int, int]:
        """Return the bytes that a block reads (whole chunks of sources), writes, and holds."""
        read, stage = 0, self.stage
        for array, axes, item in stage.inputs:
            mapped, core = self._mapped_axes(array, axes), item.shape
            items = [self._most(array, i, axis) for i, axis in mapped]
            core = core[1:] if mapped and array.lengths is not None else core
            read += math.prod(items) * math.prod(core) * array.dtype.itemsize
        kept = [n for axis, n in enumerate(self.block) if axis not in stage.reduced]
        cores = [math.prod(x.shape[len(kept) :]) * x.dtype.itemsize for x in stage.outputs]
        written = math.prod(kept) * sum(cores)
        return read, written, _COPIES_IN * read + _COPIES_OUT * written

    def _most(self, array: Streamed, i: int, axis: int) -> int:
        """Return how many items, or rows of ragged items, a block reads along an axis at most."""
        if array.lengths is None and self.stage.rows is None:
            return max(self.block[axis], grain(array)[i])
        source, bounds = array, np.arange(self.stage.batch[axis] + 1)
        if array.lengths is not None:
            source, bounds = array.value, row_bounds(array.lengths)
        first, after = (bounds[span] for span in self.items(axis))
        return int((after - first).max(initial=0)) + grain(source)[i] - 1

    def halved(self, axis: int) -> Self:
        """Return twice as many blocks along an axis, of whole chunks of the sources."""
        inputs = self.stage.inputs
        steps = [
            grain(x)[i] for x, axes, _ in inputs for i, a in self._mapped_axes(x, axes) if a == axis
        ]
        length, step = -(-self.block[axis] // 2), max(steps, default=1)
        length -= length % step if step < length else 0
        block = *self.block[:axis], length, *self.block[axis + 1 :]
        return dataclasses.replace(self, block=block)


def cut(stage: Stage, limit: int, site: str) -> Cuts:
    """Return blocks that stay within a limit, and read as little as possible more than once.

    Of equal choices the outermost axis is cut, along which arrays are stored one after another.
    """
    cuts = Cuts(stage, tuple(max(1, n) for n in stage.shape))
    least = 1 if stage.reads_states else _LEAST
    reduced = [axis for axis in stage.reduced if stage.shape[axis] > 1]
    fixed = reduced[1:] if reduced and stage.program.setup.reductions.are_ordered else []
    while (held := cuts.sizes()[2]) > limit // 2 or math.prod(cuts.grid) < least:
        axes = [axis for axis, n in enumerate(cuts.block) if n > 1 and axis not in fixed]
        if not axes:
            break
        cuts = min(map(cuts.halved, axes), key=lambda c: math.prod(c.grid) * c.sizes()[0])
    if held > limit // 2:
        raise ValueError(
            f"{site}: the smallest block, of shape {cuts.block}, needs {shown_bytes(held)} in "
            f"flight, more than half of memory_limit={shown_bytes(limit)}; raise it to at least "
            f"{2 * held} bytes"
        )
    return cuts


# Reading.


def streamed(value: Any, path: str, site: str) -> Any:
    """Return an array as one to be read in blocks, and any other value as it is."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{site}: {path} is a masked array, whose mask would be lost; pass {path}.filled(...) "
            "and the mask as an argument of its own"
        )
    shape: Any = getattr(value, "shape", None) if hasattr(value, "__getitem__") else None
    if shape is None or isinstance(value, np.generic):
        return value
    if isinstance(value, jax.Array):
        if not shape or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        value = np.asarray(value)
    return Streamed(tuple(shape), np.dtype(value.dtype), value, path=path)


def grain(source: Streamed) -> tuple[int, ...]:
    """Return the shape of what is read at once, such as a chunk of zarr."""
    chunks: Any = getattr(source.value, "chunks", None)
    is_grid = isinstance(chunks, tuple) and all(isinstance(n, int) for n in chunks)
    return chunks if is_grid else (1,) * len(source.shape)


def row_bounds(lengths: Any) -> np.ndarray[Any, Any]:
    """Return where each ragged item begins in the flat array, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)])


def read(source: Streamed, region: tuple[slice, ...]) -> Any:
    """Return a block in memory. The last one is kept, because the next may need the same."""
    if source.lengths is not None:
        items, _, *core = region
        start, stop = row_bounds(source.lengths)[[items.start, items.stop]].tolist()
        rows = read(source.value, (slice(start, stop), *core))
        return Ragged(rows, source.lengths[items])
    if source.last is None or source.last[0] != region:
        source.last = None  # freed before another is read
        source.last = region, _read(source, region)
    return source.last[1]


def _read(source: Streamed, region: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    value = source.value
    if source.stage is not None:
        return _merged(value, source.stage, region)
    mapping, size = _mapping(value)
    if mapping is not None and mapping.size() < size:
        raise OSError(
            f"the file of {source.path} has {mapping.size()} bytes now, and had at least {size}"
        )
    block = value[region[0] if isinstance(value, range) else region]
    if np.ma.is_masked(block):  # as netCDF4 does for missing values
        raise TypeError(f"{source.path} has a block with masked items, whose mask would be lost")
    block = np.asarray(block) if mapping is None else np.array(block)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        # Pages that were read count as memory of this process until it lets go of them.
        mapping.madvise(mmap.MADV_DONTNEED)
    shape = tuple(len(range(n)[s]) for n, s in zip(source.shape, region, strict=True))
    if block.shape != shape:
        raise OSError(f"{source.path} has a block of shape {block.shape}, but {shape} is expected")
    return block


def _merged(states: Any, stage: Any, region: tuple[slice, ...]) -> Any:
    """Return the states of all blocks along the reduced axes, merged in their order, in pairs.

    In pairs, rounding errors of a sum do not add up.
    """
    places = [*itertools.product(*(range(states.shape[axis]) for axis in stage.reduced))]

    def merged(start: int, stop: int) -> Any:
        if stop - start > 1:
            half = start + (1 << (stop - start - 1).bit_length() - 1)  # a power of 2 comes first
            return stage.merge(merged(start, half), merged(half, stop))
        index: list[Any] = [*region]
        for axis, i in zip(stage.reduced, places[start], strict=True):
            index.insert(axis, i)
        return states[*index]

    return merged(0, len(places))


def _mapping(array: Any) -> tuple[mmap.mmap | None, int]:
    """Return the mapped file of an array, and how long it should be.

    Reading beyond the end of a file that has become shorter would kill the process. What was
    changed in a private mapping is in memory only, so that is an array like others.
    """
    begin = 0
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            offset = array.offset or 0  # None in a copy, which is in memory
            begin = offset - offset % mmap.ALLOCATIONGRANULARITY
            if array.mode == "c":
                return None, 0
        array = array.base
    return (array, begin + len(array)) if isinstance(array, mmap.mmap) else (None, 0)


def digest(source: Streamed) -> str:
    """Return a digest of the numbers of an array; of a large one on disk, of some of them."""
    numbers, shape = hashlib.sha256(), source.shape
    in_memory = type(source.value) is np.ndarray and _mapping(source.value)[0] is None
    is_whole = in_memory or math.prod(shape) * source.dtype.itemsize <= _WHOLE
    for i in range(1 if is_whole else _SAMPLES):
        starts = [(n - 1) * i // (_SAMPLES - 1) for n in shape]
        lengths = shape if is_whole else (*(1 for _ in shape[1:]), _IN_A_SAMPLE)
        region = tuple(slice(i, i + length) for i, length in zip(starts, lengths, strict=True))
        numbers.update(np.ascontiguousarray(read(source, region)).tobytes())
    return numbers.hexdigest()[:16]


# The call.


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that was checked."""

    name: str
    tree: Any  # the results: `Streamed` in place of arrays
    stages: Sequence[Cuts]
    record: dict[str, Any]

    def __str__(self) -> str:
        lines = [f"{self.name}: memory limit {shown_bytes(self.record['limit'])}"]
        for cuts in self.stages:
            read, written, held = map(shown_bytes, cuts.sizes())
            lines.append(
                f"  {plural(len([*cuts]), 'block')} of {cuts.block} over {cuts.stage.shape}: each "
                f"reads {read} and writes {written}; {held} in flight"
            )
            lines += [f"    {out.path}  {out.shape}  {out.dtype}" for out in cuts.stage.outputs]
        return "\n".join(lines)


def prepared(
    mapped: Any, args: Any, kwargs: Any, memory_limit: Any, site: str, found: Any, name: str = ""
) -> Job:
    """Check a call; ``found`` is the record of a store that it is to go on with, or empty.

    ``name`` is that of the only output, or of the group of several.
    """
    if not isinstance(mapped, Kernel):
        raise TypeError(f"{site}: kernel must be decorated with rankax.auto_vmap")
    mapped, args = mapped.unbound(tuple(args))
    kernel = mapped.spec
    if (given := checked_limit(memory_limit, site)) is None:
        raise TypeError(f"{site}: memory_limit must not be None; it sets the size of blocks")
    limit = found.get("limit") or limit_in_bytes(given, free_bytes)
    call = flatten(kernel, args, dict(kwargs))
    leaves, paths = list(call.leaves), call.structure.paths
    for i in call.ranked:
        leaves[i] = streamed(leaves[i], paths[i], site)
    ragged = None
    if call.structure.nodes:
        ragged = RaggedCall.of(dataclasses.replace(call, leaves=leaves), None)
        call = filled_up(ragged, site)
        leaves = call.leaves
    if not any(isinstance(leaf, Streamed) and leaf.shape for leaf in leaves):
        got = listed([f"{paths[i]} is {type(leaves[i]).__name__}" for i in call.ranked])
        raise TypeError(f"{site}: no argument with a rank is an array with axes; {got}")
    options = kernel.options()
    half = min(limit // 2, limit_in_bytes(options.memory_limit or limit, free_bytes))
    bounded = {"memory_limit": half, "progress": False, "checkpoint": False, "bucket": False}
    on_blocks = options.replace(**bounded)
    tree = call_on_blocks(mapped, dataclasses.replace(call, leaves=leaves), on_blocks)
    if ragged is not None:
        tree = with_rows(ragged, tree)
    _name(tree, name, site)
    stages = list(dict.fromkeys(_stages(jax.tree.leaves(tree))))
    cuts = [cut(stage, limit, site) for stage in stages]
    for each in cuts:
        if ragged is not None and ragged.count > 1 and not each.stage.reads_states:
            share_shapes(ragged, each.stage, list(zip(*each.items(-1), strict=True)))
    recorded = {**options.values(), "chunk_size": options.most}
    record: dict[str, Any] = {
        "kernel": kernel.name,
        "program": [text for stage in stages for text in _programs(stage)],
        **{f"options: {n}": str(v) for n, v in recorded.items() if n not in _NOT_RECORDED},
        "memory_limit": given,
        "limit": limit,
        "blocks": [[*each.block] for each in cuts],
        **({"name": name} if name else {}),
        "rankax": rankax.__version__,
        "jax": jax.__version__,
    }
    for i in call.ranked:  # an argument may be called "program"
        record[f"argument {paths[i]}" if paths[i] in record else paths[i]] = _about(leaves[i])
    keys = [key for key in sorted(found | record) if found.get(key) != record.get(key)]
    if found and keys:
        different = [f"{key} was {found.get(key)} and is {record.get(key)}" for key in keys]
        raise ValueError(
            f"{site}: out was written by another call: {'; '.join(different)}; repeat that call, "
            "or give another out"
        )
    return Job(kernel.name, tree, cuts, record)


def _stages(arrays: Iterable[Streamed]) -> Iterator[Stage]:
    """Yield the stages that write these arrays, and before each of them those that it reads."""
    for array in arrays:
        if stage := array.stage:
            yield from _stages(before for before, *_ in stage.inputs)
            yield stage


def _name(tree: Any, name: str, site: str) -> None:
    """Give the arrays of the results their paths in the store, such as ``pose/rotation``."""
    named = jax.tree_util.tree_flatten_with_path(tree, is_node)
    for path, leaf in named[0]:
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        leaf = leaf.values if isinstance(leaf, Ragged) else leaf
        leaf.path = "/".join(filter(None, (name, key))) or "output"
        if leaf.dtype.kind not in "biufc":
            raise TypeError(
                f"{site}: {leaf.path} has dtype {leaf.dtype}, which zarr does not store; return "
                "another one, such as .astype(jnp.float32)"
            )
    paths = [STATES, *(leaf.path for leaf in jax.tree.leaves(tree))]
    if len({*paths}) < len(paths):
        raise ValueError(f"{site}: two outputs would be stored as one array; rename their keys")


def _programs(stage: Stage) -> list[str]:
    """Return digests of the programs of a stage, and of the one that merged what it reads."""
    blocks = small_blocks(stage.inputs)
    merges = [array.stage.merge for array, *_ in stage.inputs if array.stage is not None]
    return [
        stage.program.digest(*stage.numbers, *blocks),
        *(merge.digest(*blocks, *blocks) for merge in merges),
    ]


def _about(value: Any) -> str:
    """Return what is recorded of an argument."""
    if isinstance(value, Streamed) and value.lengths is not None:
        return f"{_about(value.value)}, lengths {checksum(value.lengths)}"
    if isinstance(value, Streamed):
        return f"{value.dtype}{value.shape}, chunks {grain(value)}, digest {digest(value)}"
    return repr(value) if isinstance(value, (int, float, complex)) else checksum(value)
