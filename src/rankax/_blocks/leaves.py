# SPDX-License-Identifier: MIT
"""The arguments of a call with arrays in blocks: checked, and turned into leaves of a block."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax._base.blocks import blocks_of, in_blocks
from rankax._base.trees import leaves_with_names
from rankax._base.words import listed
from rankax._blocks.programs import Leaf
from rankax._call.arguments import KernelSpec, check_key, converted, is_array, is_number
from rankax._call.bind import BoundKernel


def package_of_call(kernel: KernelSpec, call: BoundKernel) -> str:
    """Return the package of the arrays in blocks.

    Arrays of two packages are refused, and so are arrays in blocks without a rank.
    """
    first: dict[str, str] = {}  # the first array of each package
    structure = call.structure
    leaves = list(zip(structure.paths, call.leaves, structure.ranks, strict=True))
    for name, value in call.others.items():
        with contextlib.suppress(TypeError, ValueError):  # not a pytree
            leaves += [(path, leaf, None) for path, leaf in leaves_with_names(value, name)]
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


def checked_leaves(kernel: KernelSpec, call: BoundKernel, package: str) -> list[Any]:
    """Return the leaves of a call; those with a rank are arrays or numbers that JAX can take."""
    leaves = list(call.leaves)
    structure = call.structure
    for i, (path, rank) in enumerate(zip(structure.paths, structure.ranks, strict=True)):
        if rank is None:
            continue
        if blocks_of(leaves[i]):
            _check_blocks(leaves[i], f"{kernel.name}(): {path} is a {package} array", path)
        elif not (is_array(leaves[i]) or is_number(leaves[i])):
            leaves[i] = converted(kernel, leaves[i], path, shapes_only=False)
        if i in structure.keys:
            check_key(kernel, leaves[i], path, rank)
    return leaves


def _check_blocks(value: Any, subject: str, path: str) -> None:
    checked_dtype(value.dtype, subject, path)
    for axis, size in enumerate(value.shape):
        if size != size:  # dask has nan for an unknown length
            raise ValueError(
                f"{subject} of unknown length along axis {axis}; call "
                f"{path}.compute_chunk_sizes() first"
            )


def as_input(value: Any, place: int, core: tuple[int, ...]) -> tuple[Leaf, Any]:
    """Return how a block receives a checked leaf; and the number, or the array that is cut."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(value))
        item = jax.ShapeDtypeStruct((*core, *data.shape[value.ndim :]), data.dtype)
        return Leaf(place, item, jax.random.key_impl(value)), data
    if isinstance(value, jax.Array) and not value.shape and jax.typeof(value).weak_type:
        value = value.item()
    # A NumPy float64 is a Python float too, but not weakly typed.
    if is_number(value) and not isinstance(value, np.generic):
        item = jax.ShapeDtypeStruct((), jax.typeof(value).dtype, weak_type=True)
        return Leaf(place, item), value
    value = value if blocks_of(value) else np.asarray(value)
    dtype = jax.dtypes.canonicalize_dtype(np.dtype(value.dtype).newbyteorder("="))
    return Leaf(place, jax.ShapeDtypeStruct(core, dtype)), value


def checked_dtype(dtype: Any, subject: str, path: str) -> Any:
    """Return a dtype in native byte order, or say why JAX cannot compute with it.

    JAX narrows the arrays that it is given, and so does a call with arrays of JAX or NumPy. An
    array in blocks holds data from a store, and nothing would show that its digits are cut off.

    Parameters
    ----------
    dtype : dtype
    subject : str
        How an error message begins: what arrived where.
    path : str
        The array, as the caller knows it.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "OSTUMm" or dtype.type is np.void:
        raise TypeError(
            f"{subject} of dtype {dtype}, which JAX does not support; convert it to numbers"
        )
    native = dtype.newbyteorder("=")
    narrow = jax.dtypes.canonicalize_dtype(native)
    if narrow != native:
        raise TypeError(
            f"{subject} of dtype {native}, but JAX computes with {narrow} by default, which would "
            'silently lose digits; call jax.config.update("jax_enable_x64", True) first, or '
            f"convert {path} to {narrow}"
        )
    return native
