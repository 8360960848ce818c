# SPDX-License-Identifier: MIT
"""Check a call and plan its run: the stages, their blocks, what is stored, what is recorded.

The kernel is called with stand-ins for its arrays (`_blocks/on_streamed.py`), as it would be with
arrays of dask. That checks the call, and returns arrays that name the stages that write them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rankax
from rankax._base.words import plural
from rankax._blocks.on_streamed import STATES, Stage, Streamed
from rankax._call.bind import flatten, rebind
from rankax._fit.memory import free_bytes
from rankax._front.kernel import Kernel, with_object
from rankax._plan.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax._trace.fingerprint import opened
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
    mapped: Any, args: Any, kwargs: Any, memory_limit: Any, where: str, found: dict[str, Any]
) -> Job:
    """Check a call; ``found`` is the record of a store that it is to go on with, or empty."""
    mapped, args = with_object(mapped, args)
    if not isinstance(mapped, Kernel):
        raise TypeError(f"{where}: kernel must be decorated with rankax.auto_vmap")
    kernel = mapped.spec
    if (given := checked_limit(memory_limit, where)) is None:
        raise TypeError(f"{where}: memory_limit must not be None; blocks are cut by it")
    limit = found.get("limit") or limit_in_bytes(given, free_bytes)
    call = flatten(kernel, args, dict(kwargs))
    ranked = [*zip(call.structure.paths, call.structure.ranks, strict=True)]
    pairs = zip(call.leaves, ranked, strict=True)
    leaves = [leaf if rank is None else streamed(leaf, path) for leaf, (path, rank) in pairs]
    if not any(isinstance(leaf, Streamed) for leaf in leaves):
        raise TypeError(f"{where}: no argument with a rank is an array with axes")
    again = rebind(kernel, call.names, leaves, call.treedef, call.others).arguments
    options = kernel.options()
    half = min(limit // 2, limit_in_bytes(options.memory_limit or limit, free_bytes))
    bounded = mapped.with_options(memory_limit=half, progress=False, checkpoint=False, bucket=False)
    tree = bounded(*again.args, **again.kwargs)
    _name(tree, where)
    stages = list(dict.fromkeys(_stages(jax.tree.leaves(tree))))
    cuts = [cut(stage, limit, where) for stage in stages]
    record: dict[str, Any] = {
        "kernel": kernel.name,
        "program": [_program(stage) for stage in stages if not stage.reads_states],
        **{f"options: {n}": _text(v) for n, v in vars(options).items() if n not in _NOT_RECORDED},
        "memory_limit": given,
        "limit": limit,
        "blocks": [[*each.block] for each in cuts],
        "rankax": rankax.__version__,
        "jax": jax.__version__,
    }
    pairs = zip(leaves, ranked, strict=True)
    record |= {path: _about(leaf) for leaf, (path, rank) in pairs if rank is not None}
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


def _name(tree: Any, where: str) -> None:
    """Give the arrays of the results their paths in the store, such as ``pose/rotation``."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        leaf.path = jax.tree_util.keystr(path, simple=True, separator="/") or "output"
        if leaf.dtype.kind not in "biufc":
            raise TypeError(
                f"{where}: {leaf.path} has dtype {leaf.dtype}, which zarr does not store; return "
                "another one, such as .astype(jnp.float32)"
            )
    paths = [STATES, *(leaf.path for leaf in jax.tree.leaves(tree))]
    if len({*paths}) < len(paths):
        raise ValueError(f"{where}: two outputs would be stored as one array; rename their keys")


def _program(stage: Stage) -> str:
    """Return a digest of the program of a stage, and of the arrays that it closes over."""
    blocks: list[Any] = []
    for array, axes, core in stage.inputs:
        sizes = [min(2, n) for n in array.shape[: len(axes)]]
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)  # of indices, too
        blocks.append(jax.ShapeDtypeStruct((*sizes, *core), dtype))
    traced = opened(stage.fun.traced(blocks))
    checksum = hashlib.sha256(_text(traced).encode())
    for const in traced.consts:
        is_key = jnp.issubdtype(const.dtype, jax.dtypes.prng_key)
        checksum.update(np.asarray(jax.random.key_data(const) if is_key else const).tobytes())
    return checksum.hexdigest()[:16]


def _about(value: Any) -> str:
    """Return what is recorded of an argument."""
    if not isinstance(value, Streamed):
        return _text(value)
    return f"{value.dtype}{value.shape}, chunks {grain(value)}, digest {digest(value)}"


def _text(value: Any) -> str:
    """Return what Python prints of an object, without addresses, which differ in each process."""
    return re.sub(r"0x[0-9a-f]+", "0x", str(value))
