# SPDX-License-Identifier: MIT
"""Check a call and plan its run: the stages, their blocks, what is stored, what is recorded."""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

import rankax
from rankax._front.kernel import Kernel
from rankax.call.kernels import bind_unchecked, check_promotion
from rankax.core.base.messages import listed, plural
from rankax.ext.blocks.backend import small_blocks
from rankax.ext.blocks.call import call_on_blocks
from rankax.ext.blocks.checksum import checksum
from rankax.ext.memory.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax.ext.memory.limit import free_bytes
from rankax.ext.ragged.call import RaggedCall
from rankax.ext.ragged.type import is_ragged
from rankax.stream import _stages
from rankax.stream._ragged import filled_up, share_shapes, with_rows
from rankax.stream._stages import STATES, Stage, Streamed, mapping_of

# How the kernel is compiled, and shows its progress; the memory limit is that of the run.
_NOT_RECORDED = ("jit", "progress", "checkpoint", "bucket", "memory_limit", "xla_cpu", "hoist")
_WHOLE = 1 << 20  # bytes; of a larger array that is not in memory, samples are read
_SAMPLES = 16
_IN_A_SAMPLE = 256  # items along the last axis
_LEAST = 100  # blocks, so that a run that is killed loses a few percent at most


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that was checked."""

    name: str
    tree: Any  # the results: `Streamed` in place of arrays
    stages: Sequence[Stage]
    record: dict[str, Any]

    def __str__(self) -> str:
        lines = [f"{self.name}: memory limit {shown_bytes(self.record['limit'])}"]
        for stage in self.stages:
            read, written, held = map(shown_bytes, stage.sizes())
            lines.append(
                f"  {plural(math.prod(stage.grid), 'block')} of {stage.block} over {stage.shape}: "
                f"each reads {read} and writes {written}; {held} in flight"
            )
            lines += [f"    {out.path}  {out.shape}  {out.dtype}" for out in stage.outputs]
        return "\n".join(lines)


def prepared(
    mapped: Any, args: Any, kwargs: Any, memory_limit: Any, site: str, earlier: Any, name: str = ""
) -> Job:
    """Check a call; ``found`` is the record of a store that it is to go on with, or empty.

    ``name`` is that of the only output, or of the group of several.
    """
    if not isinstance(mapped, Kernel):
        raise TypeError(f"{site}: kernel must be decorated with rankax.auto_vmap")
    mapped, args = mapped.unbound(tuple(args))
    if (given := checked_limit(memory_limit, site)) is None:
        raise TypeError(f"{site}: memory_limit must not be None; it sets the size of blocks")
    limit = earlier.get("limit") or limit_in_bytes(given, free_bytes)
    call = bind_unchecked(mapped.spec, args, dict(kwargs))
    ranked, paths = call.ranked, call.paths
    for i in ranked:
        call.leaves[i] = streamed(call.leaves[i], paths[i], site)
    check_promotion(call)
    ragged = RaggedCall.of(call) if call.structure.nodes else None
    if ragged is not None:
        mapped, call = Kernel(ragged.call.kernel), filled_up(ragged, site)
    if not any(isinstance(leaf, Streamed) and leaf.shape for leaf in call.leaves):
        got = listed([f"{paths[i]} is {type(call.leaves[i]).__name__}" for i in ranked])
        raise TypeError(f"{site}: no argument with a rank is an array with axes; {got}")
    options = mapped.spec.options()
    half = min(limit // 2, limit_in_bytes(options.memory_limit or limit, free_bytes))
    bounded = {"memory_limit": half, "progress": False, "checkpoint": False, "bucket": False}
    tree = call_on_blocks(mapped, call, options.replace(**bounded), _stages)
    if ragged is not None:
        tree = with_rows(ragged, tree)
    _name(tree, name, site)
    stages = list(dict.fromkeys(_in_order(jax.tree.leaves(tree))))
    for stage in stages:
        stage.block = _block(stage, limit, site)
        if ragged is not None and ragged.count > 1 and not stage.reads_states:
            share_shapes(ragged, stage)
    recorded = {**options.values(), "chunk_size": options.most}
    record: dict[str, Any] = {
        "kernel": call.name,
        "program": [text for stage in stages for text in _programs(stage)],
        **{f"options: {n}": str(v) for n, v in recorded.items() if n not in _NOT_RECORDED},
        "memory_limit": given,
        "limit": limit,
        "blocks": [[*stage.block] for stage in stages],
        **({"name": name} if name else {}),
        "rankax": rankax.__version__,
        "jax": jax.__version__,
    }
    for i in ranked:  # an argument may be called "program"
        key = f"argument {paths[i]}" if paths[i] in record else paths[i]
        record[key] = _about(call.leaves[i])
    keys = [key for key in sorted(earlier | record) if earlier.get(key) != record.get(key)]
    if earlier and keys:
        different = [f"{key} was {earlier.get(key)} and is {record.get(key)}" for key in keys]
        raise ValueError(
            f"{site}: out was written by another call: {'; '.join(different)}; repeat that call, "
            "or give another out"
        )
    return Job(call.name, tree, stages, record)


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
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{site}: {path} is traced, but a stream reads it on the host; call it outside of "
            "jax.jit and jax.grad"
        )
    if isinstance(value, jax.Array):
        if not shape or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        value = np.asarray(value)
    return Streamed(tuple(shape), np.dtype(value.dtype), value, path=path)


def _block(stage: Stage, limit: int, site: str) -> tuple[int, ...]:
    """Return blocks that stay within a limit, and read as little as possible more than once.

    Of equal choices the outermost axis is cut, along which arrays are stored one after another.
    """
    best = dataclasses.replace(stage, block=tuple(max(1, n) for n in stage.shape))
    least = 1 if stage.reads_states else _LEAST
    fixed = [axis for axis in stage.reduced if stage.shape[axis] > 1][1:]
    if fixed and not stage.program.setup.reductions.are_ordered:
        fixed = []
    while (held := best.sizes()[2]) > limit // 2 or math.prod(best.grid) < least:
        axes = [axis for axis, n in enumerate(best.block) if n > 1 and axis not in fixed]
        if not axes:
            break
        best = min(map(best.halved, axes), key=lambda x: math.prod(x.grid) * x.sizes()[0])
    if held > limit // 2:
        raise ValueError(
            f"{site}: the smallest block, of shape {best.block}, needs {shown_bytes(held)} in "
            f"flight, more than half of memory_limit={shown_bytes(limit)}; raise it to at least "
            f"{2 * held} bytes"
        )
    return best.block


def _in_order(arrays: Iterable[Streamed]) -> Iterator[Stage]:
    """Yield the stages that write these arrays, and before each of them those that it reads."""
    for array in arrays:
        if stage := array.stage:
            yield from _in_order(before for before, *_ in stage.inputs)
            yield stage


def _name(tree: Any, name: str, site: str) -> None:
    """Give the arrays of the results their paths in the store, such as ``pose/rotation``."""
    named = jax.tree_util.tree_flatten_with_path(tree, is_ragged)
    for path, leaf in named[0]:
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        leaf = leaf.values if is_ragged(leaf) else leaf
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
    """Return digests of the program of a stage, and of the one that merged what it reads."""
    blocks = small_blocks(stage.inputs)
    merges = [array.stage.merge for array, *_ in stage.inputs if array.stage is not None]
    return [
        stage.program.digest(*stage.numbers, *blocks),
        *(merge.digest(*blocks, *blocks) for merge in merges),
    ]


def _about(value: Any) -> str:
    """Return what is recorded of an argument."""
    if not isinstance(value, Streamed):
        return repr(value) if isinstance(value, (int, float, complex)) else checksum(value)
    if value.bounds is not None:
        return f"{_about(value.value)}, lengths {checksum(value.bounds)}"
    return f"{value.dtype}{value.shape}, chunks {value.grain}, digest {_digest(value)}"


def _digest(source: Streamed) -> str:
    """Return a digest of the numbers of an array; of a large one on disk, of some of them."""
    numbers, shape = hashlib.sha256(), source.shape
    in_memory = type(source.value) is np.ndarray and mapping_of(source.value)[0] is None
    is_whole = in_memory or math.prod(shape) * source.dtype.itemsize <= _WHOLE
    for i in range(1 if is_whole else _SAMPLES):
        starts = [(n - 1) * i // (_SAMPLES - 1) for n in shape]
        lengths = shape if is_whole else (*(1 for _ in shape[1:]), _IN_A_SAMPLE)
        region = tuple(slice(i, i + length) for i, length in zip(starts, lengths, strict=True))
        numbers.update(np.ascontiguousarray(source.read(region)).tobytes())
    return numbers.hexdigest()[:16]
