# SPDX-License-Identifier: MIT
"""``chunked_jacfwd``, ``chunked_jacrev`` and ``chunked_hessian``: derivatives of bounded memory.

A Jacobian is a batch of basis vectors, mapped through the linearized function: tangents of the
inputs give its columns, cotangents of the outputs its rows. What is mapped over is the number of a
basis vector, so the basis is not stored either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from rankax._front.chunked import chunked_reduce, function_of_batches
from rankax._options import given_options
from rankax.core.base.arrays import as_weak, counted, has_tangent, index_dtype, zeros_of
from rankax.core.base.cache import Kept
from rankax.core.base.messages import (
    argument_names,
    function_name,
    listed,
    noted_errors,
    plural,
    refuses_jit,
)
from rankax.core.base.trees import leaves_with_names, type_name
from rankax.core.loop.loop import as_varying, varying_axes
from rankax.core.reduce.protocol import EachLeaf, Reduction
from rankax.core.reduce.row import fill
from rankax.core.trace.programs import with_shape
from rankax.ext.devices.place import DevicesOption
from rankax.ext.progress import ProgressOption
from rankax.ext.reductions.read import read_reductions
from rankax.ext.reductions.sums import Gram, WeightedGram
from rankax.ext.wide import evaluate_wide

Leaves = list[Any]

config: Any = jax.config
_types: Kept[Any] = Kept(1024, "types of Jacobians")
_OF_SQUARES = ("diagonal", "trace")  # reductions of a Jacobian, besides those of any batch


def _jacobian(
    caller: str,
    transform: functools.partial[Any],
    fun: Callable[..., Any],
    has_aux: bool,
    reduce: Any,
    **given: Any,
) -> Callable[..., Any]:
    """Return the Jacobian of ``fun`` as ``transform`` does: `jax.jacfwd` or `jax.jacrev`.

    JAX checks the arguments and says what the Jacobian is like: it transforms functions that return
    constants, and only shapes are traced, which is not done again for the same types.
    """
    site = f"{caller}({function_name(fun)})"
    given = given_options(site, **given)
    transform(fun)
    if reduce is not None and not (isinstance(reduce, str) and reduce in _OF_SQUARES):
        found = read_reductions(reduce, site, _OF_SQUARES)
        if not jax.tree_util.treedef_is_leaf(found.structure):
            raise TypeError(f"{site}: reduce must be one reduction, which all inputs share")
        (reduce,) = found.entries
    columns = transform.func is jax.jacfwd
    argnums, holomorphic = transform.keywords["argnums"], transform.keywords["holomorphic"]
    places = (argnums,) if isinstance(argnums, int) else argnums

    @functools.wraps(fun)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        def like(constant: Callable[[], Any], *types: Any) -> Any:
            """Return what a Jacobian is like whose outputs have these types."""

            def make() -> Any:
                of_constant = transform(lambda *_, **__: constant())
                return jax.eval_shape(lambda: of_constant(*args, **kwargs))

            try:
                x, tree = jax.tree.flatten(tuple(args[place] for place in places))
                where: Any = jax.sharding.get_abstract_mesh(), config.jax_enable_x64
                given = transform.func, *transform.keywords.values(), len(args), tree, *where
                key = *given, *map(jax.typeof, x), *types
                hash(key)
            except (TypeError, IndexError):  # they have no types, or cannot be compared
                return make()
            return _types.get_or_make(key, make)

        like(lambda: jnp.zeros((), complex if holomorphic else float))
        x, tree = jax.tree.flatten(tuple(args[place] for place in places))

        def of_leaves(*leaves: Any) -> Any:
            whole = list(args)
            for place, value in zip(places, tree.unflatten(leaves), strict=True):
                whole[place] = value
            with noted_errors(fun, lambda: _described(fun, args, kwargs)):
                return fun(*whole, **kwargs)

        linearize = jax.linearize if columns else jax.vjp
        y, linear, *aux = linearize(of_leaves, *x, has_aux=has_aux)
        y_leaves, y_tree = jax.tree.flatten(y)
        x_shapes, y_shapes = [*map(_type, x)], [*map(_type, y_leaves)]
        x_tree = jax.tree.structure(args[argnums]) if isinstance(argnums, int) else tree
        at_x = _Jacobian(fun, site, given, columns, x_shapes, y_shapes, x_tree, y_tree, linear)
        result = (
            at_x.whole(like(lambda: y, y_tree, *map(jax.typeof, y_leaves)))
            if reduce is None
            else at_x.reduced(reduce)
        )
        return (result, *aux) if has_aux else result

    return jacobian


def _described(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Describe the arguments, for an error of the function."""
    named = [*zip(argument_names(fun, len(args)), args, strict=True), *kwargs.items()]
    leaves = [pair for name, value in named for pair in leaves_with_names(value, name)]
    return ("argument", "type"), [(path, type_name(leaf)) for path, leaf in leaves], ()


