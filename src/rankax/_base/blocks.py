# SPDX-License-Identifier: MIT
"""Arrays of other packages: those that are evaluated block by block, and those with named axes.

No such package is imported here: an array of one can only come once its package is there.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["InBlocksError", "blocks_of", "in_blocks"]

_CLASSES = {
    "dask": ("dask.array", ("Array",)),
    "cubed": ("cubed", ("Array",)),
    "xarray": ("xarray", ("DataArray", "Dataset", "Variable")),
}


def blocks_of(leaf: Any) -> str | None:
    """Name the package that a leaf is an array of; None if it is none of those."""
    for package, (module, names) in _CLASSES.items():
        found = sys.modules.get(module)
        if found is None:
            continue
        classes = tuple(getattr(found, name) for name in names if hasattr(found, name))
        if isinstance(leaf, classes):
            return package
    return None


class InBlocksError(TypeError):
    """An array in blocks came where an array of JAX or NumPy is due.

    Raised while the arguments of a call are bound, and caught by the decorated kernel itself, so
    that a call with other arrays pays nothing. Elsewhere, as in ``kernel.plan``, it is the error.
    """


def in_blocks(package: str, name: str, path: str) -> InBlocksError:
    """Say why a function of ours cannot take such an array as it stands."""
    if package == "xarray":
        what = (
            f"an object of xarray; call rankax.xarray.apply({name}, ...), which finds the core "
            "dimensions by name, or pass its .data"
        )
    else:
        what = (
            f"a {package} array, whose blocks only a call of {name} itself evaluates; pass the "
            "shape of one block here, as a jax.ShapeDtypeStruct"
        )
    return InBlocksError(f"{name}(): {path} is {what}")
