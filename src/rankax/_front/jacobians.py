# SPDX-License-Identifier: MIT
"""``chunked_jacfwd``, ``chunked_jacrev`` and ``chunked_hessian``: derivatives of bounded memory.

A Jacobian is a batch of basis vectors, mapped through the linearized function: tangents of the
inputs give its columns, cotangents of the outputs its rows. What is mapped over is the number of a
basis vector, so the basis is not stored either.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from rankax._base.arrays import counted
from rankax._base.functions import function_name
from rankax._base.words import listed, plural
from rankax._call.mapping import bind_axes, checked_axes
from rankax._call.run import run
from rankax._fit.memory import shape_of
from rankax._front.chunked_reduce import chunked_reduce
from rankax._options import Options, options_of
from rankax._reduce.protocol import EachLeaf, Reduction
from rankax._reduce.row import index_dtype
from rankax._reduce.run import read_reductions
from rankax._reduce.sums import Gram, Weighted
from rankax._trace.derivatives import has_tangent

__all__ = ["chunked_hessian", "chunked_jacfwd", "chunked_jacrev"]

Leaves = list[Any]


@dataclasses.dataclass(frozen=True)
class _Jacobian:
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

    def image(self, number: jax.Array) -> Leaves:
        """Return the column or the row with this number; no leaf for integers in the inputs."""
        basis = self.x if self.columns else self.y
        one_hot = lax.iota(number.dtype, _size(basis)) == number
        pairs = zip(_split(one_hot, 0, basis), basis, strict=True)
        vector = [piece.astype(leaf.dtype) for piece, leaf in pairs]
        if self.columns:
            return jax.tree.leaves(self.linear(*vector))
        row = self.linear(self.y_tree.unflatten(vector))
        return [leaf for leaf, x in zip(row, self.x, strict=True) if has_tangent(x)]

    def mapped(self, item: Callable[..., Any], axis: int = 0, reduce: Any = None) -> Any:
        """Map a function of a number over all basis vectors."""
        count = _size(self.x if self.columns else self.y)
        numbers = counted(count, index_dtype(count))
        named = functools.wraps(self.fun, updated=())(lambda number: item(number))  # for errors
        axes = checked_axes(self.where, 0, None, axis)
        reductions = None if reduce is None else read_reductions(reduce, self.where)
        options = dataclasses.replace(self.options, reduce=reductions)
        return run(bind_axes(named, self.where, (numbers,), {}, axes), options)

    def whole(self, like: Any) -> Any:
        """Return the Jacobian, with the structure and the types of ``like``."""
        avals, structure = jax.tree.flatten(like)
        images = self.mapped(self.image, -1 if self.columns else 0)
        if self.columns:
            blocks = [block for image in images for block in _split(image, -1, self.x)]
        else:
            rest, none = iter(images), [None] * len(self.y)
            by_x = [_split(next(rest), 0, self.y) if has_tangent(x) else none for x in self.x]
            blocks = [block for of_y in zip(*by_x, strict=True) for block in of_y]
        return structure.unflatten(map(_like, blocks, avals))

    def reduced(self, reduce: str | Reduction) -> Any:
        """Return a reduction of the rows; there is no Jacobian."""
        if not all(map(has_tangent, self.x)):
            raise TypeError(f"{self.where}: reduce needs inputs of floats")
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
        weights = jnp.ones(count) if weights is None else _flat(weights)
        if weights.size != count:
            given = plural(weights.size, "weight")
            raise ValueError(f"{self.where}: Gram has {given} for {plural(count, 'output')}")
        if not self.columns:
            return self.mapped(lambda i: Weighted(self.image(i), weights[i]), reduce=Gram())
        transposed = jax.linear_transpose(self.linear, *self.x)

        def product(number: jax.Array) -> jax.Array:
            pairs = zip(self.image(number), _split(weights, 0, self.y), strict=True)
            column = [jnp.conj(leaf) * weight.astype(leaf.dtype) for leaf, weight in pairs]
            return _flat(transposed(self.y_tree.unflatten(column)))

        return self.mapped(product)


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
    if block is None:
        return jnp.zeros(aval.shape, aval.dtype)
    if aval.weak_type:  # an update keeps the type of the array
        return lax.full(aval.shape, aval.dtype.type(0).item()).at[...].set(block)
    return block.astype(aval.dtype)


def _jacobian(
    name: str,
    transform: functools.partial[Any],
    fun: Callable[..., Any],
    has_aux: bool,
    reduce: Any,
    **options: Any,
) -> Callable[..., Any]:
    """Return the Jacobian of ``fun`` as ``transform`` does: `jax.jacfwd` or `jax.jacrev`.

    JAX checks the arguments and says what the Jacobian is like: it transforms functions that return
    constants, and only shapes are traced.
    """
    transform(fun)
    where = f"{name}({function_name(fun)})"
    given = options_of(where, **options)
    if reduce is not None and not (isinstance(reduce, str) and reduce in ("diagonal", "trace")):
        reduce = read_reductions(reduce, where).prefix
        if not isinstance(reduce, Reduction):
            raise TypeError(f"{where}: reduce must be one reduction, which all inputs share")
    columns = transform.func is jax.jacfwd
    argnums, holomorphic = transform.keywords["argnums"], transform.keywords["holomorphic"]
    places = (argnums,) if isinstance(argnums, int) else argnums

    @functools.wraps(fun)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        def like(constant: Callable[[], Any]) -> Any:
            of_constant = transform(lambda *_, **__: constant())
            return jax.eval_shape(lambda: of_constant(*args, **kwargs))

        like(lambda: jnp.zeros((), complex if holomorphic else float))
        x, tree = jax.tree.flatten(tuple(args[place] for place in places))

        def of_leaves(*leaves: Any) -> Any:
            whole = list(args)
            for place, value in zip(places, tree.unflatten(leaves), strict=True):
                whole[place] = value
            return fun(*whole, **kwargs)

        linearize = jax.linearize if columns else jax.vjp
        y, linear, *aux = linearize(of_leaves, *x, has_aux=has_aux)
        y_leaves, y_tree = jax.tree.flatten(y)
        shapes = [*map(shape_of, x)], [*map(shape_of, y_leaves)]
        x_tree = jax.tree.structure(args[argnums]) if isinstance(argnums, int) else tree
        at_x = _Jacobian(fun, where, given, columns, *shapes, x_tree, y_tree, linear)
        wanted = like(lambda: y)
        result = at_x.whole(wanted) if reduce is None else at_x.reduced(reduce)
        return (result, *aux) if has_aux else result

    return jacobian


def chunked_jacfwd(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    reduce: Any = None,
    chunk_size: int | None = None,
    memory_limit: int | str | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
) -> Callable[..., Any]:
    r"""Jacobian of ``fun`` by columns, with at most ``chunk_size`` of them in flight.

    Equivalent to ::

        jax.jacfwd(fun, argnums, has_aux, holomorphic)

    but ``fun`` is linearized once, and the linear function maps chunks of basis vectors, which are
    made in the chunk. With ``reduce``, equivalent to a reduction of the rows of that Jacobian, but
    it is never stored. If ``J`` is the Jacobian as a matrix, with a row for each output and a
    column for each input::

        J.T @ J  # reduce="gram"
        J.T @ (weights[:, None] * J)  # reduce=rankax.reductions.Gram(weights)
        jnp.diagonal(J), jnp.trace(J)  # reduce="diagonal", "trace"
        J.sum(0), J.max(0)  # reduce="sum", "max" and so on

    Parameters
    ----------
    fun, argnums, has_aux, holomorphic
        As in `jax.jacfwd`.
    reduce : str or Reduction, optional
        How to reduce the rows. ``"gram"`` or ``Gram(weights)``: the Gram matrix of the flat
        vector of the inputs, in the order of `jax.flatten_util.ravel_pytree`, whose second result
        turns such a vector back into a tree; the weights are one for each output, in the structure
        of the outputs or flat. ``"diagonal"``, with the structure of the inputs, and ``"trace"``
        need outputs like the inputs. A name that `chunked_reduce` knows, or an object from
        `rankax.reductions`: a number, or what that reduction returns, for each input, with the
        structure of the inputs. Forward mode refuses those that need a whole row, as ``Fold``.
    chunk_size : int, optional
        The largest number of basis vectors in flight. ``None``: all, as in JAX.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries stay within this limit,
        those of a derivative included. See `auto_vmap`.
    progress : bool, str or callable, default False
        Show a bar of the basis vectors, as in `auto_vmap`.

    Returns
    -------
    callable
        Takes the arguments of ``fun``; returns the Jacobian, with the structure, shapes and dtypes
        of `jax.jacfwd`, or its reduction; with ``has_aux``, a pair of it and the auxiliary data.

    Raises
    ------
    TypeError, ValueError
        Those of `jax.jacfwd`, for the same arguments.
    TypeError
        ``reduce`` is a tree, or needs whole rows; an option has a wrong type.
    ValueError
        The outputs or the weights do not fit ``reduce``, or ``memory_limit`` is too small.

    See Also
    --------
    chunked_jacrev : By rows; better if there are fewer outputs than inputs.

    Notes
    -----
    *Memory.* What `jax.linearize` stores, the result, and one chunk: the columns in flight and the
    intermediate values of the linear function for them. With several arguments or leaves, the
    result is copied once.

    *Time.* Each column is one evaluation of the linear function. ``"gram"`` is two for each input,
    one of them transposed: forward mode is the better one if there are more outputs than inputs.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import chunked_jacfwd
    >>> def residuals(p):
    ...     return jnp.exp(-p[0] * jnp.linspace(0.0, 1.0, 1000)) - p[1]
    >>> chunked_jacfwd(residuals, chunk_size=1)(jnp.ones(2)).shape
    (1000, 2)
    >>> chunked_jacfwd(residuals, reduce="gram", chunk_size=1)(jnp.ones(2)).round()
    Array([[  81.,  264.],
           [ 264., 1000.]], dtype=float32)
    """
    transform = functools.partial(jax.jacfwd, argnums=argnums, holomorphic=holomorphic)
    options = {"chunk_size": chunk_size, "memory_limit": memory_limit, "progress": progress}
    return _jacobian("chunked_jacfwd", transform, fun, has_aux, reduce, **options)


def chunked_jacrev(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    reduce: Any = None,
    chunk_size: int | None = None,
    memory_limit: int | str | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
) -> Callable[..., Any]:
    r"""Jacobian of ``fun`` by rows, with at most ``chunk_size`` of them in flight.

    Equivalent to ::

        jax.jacrev(fun, argnums, has_aux, holomorphic, allow_int)

    but ``fun`` is evaluated once, and the chunks of basis vectors that are mapped through its
    `jax.vjp` are made in the chunk. With ``reduce``, equivalent to a reduction of the rows of that
    Jacobian, which is never stored.

    Parameters
    ----------
    fun, argnums, has_aux, holomorphic, allow_int
        As in `jax.jacrev`.
    reduce, chunk_size, memory_limit, progress
        As in `chunked_jacfwd`. Here, a reduction may also take a whole row: an item of ``Fold`` is
        the gradient of one output, with the structure of the inputs.

    Returns
    -------
    callable
        Takes the arguments of ``fun``; returns the Jacobian, with the structure, shapes and dtypes
        of `jax.jacrev`, or its reduction; with ``has_aux``, a pair of it and the auxiliary data.

    Raises
    ------
    TypeError, ValueError
        Those of `jax.jacrev` and of `chunked_jacfwd`.

    See Also
    --------
    chunked_jacfwd : By columns; better if there are fewer inputs than outputs.

    Notes
    -----
    *Memory.* What `jax.vjp` stores, the result, and one chunk: the rows in flight and the
    intermediate values of the reverse pass for them. With several outputs, the result is copied
    once.

    *Time.* Each row is one reverse pass. ``"gram"`` also multiplies each chunk of rows with itself.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import chunked_jacrev
    >>> def stencil(x):
    ...     return x[1:] * x[:-1]
    >>> chunked_jacrev(stencil, chunk_size=2)(jnp.arange(4.0))
    Array([[1., 0., 0., 0.],
           [0., 2., 1., 0.],
           [0., 0., 3., 2.]], dtype=float32)
    >>> chunked_jacrev(stencil, reduce="sum", chunk_size=2)(jnp.arange(4.0))
    Array([1., 2., 4., 2.], dtype=float32)
    """
    settings = {"argnums": argnums, "holomorphic": holomorphic, "allow_int": allow_int}
    transform = functools.partial(jax.jacrev, **settings)
    options = {"chunk_size": chunk_size, "memory_limit": memory_limit, "progress": progress}
    return _jacobian("chunked_jacrev", transform, fun, has_aux, reduce, **options)


def chunked_hessian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    reduce: Any = None,
    chunk_size: int | None = None,
    memory_limit: int | str | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
) -> Callable[..., Any]:
    r"""Hessian of ``fun``, with at most ``chunk_size`` columns in flight.

    Equivalent to ::

        jax.hessian(fun, argnums, has_aux, holomorphic)

    as `chunked_jacfwd` of `chunked_jacrev`, both in chunks. With ``reduce``, equivalent to a
    reduction of the rows of the Hessian of a scalar function; ``"trace"`` is its Laplacian.

    Parameters
    ----------
    fun, argnums, has_aux, holomorphic
        As in `jax.hessian`. With ``reduce``, ``fun`` must return a scalar.
    reduce, chunk_size, memory_limit, progress
        As in `chunked_jacfwd`.

    Returns
    -------
    callable
        Takes the arguments of ``fun``; returns the Hessian, with the structure, shapes and dtypes
        of `jax.hessian`, or its reduction; with ``has_aux``, a pair of it and the auxiliary data.

    Raises
    ------
    TypeError, ValueError
        Those of `jax.hessian` (with ``reduce``, of `jax.grad`) and of `chunked_jacfwd`.

    See Also
    --------
    chunked_jacfwd : What it does for the gradient.

    Notes
    -----
    *Memory.* What `jax.linearize` stores of the gradient, the result, and one chunk.

    *Time.* Each column is one evaluation of the linearized gradient.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import chunked_hessian
    >>> def potential(x):
    ...     return jnp.sum(x**3)
    >>> chunked_hessian(potential, reduce="trace", chunk_size=10)(jnp.ones(50))  # the Laplacian
    Array(300., dtype=float32)
    """
    options = {"chunk_size": chunk_size, "memory_limit": memory_limit}
    if reduce is None:
        inner = chunked_jacrev(fun, argnums, has_aux, holomorphic, **options)
    else:
        inner = jax.grad(fun, argnums, has_aux, holomorphic)
    transform = functools.partial(jax.jacfwd, argnums=argnums, holomorphic=holomorphic)
    options["progress"] = progress
    return _jacobian("chunked_hessian", transform, inner, has_aux, reduce, **options)
