# SPDX-License-Identifier: MIT
"""Arrays of other packages: those evaluated block by block, and those with named axes.

No such package is imported here; before one of its arrays can arrive, it has been imported.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["InBlocksError", "blocks_of", "in_blocks"]

# The module and the classes of each package. The arrays of `_blocks/on_<package>.py` are here too.
_CLASSES = {
    "dask": ("dask.array", ("Array",)),
    "cubed": ("cubed", ("Array",)),
    "xarray": ("xarray", ("DataArray", "Dataset", "Variable")),
}


def blocks_of(leaf: Any) -> str | None:
    """Return the name of the package whose array a leaf is; None for anything else."""
    for package, (module, names) in _CLASSES.items():
        imported = sys.modules.get(module)
        if isinstance(leaf, tuple(getattr(imported, name, ()) for name in names)):
            return package
    return None


class InBlocksError(TypeError):
    """An array in blocks was passed where a JAX or NumPy array is expected.

    It is raised while the arguments of a call are bound, and the decorated kernel catches it, so
    that calls with other arrays pay nothing. Elsewhere, as in ``kernel.plan``, users see it.
    """


def in_blocks(package: str, name: str, path: str) -> InBlocksError:
    """Return the error that says why a function cannot take such an array."""
    if package == "xarray":
        what = (
            f"an xarray object; call rankax.xarray.apply({name}, ...), which finds the core "
            "dimensions by name, or pass its .data"
        )
    else:
        what = (
            f"a {package} array, whose blocks only a call of {name} itself evaluates; pass the "
            "shape of one block here, as a jax.ShapeDtypeStruct"
        )
    return InBlocksError(f"{name}(): {path} is {what}")
