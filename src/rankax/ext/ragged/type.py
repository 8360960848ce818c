# SPDX-License-Identifier: MIT
"""Ragged arguments: items of different lengths, as one flat array and the lengths; their mask."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from rankax.core.base.messages import plural


@dataclasses.dataclass(frozen=True, repr=False)
class Lengths:
    """Lengths as they are compared and hashed: part of the structure of a pytree."""

    of_64_bits: bytes

    def __repr__(self) -> str:
        return plural(len(self.of_64_bits) // 8, "length")


@jax.tree_util.register_pytree_with_keys_class
class Ragged:
    """Items of different lengths: one flat array with the rows of all items, and the lengths.

    ``Ragged(values, lengths)`` holds ``len(lengths)`` items; the first ``lengths[0]`` rows of
    ``values`` belong to the first item, and so on. Pass it to a kernel of `auto_vmap` for an
    argument whose first core dimension has a name, such as ``x="n 3"``. The batch then has one axis
    of ``len(lengths)`` items.

    Parameters
    ----------
    values : array
        The rows of all items, one item after another, on axis 0.
    lengths : sequence of int
        How many rows each item has; 0 is allowed. They must be known when the call is made, so an
        array inside `jax.jit` is refused.

    Attributes
    ----------
    values : array
    lengths : numpy.ndarray

    Raises
    ------
    TypeError
        If the lengths are not integers, or are traced.
    ValueError
        If a length is negative, or the lengths do not add up to the rows of ``values``.

    Notes
    -----
    *Pytrees.* ``values`` is a leaf, and the lengths belong to the structure, so `jax.grad` returns
    a ``Ragged`` of the same lengths, and a function under `jax.jit` is compiled again for other
    lengths. A kernel with ``jit=True`` is not.

    *Padding.* A kernel sees one item, padded with copies of its last row to one of at most twelve
    lengths; an item without rows gets zeros. So values and derivatives must not depend on the
    copies, which `Mask` marks, and must be finite there: `jax.numpy.where` after a function keeps
    NaN out of its values, but not out of its derivatives. ``kernel.check`` finds kernels that
    depend on the copies.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from rankax import Mask, Ragged, auto_vmap
    >>> x = Ragged(jnp.arange(6.0), [3, 1, 2])
    >>> @auto_vmap(x="n", mask=Mask("n"))
    ... def mean(x, mask):
    ...     return jnp.mean(x, where=mask)
    >>> mean(x)
    Array([1. , 3. , 4.5], dtype=float32)
    """

    values: Any
    lengths: np.ndarray[Any, Any]

    def __init__(self, values: Any, lengths: Any) -> None:
        self.values = values if hasattr(values, "shape") else np.asarray(values)
        self.lengths = _checked_lengths(lengths)
        self.lengths.flags.writeable = False
        if not self.values.shape:
            raise ValueError(
                "Ragged: values must have the rows of all items on axis 0, got a number"
            )
        rows, total = self.values.shape[0], int(self.lengths.sum())
        if rows != total:
            raise ValueError(
                f"Ragged: the lengths of {plural(len(self), 'item')} add up to {total}, but values "
                f"has {plural(rows, 'row')}"
            )

    @classmethod
    def from_list(cls, arrays: Sequence[Any]) -> Ragged:
        """Return the items of a list of arrays, which differ at most in the length of axis 0."""
        arrays = [x if hasattr(x, "shape") else np.asarray(x) for x in arrays]
        if not arrays:
            raise ValueError(
                "Ragged.from_list: an empty list does not say what a row is; use Ragged(values, [])"
            )
        first = arrays[0]
        for i, array in enumerate(arrays):
            if not array.shape:
                raise ValueError(f"Ragged.from_list: item {i} is a number, not an array of rows")
            if array.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"Ragged.from_list: item {i} has shape {array.shape}, but item 0 has "
                    f"{first.shape}; items may differ only in the length of axis 0"
                )
        on_host = all(isinstance(array, np.ndarray) for array in arrays)
        values = (np if on_host else jnp).concatenate(arrays)
        return cls(values, [array.shape[0] for array in arrays])

    @property
    def starts(self) -> np.ndarray[Any, Any]:
        """Where each item begins in ``values``."""
        return np.cumsum(self.lengths) - self.lengths

    def to_list(self) -> list[Any]:
        """Return the items as NumPy arrays; inside a transformation of JAX, as slices."""
        values = self.values
        is_key = jnp.issubdtype(values.dtype, jax.dtypes.extended)
        if not (is_key or isinstance(values, core.Tracer)):
            values = np.asarray(values)
        pairs = zip(self.starts.tolist(), self.lengths.tolist(), strict=True)
        return [values[start : start + length] for start, length in pairs]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, item: int) -> Any:
        """Return the rows of one item, a part of ``values``."""
        try:
            at = range(len(self))[operator.index(item)]
        except TypeError:
            if isinstance(item, tuple) and any(i is None for i in item):
                raise TypeError(
                    "Ragged: [:, None] would add a batch axis, but a Ragged has only that of its "
                    "items; put other axes in front in the other arguments. For all pairs of "
                    "ragged items, pass one of the two sets as a dense array, others[:, None], and "
                    "its lengths[:, None] as an argument of rank 0"
                ) from None
            raise TypeError(
                f"Ragged: an index is the number of an item, got {item!r}; index values for rows, "
                "lengths for several items, and put other axes of a batch in front in the other "
                "arguments"
            ) from None
        end = int(self.lengths[: at + 1].sum())
        return self.values[end - int(self.lengths[at]) : end]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_list())

    def __repr__(self) -> str:
        return f"Ragged({span(self.lengths)}, {self.values.dtype}{list(self.values.shape)})"

    def tree_flatten_with_keys(self) -> Any:
        """Return the values as the only child, and the lengths."""
        lengths = Lengths(self.lengths.tobytes())
        return [(jax.tree_util.GetAttrKey("values"), self.values)], lengths

    @classmethod
    def tree_unflatten(cls, lengths: Lengths, children: Sequence[Any]) -> Self:
        """Return items whose values may be anything, as JAX asks for."""
        ragged = object.__new__(cls)
        (ragged.values,) = children
        ragged.lengths = np.frombuffer(lengths.of_64_bits, np.int64)
        return ragged


def span(lengths: np.ndarray[Any, Any]) -> str:
    """Return how many items there are, and how long: ``83 items of 1 to 59 rows``."""
    items = plural(len(lengths), "item")
    if not len(lengths):
        return items
    least, most = int(lengths.min()), int(lengths.max())
    return f"{items} of {f'{least} to ' if least < most else ''}{plural(most, 'row')}"


def _checked_lengths(lengths: Any) -> np.ndarray[Any, Any]:
    if isinstance(lengths, core.Tracer):
        raise TypeError(
            "Ragged: the lengths are traced, but they must be known when the call is made; pass "
            "NumPy integers from outside jax.jit, or pass the whole Ragged to the jitted function"
        )
    array = np.asarray(lengths)
    if not array.size and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"Ragged: lengths must be a sequence of ints, one for each item, got {array.dtype} of "
            f"shape {array.shape}"
        )
    if array.min() < 0:
        first = int(np.argmax(array < 0))
        raise ValueError(f"Ragged: item {first} has the length {int(array[first])}")
    return array.astype(np.int64)  # a copy, since the caller may change theirs


def is_ragged(node: Any) -> TypeGuard[Ragged]:
    """Whether a node of a pytree holds ragged items."""
    return isinstance(node, Ragged)
