# SPDX-License-Identifier: MIT
"""Arrays of other packages: evaluated block by block (dask, cubed), or with named axes (xarray).

None of these packages is imported here. An array of a package can only arrive after the caller has
imported that package.
"""

import sys
from typing import Any

# The module and the classes of each package; `rankax.stream` counts as one.
_CLASSES = {
    "dask": ("dask.array", "Array"),
    "cubed": ("cubed", "Array"),
    "xarray": ("xarray", "DataArray", "Dataset", "Variable"),
    "streamed": ("rankax.stream._stages", "Streamed"),
}


def blocks_of(leaf: Any) -> str | None:
    """Return the name of the package whose array a leaf is, or None."""
    for package, (path, *names) in _CLASSES.items():
        module = sys.modules.get(path)  # `getattr` copes with one that is only half imported
        if isinstance(leaf, tuple(getattr(module, n) for n in names if hasattr(module, n))):
            return package
    return None


def in_blocks(package: str, name: str, path: str) -> TypeError:
    """Return the error that says why a function cannot take an array of ``package`` directly."""
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
    return TypeError(f"{name}(): {path} is {what}")
