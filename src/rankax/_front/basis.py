# SPDX-License-Identifier: MIT
"""A Jacobian as a batch of basis vectors, mapped through the linearized function.

Tangents of the inputs give its columns, cotangents of the outputs its rows. What is mapped over is
the number of a basis vector, so the basis is not stored either.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from rankax._base.arrays import counted, has_tangent, index_dtype
from rankax._base.words import listed, plural
from rankax._call.mapping import bind_axes, checked_axes
from rankax._call.run import run
from rankax._front.chunked_reduce import chunked_reduce
from rankax._options import Options
from rankax._reduce.protocol import EachLeaf, Reduction
from rankax._reduce.run import read_reductions
from rankax._reduce.states import fill
from rankax._reduce.sums import Gram, WeightedGram
from rankax._trace.programs import evaluate_wide

Leaves = list[Any]


@dataclasses.dataclass(frozen=True)
class Jacobian:
    """A function, linearized at a point: its ``columns`` from tangents, or else rows."""

    fun: Callable[..., Any]
    where: str
    options: Options
    columns: bool
    x: Leaves  # shapes
    y: Leaves
    x_tree: Any
    y_tree: Any
    linear: Callable[..., Any]  # as `jax.linearize` or `jax.vjp` returns it

    @property
    def basis(self) -> Leaves:
        """What basis vectors are like."""
        return self.x if self.columns else self.y

    @property
    def others(self) -> Leaves:
        """What their images are like."""
        return self.y if self.columns else self.x

    def image(self, number: jax.Array) -> Leaves:
        """Return the column or the row with this number, without leaves of integers."""
        one_hot = lax.iota(number.dtype, _size(self.basis)) == number
        pairs = zip(_split(one_hot, 0, self.basis), self.basis, strict=True)
        vector = [piece.astype(leaf.dtype) for piece, leaf in pairs]
        image = self.linear(*(vector if self.columns else [self.y_tree.unflatten(vector)]))
        pairs = zip(jax.tree.leaves(image), self.others, strict=True)
        return [leaf for leaf, other in pairs if has_tangent(other)]

    def mapped(self, item: Callable[..., Any], axis: int = 0, reduce: Any = None) -> Any:
        """Map a function of a number over all basis vectors."""
        count = _size(self.basis)
        numbers = counted(count, index_dtype(count))
        named = functools.wraps(self.fun, updated=())(lambda number: item(number))  # for errors
        axes = checked_axes(self.where, 0, None, axis)
        reductions = None if reduce is None else read_reductions(reduce, self.where)
        options = dataclasses.replace(self.options, reduce=reductions)
        return run(bind_axes(named, self.where, (numbers,), {}, axes), options)

    def whole(self, like: Any) -> Any:
        """Return the Jacobian, with the structure and the types of ``like``."""
        avals, structure = jax.tree.flatten(like)
        axis = -1 if self.columns else 0
        images = iter(self.mapped(self.image, axis))
        blocks = [
            _split(next(images), axis, self.basis)
            if has_tangent(other)
            else [None] * len(self.basis)
            for other in self.others
        ]
        by_output = blocks if self.columns else zip(*blocks, strict=True)
        pairs = zip((block for row in by_output for block in row), avals, strict=True)
        return structure.unflatten(_like(block, aval) for block, aval in pairs)

    def reduced(self, reduce: str | Reduction) -> Any:
        """Return a reduction of the rows; there is no Jacobian."""
        if not all(map(has_tangent, [*self.x, *self.y])):
            raise TypeError(f"{self.where}: reduce needs inputs and outputs of floats")
        if isinstance(reduce, str):
            return self.diagonal(reduce)
        if isinstance(reduce, Gram):
            return self.gram(reduce.weights)
        if not self.columns:
            return self.mapped(lambda i: self.x_tree.unflatten(self.image(i)), reduce=reduce)
        if not isinstance(reduce, EachLeaf):
            raise TypeError(
                f"{self.where}: {reduce.name} takes whole rows, and forward mode has columns; use "
                "chunked_jacrev"
            )
        of_column = chunked_reduce(lambda out: out, reduce, None)
        of_x = self.mapped(lambda i: of_column(_flat(self.image(i))), -1)
        pieces = jax.tree.map(lambda array: _split(array, -1, self.x), of_x)
        trees = jax.tree.transpose(jax.tree.structure(of_x), jax.tree.structure(self.x), pieces)
        return self.x_tree.unflatten(trees)

    def diagonal(self, reduce: str) -> Any:
        """Return the diagonal with the structure of the inputs, or its sum, the trace."""
        x, y = ([leaf.shape for leaf in leaves] for leaves in (self.x, self.y))
        if (x, self.x_tree) != (y, self.y_tree):
            raise ValueError(
                f"{self.where}: {reduce!r} needs outputs with the structure and the shapes of the "
                f"inputs, got {listed([*map(str, y)])} for {listed([*map(str, x)])}"
            )

        def entry(number: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(_flat(self.image(number)), number, keepdims=False)

        if reduce == "trace":
            return self.mapped(entry, reduce="sum")
        return self.x_tree.unflatten(_split(self.mapped(entry), 0, self.x))

    def gram(self, weights: Any) -> Any:
        """Return the Gram matrix of the columns: the sum over the rows of their outer products."""
        count = _size(self.y)
        weights = fill(1, jnp.float32, (count,)) if weights is None else _flat(weights)
        if weights.size != count:
            given = plural(weights.size, "weight")
            raise ValueError(f"{self.where}: Gram has {given} for {plural(count, 'output')}")
        dtype = jax.eval_shape(_flat, self.y if self.columns else self.x).dtype
        if not any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in self.x):
            dtype = jnp.finfo(dtype).dtype
        if not count:
            return fill(0, dtype, (_size(self.x),) * 2)
        if not self.columns:
            return self.mapped(lambda i: (self.image(i), weights[i]), reduce=WeightedGram())
        wide = [jax.ShapeDtypeStruct(x.shape, _wider(x.dtype, dtype)) for x in self.x]
        linear = jax.make_jaxpr(self.linear)(*self.x)
        transposed = jax.linear_transpose(
            lambda *x: self.y_tree.unflatten(evaluate_wide(linear.jaxpr, linear.consts, x)), *wide
        )

        def product(number: jax.Array) -> jax.Array:
            pairs = zip(self.image(number), _split(weights, 0, self.y), strict=True)
            column = [jnp.conj(leaf) * weight.astype(leaf.dtype) for leaf, weight in pairs]
            return _flat(transposed(self.y_tree.unflatten(column))).astype(dtype)

        return self.mapped(product)


def _wider(first: Any, second: Any) -> Any:
    return max(first, second, key=lambda dtype: jnp.finfo(dtype).bits)


def _flat(tree: Any) -> jax.Array:
    return ravel_pytree(tree)[0]


def _size(shapes: Leaves) -> int:
    return sum(math.prod(leaf.shape) for leaf in shapes)


def _split(array: jax.Array, axis: int, shapes: Leaves) -> Leaves:
    """Cut the first or the last axis, where leaves follow each other, and give it their shapes."""
    stops = np.cumsum([math.prod(leaf.shape) for leaf in shapes])
    pieces = zip(jnp.split(array, stops[:-1], axis), shapes, strict=True)
    before, after = (array.shape[:-1], ()) if axis else ((), array.shape[1:])
    return [jnp.reshape(piece, (*before, *leaf.shape, *after)) for piece, leaf in pieces]


def _like(block: Any, aval: Any) -> jax.Array:
    """Return a block with the type that JAX gives it, which may be weak; zeros for None."""
    if block is not None and not aval.weak_type:
        return block.astype(aval.dtype)
    fill = aval.dtype.type(0).item() if aval.weak_type else jnp.zeros((), aval.dtype)
    zeros = lax.full(aval.shape, fill)
    return zeros if block is None else zeros.at[...].set(block)  # an update keeps the type
