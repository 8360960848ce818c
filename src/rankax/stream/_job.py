# SPDX-License-Identifier: MIT
"""Check a call and plan its run: the stages, their blocks, what is stored, what is recorded.

The kernel is called with stand-ins for its arrays (`_blocks/on_streamed.py`), as it would be with
arrays of dask. That checks the call, and returns arrays that name the stages that write them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rankax
from rankax._base.trees import leaves_with_names
from rankax._base.words import plural
from rankax._blocks.on_streamed import Stage, Streamed
from rankax._call.bind import flatten, rebind
from rankax._call.kernel import Kernel
from rankax._fit.memory import free_bytes
from rankax._plan.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax._trace.fingerprint import opened
from rankax.stream._cut import Cuts, cut
from rankax.stream._sources import digest, streamed
from rankax.stream._store import OWN

__all__ = ["Job", "prepared"]

# How the kernel is compiled, and shows its progress; the memory limit is that of the run.
_NOT_RECORDED = ("jit", "progress", "checkpoint", "memory_limit")


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that was checked."""

    name: str
    where: str
    tree: Any  # the results: `Streamed` in place of arrays
    names: Mapping[Streamed, str]  # of these arrays
    stages: Sequence[Cuts]
    arrays: Sequence[Sequence[dict[str, Any]]]  # what each stage writes, as zarr creates it
    record: dict[str, Any]

    def __str__(self) -> str:
        lines = [f"{self.name}: memory limit {shown_bytes(self.record['limit'])}"]
        for cuts, arrays in zip(self.stages, self.arrays, strict=True):
            read, written = map(shown_bytes, cuts.sizes())
            number = plural(len([*cuts]), "block")
            lines.append(
                f"  {number} of {cuts.block} over {cuts.stage.shape}: each reads {read} and writes "
                f"{written}; {shown_bytes(cuts.held())} in flight"
            )
            lines += ["    {name}  {shape}  {dtype}, chunks {chunks}".format(**a) for a in arrays]
        return "\n".join(lines)