@dataclasses.dataclass(eq=False)
class _Jacobian:
    """A function, linearized at a point: its ``columns`` from tangents, or else rows."""

    fun: Callable[..., Any]
    site: str
    given: Mapping[str, Any]  # the options
    columns: bool
    x: Leaves  # types
    y: Leaves
    x_tree: Any
    y_tree: Any
    linear: Callable[..., Any]  # as `jax.linearize` or `jax.vjp` returns it

    def __post_init__(self) -> None:
        # Basis vectors have the shapes of the former, and their images those of the latter.
        self.basis, self.others = (self.x, self.y) if self.columns else (self.y, self.x)

    def image(self, number: jax.Array) -> Leaves:
        """Return the column or the row with this number, without leaves of integers."""
        one_hot = lax.iota(number.dtype, _size(self.basis)) == number
        pairs = zip(_split(one_hot, 0, self.basis), self.basis, strict=True)
        vector = [as_varying(x.astype(leaf.dtype), varying_axes(leaf)) for x, leaf in pairs]
        image = self.linear(*(vector if self.columns else [self.y_tree.unflatten(vector)]))
        pairs = zip(jax.tree.leaves(image), self.others, strict=True)
        return [leaf for leaf, other in pairs if has_tangent(other)]

    def over_basis(self, item: Callable[..., Any], axis: int = 0, reduce: Any = None) -> Any:
        """Map a function of a number over all basis vectors."""
        count = _size(self.basis)
        numbers = counted(count, index_dtype(count))
        named = functools.wraps(self.fun, updated=())(lambda number: item(number))  # for errors
        reductions = None if reduce is None else read_reductions(reduce, self.site)
        given = {**self.given, "reduce": reductions}
        return function_of_batches(named, self.site, given, out_axes=axis)(numbers)

    def whole(self, like: Any) -> Any:
        """Return the Jacobian, with the structure and the types of ``like``."""
        avals, structure = jax.tree.flatten(like)
        axis = -1 if self.columns else 0
        images = iter(self.over_basis(self.image, axis))
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
            raise TypeError(f"{self.site}: reduce needs inputs and outputs of floats")
        if isinstance(reduce, str):
            return self.diagonal(reduce)
        if isinstance(reduce, Gram):
            if reduce.center:
                raise ValueError(f"{self.site}: {reduce.name} is not for rows of a Jacobian")
            return self.gram(reduce.weights)
        if not self.columns:
            return self.over_basis(lambda i: self.x_tree.unflatten(self.image(i)), reduce=reduce)
        if not isinstance(reduce, EachLeaf):
            raise TypeError(
                f"{self.site}: {reduce.name} takes whole rows, but forward mode has columns; use "
                "chunked_jacrev"
            )
        of_column = chunked_reduce(lambda out: out, reduce, None)
        of_x = self.over_basis(lambda i: of_column(_flat(self.image(i))), -1)
        pieces = jax.tree.map(lambda array: _split(array, -1, self.x), of_x)
        trees = jax.tree.transpose(jax.tree.structure(of_x), jax.tree.structure(self.x), pieces)
        return self.x_tree.unflatten(trees)

    def diagonal(self, reduce: str) -> Any:
        """Return the diagonal with the structure of the inputs, or its sum, the trace."""
        x, y = ([leaf.shape for leaf in leaves] for leaves in (self.x, self.y))
        if (x, self.x_tree) != (y, self.y_tree):
            raise ValueError(
                f"{self.site}: {reduce!r} needs outputs with the structure and the shapes of the "
                f"inputs, got {listed([*map(str, y)])} for {listed([*map(str, x)])}"
            )

        def entry(number: jax.Array) -> jax.Array:
            column = _flat(self.image(number))
            if not column.size:  # traced, but evaluated for no column
                return jnp.sum(column)
            return lax.dynamic_index_in_dim(column, number, keepdims=False)

        if reduce == "trace":
            return self.over_basis(entry, reduce="sum")
        return self.x_tree.unflatten(_split(self.over_basis(entry), 0, self.x))

    def gram(self, weights: Any) -> Any:
        """Return the Gram matrix of the columns: the sum over the rows of their outer products."""
        count = _size(self.y)
        weights = fill(1, jnp.float32, (count,)) if weights is None else _flat(weights)
        if weights.size != count:
            given = plural(weights.size, "weight")
            raise ValueError(f"{self.site}: Gram has {given} for {plural(count, 'output')}")
        dtype = jax.eval_shape(_flat, self.y if self.columns else self.x).dtype
        if not any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in self.x):
            dtype = jnp.finfo(dtype).dtype
        if not count:
            return fill(0, dtype, (_size(self.x),) * 2)
        if not self.columns:
            return self.over_basis(lambda i: (self.image(i), weights[i]), reduce=WeightedGram())
        wide = [x.update(dtype=max(x.dtype, dtype, key=_bits)) for x in self.x]
        linear = jax.make_jaxpr(self.linear)(*self.x)
        transposed = jax.linear_transpose(
            lambda *x: self.y_tree.unflatten(evaluate_wide(linear.jaxpr, linear.consts, x)), *wide
        )

        def product(number: jax.Array) -> jax.Array:
            pairs = zip(self.image(number), _split(weights, 0, self.y), strict=True)
            column = [jnp.conj(leaf) * weight.astype(leaf.dtype) for leaf, weight in pairs]
            return _flat(transposed(self.y_tree.unflatten(column))).astype(dtype)

        return self.over_basis(product)


