# SPDX-License-Identifier: MIT
"""Lengths that are not known: with `jax.export`, a dimension may be an expression such as ``4*k``.

It is no int, and to compare it is an error where not all of its values agree.
"""

from typing import Any

import jax
import jax.export


def is_known(size: Any) -> bool:
    """Whether a length is a number."""
    return isinstance(size, int) or not jax.export.is_symbolic_dim(size)


def at_most(size: Any, bound: Any) -> bool:
    """Whether a length is at most so large; not if that is unknown."""
    try:
        return bool(size <= bound)
    except jax.errors.InconclusiveDimensionOperation:
        return False