def prepared(
    mapped: Any, args: Any, kwargs: Any, memory_limit: int | str, where: str, found: Any = None
) -> Job:
    """Check a call; ``found`` is the record of a store that it is to go on with."""
    if inspect.ismethod(mapped):
        mapped, args = mapped.__func__, (mapped.__self__, *args)
    kernel = getattr(mapped, "_kernel", None)
    if not isinstance(kernel, Kernel):
        raise TypeError(f"{where}: kernel must be decorated with rankax.auto_vmap")
    if (given := checked_limit(memory_limit, where)) is None:
        raise TypeError(f"{where}: memory_limit must not be None; blocks are cut by it")
    limit = limit_in_bytes(given, free_bytes) if found is None else found["limit"]
    call = flatten(kernel, tuple(args), dict(kwargs))
    ranked = [*zip(call.structure.paths, call.structure.ranks, strict=True)]
    pairs = zip(call.leaves, ranked, strict=True)
    leaves = [leaf if rank is None else streamed(leaf, path) for leaf, (path, rank) in pairs]
    if not any(isinstance(leaf, Streamed) for leaf in leaves):
        raise TypeError(f"{where}: no argument with a rank is an array with axes")
    again = rebind(kernel, call.names, leaves, call.treedef, call.others).arguments
    options = kernel.options()
    half = min(limit // 2, limit_in_bytes(options.memory_limit or limit, free_bytes))
    bounded = mapped.with_options(memory_limit=half, progress=False, checkpoint=False)
    tree = bounded(*again.args, **again.kwargs)
    stages = list(dict.fromkeys(_stages(jax.tree.leaves(tree))))
    record: dict[str, Any] = {
        "kernel": kernel.name,
        "program": [_program(stage) for stage in stages if not stage.reads_states],
        "options": {n: _text(v) for n, v in vars(options).items() if n not in _NOT_RECORDED},
        "arguments": {p: _argument(x) for x, (p, r) in zip(leaves, ranked, strict=True) if r},
        "memory_limit": given,
        "rankax": rankax.__version__,
        "jax": jax.__version__,
    }
    if found is None:
        cuts = [cut(stage, limit, where) for stage in stages]
    elif different := [*_differences(found["call"], record)]:
        raise ValueError(
            f"{where}: out was begun by another call: {'; '.join(different)}; repeat that call, or "
            "give another out"
        )
    else:
        cuts = [Cuts(*pair) for pair in zip(stages, map(tuple, found["blocks"]), strict=True)]
    names = _names(tree, where)
    arrays = [_arrays(each, names) for each in cuts]
    record = {"call": record, "limit": limit, "blocks": [each.block for each in cuts]}
    return Job(kernel.name, where, tree, names, cuts, arrays, json.loads(json.dumps(record)))


def _stages(arrays: Iterable[Streamed]) -> Iterator[Stage]:
    """Yield the stages that write these arrays, and before each of them those that it reads."""
    for array in arrays:
        if stage := array.stage:
            yield from _stages(before for before, *_ in stage.inputs)
            yield stage


def _names(tree: Any, where: str) -> dict[Streamed, str]:
    """Return the name of each array of the results, such as ``pose/rotation``."""
    names: dict[Streamed, str] = {}
    for path, leaf in leaves_with_names(tree, ""):
        if leaf.dtype.kind not in "biufc":
            raise TypeError(
                f"{where}: output{path} has dtype {leaf.dtype}, which zarr does not store; return "
                "another one, such as .astype(jnp.float32)"
            )
        names[leaf] = "/".join(re.findall(r"\w+", path)) or "output"
    if len({*names.values(), OWN}) <= len(names):  # two of them are equal
        return {leaf: str(number) for number, leaf in enumerate(names)}
    return names


def _arrays(cuts: Cuts, names: Mapping[Streamed, str]) -> list[dict[str, Any]]:
    """Return what a stage writes; states have one entry for each block along reduced axes."""
    stage = cuts.stage
    lengths = enumerate(zip(stage.shape, cuts.grid, cuts.block, strict=True))
    pairs = [(g, 1) if axis in stage.reduced else (n, c) for axis, (n, g, c) in lengths]
    cores = [out.shape[len(pairs) - len(stage.reduced) :] for out in stage.outputs]
    return [
        {
            "name": names.get(out, f"{OWN}/states"),
            "shape": (*(n for n, _ in pairs), *core),
            "chunks": (*(chunk for _, chunk in pairs), *(max(1, n) for n in core)),
            "dtype": out.dtype,
            "fill_value": np.nan if out.dtype.kind in "fc" else 0,
            "chunk_key_encoding": {"name": "default", "separator": "."},
        }
        for out, core in zip(stage.outputs, cores, strict=True)
    ]


# The record.


def _program(stage: Stage) -> str:
    """Return a digest of the program of a stage, and of the arrays that it closes over."""
    blocks: list[Any] = []
    for array, axes, core in stage.inputs:
        most = (2 if axis in stage.reduced else 1 for axis in axes)
        sizes = [min(pair) for pair in zip(most, array.shape, strict=False)]
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)  # of indices, too
        blocks.append(jax.ShapeDtypeStruct((*sizes, *core), dtype))
    traced = opened(stage.fun.traced(blocks))
    checksum = hashlib.sha256(_text(traced).encode())
    for const in traced.consts:
        is_key = jnp.issubdtype(const.dtype, jax.dtypes.prng_key)
        checksum.update(np.asarray(jax.random.key_data(const) if is_key else const).tobytes())
    return checksum.hexdigest()[:16]


def _text(value: Any) -> str:
    """Return what Python prints of an object, without addresses, which differ in each process."""
    return re.sub(r"0x[0-9a-f]+", "0x", str(value))


def _argument(value: Any) -> dict[str, Any]:
    if not isinstance(value, Streamed):
        return {"value": _text(value)}
    return {"shape": [*value.shape], "dtype": str(value.dtype), "numbers": digest(value)}


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Say in what two records differ."""
    for key in sorted(was.keys() | now.keys()):
        old, new = was.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{path}{key}: ")
        elif old != new:
            yield f"{path}{key} was {old} and is {new}"
