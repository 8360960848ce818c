# SPDX-License-Identifier: MIT
"""The arguments of a call with arrays in blocks: what is refused, and what each leaf becomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.blocks import blocks_of, in_blocks
from rankax._base.trees import leaves_with_names
from rankax._base.words import listed
from rankax._blocks.dtypes import checked_dtype
from rankax._blocks.programs import Leaf
from rankax._call.arguments import check_key, converted, is_array, is_number
from rankax._call.bind import BoundKernel
from rankax._call.kernel import Kernel

__all__ = ["block_leaves", "package_of_call", "with_core_shapes"]


def package_of_call(kernel: Kernel, call: BoundKernel) -> str:
    """Return the package of the arrays in blocks.

    Arrays of two packages are refused, and so are arrays in blocks without a rank.
    """
    first: dict[str, str] = {}  # the first array of each package
    structure = call.structure
    leaves = list(zip(structure.paths, call.leaves, structure.ranks, strict=True))
    for name, value in call.others.items():
        leaves += [(path, leaf, None) for path, leaf in _leaves_of(value, name)]
    for path, leaf, rank in leaves:
        package = blocks_of(leaf)
        if package is None:
            continue
        if package == "xarray" and rank is not None:
            raise in_blocks(package, kernel.name, path)
        if rank is None:
            raise TypeError(
                f"{kernel.name}(): {path} is a {package} array, but it has no rank, so every item "
                "would receive all of it; give it a rank, or compute it first"
            )
        first.setdefault(package, path)
    if len(first) > 1:
        arrays = listed([f"{path} is a {package} array" for package, path in first.items()])
        raise TypeError(
            f"{kernel.name}(): {arrays}, but one package has to evaluate the call; convert one"
        )
    return next(iter(first))


def _leaves_of(value: Any, name: str) -> list[tuple[str, Any]]:
    try:
        return leaves_with_names(value, name)
    except (TypeError, ValueError):  # not a pytree
        return []


def block_leaves(
    kernel: Kernel, call: BoundKernel, package: str
) -> tuple[list[Leaf], list[Any], list[Any]]:
    """Return what each leaf becomes in a block; also its value, and its whole shape and dtype."""
    leaves: list[Leaf] = []
    values: list[Any] = []
    avals: list[Any] = []
    structure = call.structure
    for i, (value, path, rank) in enumerate(
        zip(call.leaves, structure.paths, structure.ranks, strict=True)
    ):
        if rank is None:
            leaf, aval = Leaf("static", value), value
        elif blocks_of(value):
            leaf, aval = Leaf("array"), _aval_in_blocks(kernel, value, path, package)
        else:
            if not (is_array(value) or is_number(value)):
                value = converted(kernel, value, path, shapes_only=False)
            leaf, value, aval = _leaf(value)
        if i in structure.keys and leaf.key_impl is None:
            check_key(kernel, value, path, rank)
        leaves.append(leaf)
        values.append(value)
        avals.append(aval)
    return leaves, values, avals


def _leaf(value: Any) -> tuple[Leaf, Any, jax.ShapeDtypeStruct]:
    """Do the same for an array of JAX or NumPy, or a number."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        aval = jax.ShapeDtypeStruct(value.shape, value.dtype)
        impl = jax.random.key_impl(value)
        return Leaf("array", key_impl=impl), np.asarray(jax.random.key_data(value)), aval
    if isinstance(value, jax.Array) and not value.shape and jax.typeof(value).weak_type:
        value = value.item()
    # A NumPy float64 is a Python float too, but not weakly typed.
    if is_number(value) and not isinstance(value, np.generic):
        aval = jax.ShapeDtypeStruct((), jax.typeof(value).dtype, weak_type=True)
        return Leaf("number"), value, aval
    value = np.asarray(value)
    dtype = jax.dtypes.canonicalize_dtype(value.dtype.newbyteorder("="))
    return Leaf("array"), value, jax.ShapeDtypeStruct(value.shape, dtype)


def _aval_in_blocks(kernel: Kernel, value: Any, path: str, package: str) -> jax.ShapeDtypeStruct:
    subject = f"{kernel.name}(): {path} is a {package} array"
    dtype = checked_dtype(value.dtype, subject, path)
    for axis, size in enumerate(value.shape):
        if size != size:  # dask has nan for an unknown length
            raise ValueError(
                f"{subject} of unknown length along axis {axis}; call "
                f"{path}.compute_chunk_sizes() first"
            )
    return jax.ShapeDtypeStruct(value.shape, dtype)


def with_core_shapes(
    leaves: Sequence[Leaf], avals: Sequence[Any], core_shapes: Sequence[tuple[int, ...] | None]
) -> tuple[Leaf, ...]:
    """Return the leaves with the shape and dtype of one item; for a key, those of its data."""
    complete: list[Leaf] = []
    for leaf, aval, shape in zip(leaves, avals, core_shapes, strict=True):
        if shape is not None:
            item = jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=bool(aval.weak_type))
            if leaf.key_impl is not None:
                data = jax.eval_shape(jax.random.key_data, item)
                item = jax.ShapeDtypeStruct(data.shape, data.dtype)
            leaf = Leaf(leaf.kind, leaf.static, leaf.key_impl, item)
        complete.append(leaf)
    return tuple(complete)
