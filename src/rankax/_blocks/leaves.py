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
from rankax._plan.shapes import leaf_plan


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


def block_leaves(
    kernel: KernelSpec, call: BoundKernel, package: str
) -> tuple[list[Leaf], list[Any], list[Any]]:
    """Return how a block receives each leaf; also its value, and its whole shape and dtype."""
    leaves: list[Leaf] = []
    values: list[Any] = []
    avals: list[Any] = []
    structure = call.structure
    for i, (value, path, rank) in enumerate(
        zip(call.leaves, structure.paths, structure.ranks, strict=True)
    ):
        kind, impl, aval, item = "array", None, value, None
        if rank is None:
            kind = "static"
        elif blocks_of(value):
            aval = _aval_in_blocks(kernel, value, path, package)
        else:
            if not (is_array(value) or is_number(value)):
                value = converted(kernel, value, path, shapes_only=False)
            kind, impl, value, aval = _resolved(value)
        if i in structure.keys and impl is None:
            check_key(kernel, value, path, rank)
        if rank is not None:
            core = leaf_plan(path, aval.shape, rank).core_shape
            item = jax.ShapeDtypeStruct(core, aval.dtype, weak_type=bool(aval.weak_type))
            item = item if impl is None else jax.eval_shape(jax.random.key_data, item)
        leaves.append(Leaf(kind, value if rank is None else None, impl, item))
        values.append(value)
        avals.append(aval)
    return leaves, values, avals


def _resolved(value: Any) -> tuple[str, Any, Any, jax.ShapeDtypeStruct]:
    """Return the kind of a JAX array, NumPy array or number; its key type, value and aval."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        aval = jax.ShapeDtypeStruct(value.shape, value.dtype)
        return "array", jax.random.key_impl(value), np.asarray(jax.random.key_data(value)), aval
    if isinstance(value, jax.Array) and not value.shape and jax.typeof(value).weak_type:
        value = value.item()
    # A NumPy float64 is a Python float too, but not weakly typed.
    if is_number(value) and not isinstance(value, np.generic):
        aval = jax.ShapeDtypeStruct((), jax.typeof(value).dtype, weak_type=True)
        return "number", None, value, aval
    value = np.asarray(value)
    dtype = jax.dtypes.canonicalize_dtype(value.dtype.newbyteorder("="))
    return "array", None, value, jax.ShapeDtypeStruct(value.shape, dtype)


def _aval_in_blocks(
    kernel: KernelSpec, value: Any, path: str, package: str
) -> jax.ShapeDtypeStruct:
    subject = f"{kernel.name}(): {path} is a {package} array"
    dtype = checked_dtype(value.dtype, subject, path)
    for axis, size in enumerate(value.shape):
        if size != size:  # dask has nan for an unknown length
            raise ValueError(
                f"{subject} of unknown length along axis {axis}; call "
                f"{path}.compute_chunk_sizes() first"
            )
    return jax.ShapeDtypeStruct(value.shape, dtype)


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
