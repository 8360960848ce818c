# SPDX-License-Identifier: MIT
"""Check a call and plan its run: the stages, their blocks, what is stored, what is recorded.

The call is checked and evaluated as with arrays of dask (`_blocks/call.py`), but its arrays are
stand-ins (`_blocks/on_streamed.py`), and it returns arrays that name the stages that write them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

import rankax
from rankax._base.words import plural
from rankax._blocks.call import call_on_blocks
from rankax._blocks.on_streamed import STATES, Stage, Streamed
from rankax._call.bind import flatten, refuse_ragged
from rankax._fit.memory import free_bytes
from rankax._front.kernel import Kernel
from rankax._plan.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax._trace.fingerprint import checksum
from rankax.stream._cut import Cuts, cut
from rankax.stream._sources import digest, grain, streamed

# How the kernel is compiled, and shows its progress; the memory limit is that of the run.
_NOT_RECORDED = ("jit", "progress", "checkpoint", "bucket", "memory_limit")


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
    mapped: Any, args: Any, kwargs: Any, memory_limit: Any, where: str, found: Any, name: str = ""
) -> Job:
    """Check a call; ``found`` is the record of a store that it is to go on with, or empty.

    ``name`` is that of the only output, or of the group of several.
    """
    if not isinstance(mapped, Kernel):
        raise TypeError(f"{where}: kernel must be decorated with rankax.auto_vmap")
    mapped, args = mapped.unbound(tuple(args))
    kernel = mapped.spec
    if (given := checked_limit(memory_limit, where)) is None:
        raise TypeError(f"{where}: memory_limit must not be None; blocks are cut by it")
    limit = found.get("limit") or limit_in_bytes(given, free_bytes)
    call = refuse_ragged(flatten(kernel, args, dict(kwargs)))
    triples = zip(call.leaves, call.structure.paths, call.structure.ranks, strict=True)
    leaves = [leaf if rank is None else streamed(leaf, path, where) for leaf, path, rank in triples]
    if not any(isinstance(leaf, Streamed) and leaf.shape for leaf in leaves):
        raise TypeError(f"{where}: no argument with a rank is an array with axes")
    options = kernel.options()
    half = min(limit // 2, limit_in_bytes(options.memory_limit or limit, free_bytes))
    bounded = {"memory_limit": half, "progress": False, "checkpoint": False, "bucket": False}
    on_blocks = dataclasses.replace(options, **bounded)
    tree = call_on_blocks(mapped, dataclasses.replace(call, leaves=leaves), on_blocks)
    _name(tree, name, where)
    stages = list(dict.fromkeys(_stages(jax.tree.leaves(tree))))
    cuts = [cut(stage, limit, where) for stage in stages]
    record: dict[str, Any] = {
        "kernel": kernel.name,
        "program": [text for stage in stages for text in _programs(stage)],
        **{f"options: {n}": str(v) for n, v in vars(options).items() if n not in _NOT_RECORDED},
        "memory_limit": given,
        "limit": limit,
        "blocks": [[*each.block] for each in cuts],
        **({"name": name} if name else {}),
        "rankax": rankax.__version__,
        "jax": jax.__version__,
    }
    for leaf, path, rank in zip(leaves, call.structure.paths, call.structure.ranks, strict=True):
        if rank is not None:  # an argument may be called "program"
            record[f"argument {path}" if path in record else path] = _about(leaf)
    different = [
        f"{key} was {found.get(key)} and is {record.get(key)}"
        for key in sorted(found | record)
        if found and found.get(key) != record.get(key)
    ]
    if different:
        raise ValueError(
            f"{where}: out was written by another call: {'; '.join(different)}; repeat that call, "
            "or give another out"
        )
    return Job(kernel.name, tree, cuts, record)


def _stages(arrays: Iterable[Streamed]) -> Iterator[Stage]:
    """Yield the stages that write these arrays, and before each of them those that it reads."""
    for array in arrays:
        if stage := array.stage:
            yield from _stages(before for before, *_ in stage.inputs)
            yield stage


def _name(tree: Any, name: str, where: str) -> None:
    """Give the arrays of the results their paths in the store, such as ``pose/rotation``."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        leaf.path = "/".join(filter(None, (name, key))) or "output"
        if leaf.dtype.kind not in "biufc":
            raise TypeError(
                f"{where}: {leaf.path} has dtype {leaf.dtype}, which zarr does not store; return "
                "another one, such as .astype(jnp.float32)"
            )
    paths = [STATES, *(leaf.path for leaf in jax.tree.leaves(tree))]
    if len({*paths}) < len(paths):
        raise ValueError(f"{where}: two outputs would be stored as one array; rename their keys")


def _programs(stage: Stage) -> list[str]:
    """Return digests of the programs of a stage."""
    if stage.reads_states:
        return [stage.fun.digest(stage.fun.layout.items)]
    blocks: list[Any] = []
    for array, axes, core in stage.inputs:
        sizes = [min(2, n) for n in array.shape[: len(axes)]]
        dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))  # of indices, too
        blocks.append(jax.ShapeDtypeStruct((*sizes, *core), dtype))
    merges = [] if stage.merge is None else [stage.merge.digest(stage.merge.layout.items * 2)]
    return [stage.fun.digest(blocks), *merges]


def _about(value: Any) -> str:
    """Return what is recorded of an argument."""
    if isinstance(value, Streamed):
        return f"{value.dtype}{value.shape}, chunks {grain(value)}, digest {digest(value)}"
    return repr(value) if isinstance(value, (int, float, complex)) else checksum(value)