def _type(value: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an array or a number, also inside `jax.shard_map`."""
    aval = jax.typeof(value)
    return with_shape(aval, aval.shape)


def _bits(dtype: Any) -> int:
    return jnp.finfo(dtype).bits


def _flat(tree: Any) -> jax.Array:
    return ravel_pytree(tree)[0]


def _size(shapes: Leaves) -> int:
    return sum(leaf.size for leaf in shapes)


def _split(array: jax.Array, axis: int, shapes: Leaves) -> Leaves:
    """Cut the first or the last axis, where leaves follow each other, and give it their shapes."""
    stops = np.cumsum([leaf.size for leaf in shapes])
    pieces = zip(jnp.split(array, stops[:-1], axis), shapes, strict=True)
    before, after = (array.shape[:-1], ()) if axis else ((), array.shape[1:])
    return [jnp.reshape(piece, (*before, *leaf.shape, *after)) for piece, leaf in pieces]


def _like(block: Any, aval: Any) -> jax.Array:
    """Return a block with the type that JAX gives it, which may be weak; zeros for None."""
    if block is None:
        return zeros_of(aval, aval.shape)
    return as_weak(block.astype(aval.dtype), aval)


@refuses_jit
def chunked_jacfwd(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    reduce: Any = None,
    chunk_size: int | None = None,
    memory_limit: int | str | None = None,
    progress: ProgressOption | None = None,
    devices: DevicesOption = None,
) -> Callable[..., Any]:
    r"""Evaluate the Jacobian of ``fun`` column by column, with few of them in flight.

    Equivalent to ::

        jax.jacfwd(fun, argnums, has_aux, holomorphic)

    but ``fun`` is linearized once, and its linear map is applied to chunks of basis vectors, which
    are made in the chunk. With ``reduce``, the rows of the Jacobian are reduced, and it is never
    stored. If ``J`` is the Jacobian as a matrix, with a row for each output and a column for each
    input, equivalent to ::

        J.T @ J  # reduce="gram"
        J.T @ (weights[:, None] * J)  # reduce=rankax.reductions.Gram(weights)
        jnp.diagonal(J), jnp.trace(J)  # reduce="diagonal", "trace"
        J.sum(0), J.max(0)  # reduce="sum", "max" and so on

    Parameters
    ----------
    fun, argnums, has_aux, holomorphic
        As in `jax.jacfwd`.
    reduce : str or Reduction, optional
        How to reduce the rows.

        ``"gram"`` or ``Gram(weights)`` returns a matrix with a row and a column for each number of
        the inputs, in the order of `jax.flatten_util.ravel_pytree`, whose second result turns a
        vector of that order back into a tree. It has the dtype of ``J``. There is a weight for
        each output, in the structure of the outputs or flat. Complex rows are conjugated on the
        left, as in ``J.conj().T @ J``; for real inputs, this is the real part of that matrix.

        ``"diagonal"``, which has the structure of the inputs, and ``"trace"`` need outputs with the
        structure and the shapes of the inputs.

        Any other reduction, a name or an object from `rankax.reductions`, returns one result for
        each number of the inputs, with their structure. Reductions that take a whole row, such as
        ``Fold`` and ``Best``, are for `chunked_jacrev`.
    chunk_size : int, optional
        The largest number of basis vectors in flight. ``None``: all of them, as in JAX.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries stay within this limit,
        including the temporaries of a derivative. See `auto_vmap`.
    progress : bool, str, callable or observer, default False
        Show a bar of the basis vectors, as in `auto_vmap`.
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the basis vectors, as in `chunked_vmap`.

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
        ``reduce`` is a tree, takes whole rows, or is used with inputs or outputs that are not
        floats; or an option has the wrong type.
    ValueError
        The outputs or the weights do not fit ``reduce``, or ``memory_limit`` is too small.

    See Also
    --------
    chunked_jacrev : By rows; better if there are fewer outputs than inputs.

    Notes
    -----
    *Memory.* What `jax.linearize` stores, the result, and one chunk: the columns in flight and the
    intermediate values of the linear map for them. With several leaves in the inputs, the result is
    copied once.

    *Time.* Each column is one evaluation of the linear map. ``"gram"`` takes two for each input,
    one of them transposed, so ``fun`` must have a derivative in reverse mode, too.

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
    memory = {"chunk_size": chunk_size, "memory_limit": memory_limit}
    others = {"progress": progress, "devices": devices}
    return _jacobian("chunked_jacfwd", transform, fun, has_aux, reduce, **memory, **others)


@refuses_jit
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
    progress: ProgressOption | None = None,
    devices: DevicesOption = None,
) -> Callable[..., Any]:
    r"""Evaluate the Jacobian of ``fun`` row by row, with few of them in flight.

    Equivalent to ::

        jax.jacrev(fun, argnums, has_aux, holomorphic, allow_int)

    but the `jax.vjp` of ``fun`` is applied to chunks of basis vectors, which are made in the chunk.
    With ``reduce``, the rows are reduced as in `chunked_jacfwd`, and the Jacobian is never stored.

    Parameters
    ----------
    fun, argnums, has_aux, holomorphic, allow_int
        As in `jax.jacrev`.
    reduce, chunk_size, memory_limit, progress, devices
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
    intermediate values of the reverse pass for them. With several leaves in the outputs, the result
    is copied once.

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
    memory = {"chunk_size": chunk_size, "memory_limit": memory_limit}
    others = {"progress": progress, "devices": devices}
    return _jacobian("chunked_jacrev", transform, fun, has_aux, reduce, **memory, **others)


@refuses_jit
def chunked_hessian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    reduce: Any = None,
    chunk_size: int | None = None,
    memory_limit: int | str | None = None,
    progress: ProgressOption | None = None,
    devices: DevicesOption = None,
) -> Callable[..., Any]:
    r"""Evaluate the Hessian of ``fun`` column by column, with few of them in flight.

    Equivalent to ::

        jax.hessian(fun, argnums, has_aux, holomorphic)

    by `chunked_jacfwd` of `chunked_jacrev`, both in chunks. With ``reduce``, the rows of the
    Hessian of a scalar function are reduced as in `chunked_jacfwd`; ``"trace"`` is the Laplacian.

    Parameters
    ----------
    fun, argnums, has_aux, holomorphic
        As in `jax.hessian`. With ``reduce``, ``fun`` must return a scalar.
    reduce, chunk_size, memory_limit, progress, devices
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
    chunked_jacfwd : Here it is applied to the gradient.

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
    memory = {"chunk_size": chunk_size, "memory_limit": memory_limit}
    forward = functools.partial(jax.jacfwd, argnums=argnums, holomorphic=holomorphic)
    if reduce is None:
        reverse = functools.partial(jax.jacrev, argnums=argnums, holomorphic=holomorphic)
        gradient = _jacobian("chunked_hessian", reverse, fun, has_aux, None, **memory)
    else:
        gradient = jax.grad(fun, argnums, has_aux, holomorphic)
    others = {"progress": progress, "devices": devices}
    return _jacobian("chunked_hessian", forward, gradient, has_aux, reduce, **memory, **others)
