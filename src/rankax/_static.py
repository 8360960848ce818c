# SPDX-License-Identifier: MIT
"""A hashable value that is part of a pytree's structure instead of a leaf."""

import dataclasses
from typing import Generic, TypeVar

import jax

T = TypeVar("T")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static(Generic[T]):
    """Carry a compile-time constant inside a pytree.

    Equivalent to naming the value in ``static_argnums``, but at any depth of a pytree::

        jax.jit(f, static_argnums=1)(x, n)
        jax.jit(lambda x, s: f(x, s.value))(x, Static(n))

    A ``Static`` has no leaves, so `jax.jit`, `jax.vmap`, `jax.lax.scan`, `jax.grad` and
    `auto_vmap` carry it as part of the tree's structure. A function under `jax.jit` is compiled
    again for each new value, and sees the plain Python value.

    Parameters
    ----------
    value : hashable
        Any hashable Python object. Two ``Static`` are equal when their values are equal.

    Raises
    ------
    TypeError
        If ``value`` cannot be hashed: a list, a dict, an array.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import Static
    >>> @jax.jit
    ... def smooth(x, options):
    ...     for _ in range(options["passes"].value):  # unrolled: known while tracing
    ...         x = 0.5 * (x + jnp.roll(x, 1))
    ...     return x
    >>> smooth(jnp.array([0.0, 4.0]), {"passes": Static(3)})
    Array([2., 2.], dtype=float32)
    >>> jax.tree.leaves(Static("anything hashable"))
    []
    """

    value: T

    def __post_init__(self) -> None:
        try:
            hash(self.value)
        except TypeError as error:
            raise TypeError(
                f"Static(value) needs a hashable value, got {type(self.value).__name__}: a "
                "compile-time constant is looked up by its hash. Pass a tuple for a list, a "
                "frozenset for a set; pass an array as an ordinary leaf."
            ) from error
