# SPDX-License-Identifier: MIT
"""A call with ragged items, of which a stream reads the rows from a flat array.

What depends on shapes only sees items that are filled up to the longest, so the checks, the record
and the programs that merge states are those of dense arrays. A block is read as a `Ragged`
(`_stages.py`), and the kernel itself evaluates it (`ext/blocks/programs.py`).
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from rankax.call.kernels import KernelCall, bind_leaves
from rankax.ext.blocks.programs import kept, outputs
from rankax.ext.lengths import Shared
from rankax.ext.ragged.call import RaggedCall, dense_shell
from rankax.ext.ragged.results import check_declared_outputs, check_one_axis
from rankax.ext.ragged.type import Ragged
from rankax.stream._stages import Stage, Streamed


def filled_up(ragged: RaggedCall, site: str) -> KernelCall:
    """Return the call with items of one length, whose shapes are checked."""
    check_declared_outputs(ragged)
    call, leaves = ragged.call, list(ragged.call.leaves)
    for i, dim in ragged.dim_of.items():
        rows, lengths = leaves[i], ragged.lengths[:, dim]
        if not isinstance(rows, Streamed):
            path = call.structure.paths[i]
            raise TypeError(
                f"{site}: {path} is Ragged with PRNG keys, which are not read in blocks; pass "
                "their data, jax.random.key_data, and wrap them in the kernel"
            )
        shape = len(lengths), int(lengths.max(initial=1)), *rows.shape[1:]
        leaves[i] = Streamed(shape, rows.dtype, rows, path=rows.path, bounds=_bounds(lengths))
    return bind_leaves(call.kernel, dense_shell(call), leaves, call.others)


def _bounds(lengths: Any) -> Any:
    return np.append(0, np.cumsum(lengths))


def share_shapes(ragged: RaggedCall, stage: Stage) -> None:
    """Let the blocks of a stage share shapes, and so programs; see `Shared`."""
    blocks = list(zip(*stage.items_of_blocks(-1), strict=True))
    if not blocks:  # as where no item has a row
        return
    shared = Shared.of(ragged.lengths, blocks)
    setup = dataclasses.replace(stage.program.setup, shared=shared)
    stage.program = kept(dataclasses.replace(stage.program, setup=setup))


def with_rows(ragged: RaggedCall, tree: Any) -> Any:
    """Return the results, where those with a row for each row are `Ragged`, with their own stage.

    Its blocks have equal numbers of rows, so an item that they cut is evaluated for both.
    """
    arrays, treedef = jax.tree.flatten(tree)
    dims = [dim for _, dim in ragged.dims_of(tree)]
    for dim in {*dims} if any(dim is not None for dim in dims) else ():
        members = [i for i, x in enumerate(dims) if x == dim]
        whole: Stage = arrays[members[0]].stage
        step = functools.partial(outputs, only=tuple(members))
        program = kept(dataclasses.replace(whole.program, step=step))
        stage = Stage(program, whole.numbers, whole.inputs, whole.shape)
        if dim is not None:
            check_one_axis(ragged, arrays[members[0]].path, dim)
            stage.bounds = _bounds(ragged.lengths[:, dim])
            stage.shape = (int(stage.bounds[-1]),)
        for i in members:
            core = arrays[i].shape[len(whole.shape) + (dim is not None) :]
            arrays[i] = Streamed((*stage.shape, *core), arrays[i].dtype, stage=stage)
            stage.outputs.append(arrays[i])
    pairs = zip(arrays, dims, strict=True)
    return treedef.unflatten(
        [x if dim is None else Ragged(x, ragged.lengths[:, dim]) for x, dim in pairs]
    )
