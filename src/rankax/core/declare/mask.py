# SPDX-License-Identifier: MIT
"""The rank `Mask`: a parameter that says which rows of a dimension are real."""

import dataclasses
from typing import Any

from rankax.core.declare.dims import Dim, Rank


@dataclasses.dataclass(frozen=True)
class Mask:
    """The rank of a parameter that says which rows are real; callers do not pass it.

    A parameter of rank ``Mask("n")`` is the boolean array of shape ``(n,)`` that is False for the
    rows that pad an item of a `Ragged` argument. For dense arrays, it is True everywhere. Use it as
    a rank, ``mask=Mask("n")``, or in an annotation,
    ``mask: Annotated[Bool[Array, "n"], Mask("n")]``. The first core dimension of
    another parameter must have the same name.

    Parameters
    ----------
    name : str
        The name of the dimension.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from rankax import Mask, auto_vmap
    >>> @auto_vmap(x="n", mask=Mask("n"))
    ... def count(x, mask):
    ...     return mask.sum()
    >>> count(jnp.ones((2, 5)))
    Array([5, 5], dtype=int32)
    """

    name: str

    def __post_init__(self) -> None:
        name: Any = self.name
        if not (isinstance(name, str) and name.isidentifier()):
            raise TypeError(
                f"Mask takes the name of a dimension, as in Mask('n'), got {self.name!r}"
            )


def mask_rank(mask: Mask) -> Rank:
    """Return the normal form of a `Mask`."""
    return Rank(1, (Dim(mask.name, name=mask.name),), is_mask=True)
