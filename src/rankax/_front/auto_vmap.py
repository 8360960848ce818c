# SPDX-License-Identifier: MIT
"""``auto_vmap``: the decorator and its options.

`auto_vmap` takes options and named ranks in one ``**named``, because it has to know which options
were passed: one may share its name with a parameter of the kernel (`rankax.core.declare.ranks`).
The signature that `help` shows is set separately.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import jax

from rankax._front.kernel import ClassMethod, Kernel
from rankax.core.base.cache import Members
from rankax.core.base.messages import function_name
from rankax.core.call.bind import KernelSpec
from rankax.core.declare.ranks import declare
from rankax.core.declare.split_key import SplitKey
from rankax.core.options import DEFAULTS, checked_options

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Decorator(Protocol):
    """The type of ``auto_vmap(...)``: it keeps the kernel's parameters and result."""

    def __call__(self, fun: Callable[P, R], /) -> Kernel[P, R]: ...


@typing.overload
def auto_vmap(fun: Callable[P, R], /) -> Kernel[P, R]: ...


@typing.overload
def auto_vmap(
    *positional_ranks: Any,
    ranks: Mapping[str, Any] | None = None,
    chunk_size: int | Literal["auto"] | None = "auto",
    memory_limit: int | str | None = None,
    reduce: Any = None,
    reduce_axis: int | Sequence[int] | None = None,
    where: str | int | None = None,
    batch_shape: int | Sequence[int] | None = None,
    checkpoint: bool | None = None,
    jit: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
    devices: int | str | Sequence[Any] | jax.sharding.PartitionSpec | None = None,
    lockstep: bool = True,
    bucket: bool | Sequence[int] = False,
    batched: bool = False,
    cpu_math: bool = False,
    xla_cpu: bool = True,
    **named_ranks: Any,
) -> Decorator: ...


def auto_vmap(*positional_ranks: Any, ranks: Mapping[str, Any] | None = None, **named: Any) -> Any:
    r"""Let a kernel written for one item take any broadcastable batch of each argument.

    ``auto_vmap(0, 1)(f)(s, v)`` with ``s`` of shape ``(4, 1)`` and ``v`` of shape ``(5, 3)`` is
    equivalent to ::

        jax.vmap(jax.vmap(f, in_axes=(None, 0)), in_axes=(0, None))(s[:, 0], v)

    The leading axes that an argument has beyond its rank are batch axes. The batch axes of all
    arguments broadcast together by NumPy's rules, and each is mapped by one `jax.vmap`. An argument
    that lacks an axis, or has it with length 1, is not mapped there, so no broadcast is ever
    materialised. The compiled program is the same as with nesting by hand.

    Ranks
    -----
    *positional_ranks : int, None, str, SplitKey, or a pytree prefix of these
        How many core axes one item of each argument has, in the order of the parameters. An int
        counts them: 0 for a scalar, 1 for a vector. A string names them: ``"n 3"``. One string with
        parentheses is a signature of the kernel: ``"(n,3),(n)->()"``. ``None``, or no rank, passes
        any Python object through. An argument that is ``None`` passes through, too. `SplitKey`
        splits a random key, and `Mask` says which rows of a `Ragged` item are real. A tree of ranks
        spreads over a pytree; `ranks_like` makes one from an example. Parameters without a rank get
        one from their jaxtyping annotation. See :doc:`/declaring`.
    ranks : dict, optional
        Ranks by parameter name, also for parameters that share their name with an option.
    **named_ranks : int, None, str, or a pytree prefix of these
        Ranks by parameter name; the only way for keyword-only parameters. One rank on ``*args``
        applies to each of them; a rank on ``**kwargs`` applies to each value without its own.

    Memory
    ------
    chunk_size : int, "auto" or None, default "auto"
        Maximum number of evaluations in flight, over all batch axes together. None: no bound.
        ``"auto"``: no bound for a map; with ``reduce``, as many as have their values in the cache.
    memory_limit : int or str, optional
        Bytes, ``"2 GB"``, or ``"50%"`` of the free memory. A chunk size is chosen whose temporary
        memory, forward and in gradients, fits the limit. With ``chunk_size``, the smaller bound
        counts. See :doc:`/howto/chunk_size`.
    checkpoint : bool, optional
        Recompute each chunk in the reverse pass instead of storing the intermediate values of all
        chunks. None: store them only if they stay within a ``memory_limit``, and cost more to
        recompute than to store.

    Reductions
    ----------
    reduce : str, Reduction, None, or a pytree prefix of these, optional
        How the outputs are reduced: ``"sum"``, ``"mean"``, ``"prod"``, ``"max"``, ``"min"``,
        ``"argmax"``, ``"argmin"``, ``"any"``, ``"all"``, ``"logsumexp"``, ``"gram"``, or an object
        of `rankax.reductions`. ``None`` in a tree keeps an output whole. Unless
        ``chunk_size=None``, the reduced outputs are never stored. See :doc:`/howto/reduce`.
    reduce_axis : int or tuple of int, optional
        The axes of the batch shape that are reduced, counted as in NumPy. None: all of them.
    where : str or int, optional
        The key, field or index of the output that says whether an item counts: one boolean. An
        output inside another is given by its path: ``"['masks']['ok']"``. Items left out add
        nothing to results and gradients, even if they are infinite or NaN. See
        :ref:`items-that-count`.

    Programs
    --------
    jit : bool, default False
        Compile the call, once for each set of shapes, dtypes and static values. Arrays are traced,
        and so are numbers on parameters with a rank; all else is static, and must be hashable. A
        method's ``self`` is static unless it is a pytree. No effect inside another ``jit``.
    compiler_options : dict, optional
        Passed to `jax.jit` with ``jit=True``.
    bucket : bool or sequence of int, default False
        With ``jit=True``: one program for many batch lengths. Each batch axis is padded to the next
        of these lengths, and the results are cut. True: a series of lengths, each a quarter longer
        than the one before. See :ref:`bucket`.
    cpu_math : bool, default False
        On a CPU, compute sines, angles and powers by vectorised programs in place of the C library,
        each to 4 units in the last place. See :ref:`cpu-math`.
    xla_cpu : bool, default True
        Apply the rules for XLA on a CPU, with JAX 0.12. ``False`` leaves the plain program, a scan
        over `jax.vmap`. See :ref:`xla-cpu`.

    Devices
    -------
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the batch: ``"all"`` local devices, the first n, a list, or mesh axes.
        None: as the arrays are sharded. ``False``: do not divide the batch. ``chunk_size`` and
        ``memory_limit`` count per device. See :doc:`/howto/devices`.
    progress : bool, str or callable, default False
        Show a bar (a string is its label), or call a function with ``(done, total)``, in items. See
        :ref:`progress`.

    Items
    -----
    batch_shape : int or tuple of int, optional
        More batch axes, which broadcast with the batch axes of the arguments, as ``axis_size`` of
        `jax.vmap`. With ``key=SplitKey, batch_shape=2000``, one key gives 2000 draws.
    lockstep : bool, default True
        ``False``: each item stops when it is done, if a loop in the kernel depends on the item.
        ``chunk_size`` is then the number of lanes. See :doc:`/howto/differ`.
    batched : bool, default False
        The kernel takes a batch itself: one axis in front of each argument with a rank, and of each
        output, for the items of a chunk. Ranks still count the axes of one item. See
        :doc:`/howto/batched`.

    Returns
    -------
    callable
        The kernel for batches, if the first argument is the kernel (``@auto_vmap``); otherwise a
        decorator. Every output has the batch shape in front, without the reduced axes. Without
        batch axes the kernel is simply called. The result keeps the name, docstring, signature and
        type of the kernel, and has the methods ``plan``, ``with_options``, ``tune``, ``check``,
        ``nonfinite`` and ``lower``: see :doc:`/reference/kernel`.

    Raises
    ------
    TypeError
        When decorating: a rank for an unknown parameter, two for one, too many, one of a wrong
        type, or none at all.
    TypeError
        When called: the arguments do not fit the signature; an argument with a rank is not an
        array, or is a list of numbers; the kernel returns None (return ``()`` instead).
    TypeError
        When called, with ``jit=True``: a static argument cannot be hashed.
    ValueError
        When decorating: a negative rank, a string that cannot be read, an unknown reduction.
    ValueError
        When called: an argument does not have the tree structure of its ranks; an axis to reduce is
        out of range, or an output cannot be reduced this way; one item alone needs more than
        ``memory_limit``.
    RankError
        When called: an argument has fewer axes than its rank.
    BatchShapeError
        When called: the batch axes do not broadcast together.
    CoreDimensionError
        When called: a named or fixed dimension disagrees; an output is checked while tracing.

    Notes
    -----
    *Cost.* Binding and planning take about twenty microseconds per call, and no time in a compiled
    program. The kernel is traced once per call.

    *Blocks.* With dask or cubed arrays, the result is one, too, and nothing is computed yet: see
    :doc:`/howto/named`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from rankax import auto_vmap
    >>> @auto_vmap(s=0, v=1, m=2)
    ... def energy(s, v, m):
    ...     return v @ m @ v + s * v.size
    >>> energy(2.0, jnp.ones(3), jnp.ones((3, 3)))
    Array(15., dtype=float32)
    >>> energy(2.0, jnp.ones((5, 3)), jnp.ones((4, 1, 3, 3))).shape
    (4, 5)
    """
    is_bare = ranks is None and named.keys() <= DEFAULTS.keys()
    if len(positional_ranks) == 1 and is_bare and _is_function(positional_ranks[0]):
        return _decorate(positional_ranks[0], (), None, named)
    for rank in positional_ranks:
        if _is_function(rank) and not _is_rank_tree(rank):
            raise TypeError(
                f"auto_vmap: got the function {function_name(rank)} among the ranks; write "
                f"auto_vmap(...)({function_name(rank)})"
            )
    return functools.partial(_decorate, positional=positional_ranks, ranks=ranks, named=named)


# What `help` shows: `auto_vmap` itself takes options and ranks in one ``**named``.
_shown = inspect.signature(typing.get_overloads(auto_vmap)[-1]).parameters.values()
vars(auto_vmap)["__signature__"] = inspect.Signature(
    [p.replace(annotation=p.empty) for p in _shown]
)


def _is_function(value: Any) -> bool:
    is_callable = callable(value) and value is not SplitKey
    return is_callable or isinstance(value, (staticmethod, classmethod))


def _is_rank_tree(value: Any) -> bool:
    """Whether this is a pytree that only happens to be callable, as an Equinox module may be."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(leaf is SplitKey or isinstance(leaf, (int, str)) for leaf in leaves)


def _decorate(fun: Any, positional: tuple[Any, ...], ranks: Any, named: dict[str, Any]) -> Any:
    if isinstance(fun, (staticmethod, classmethod)):
        kind = ClassMethod if type(fun) is classmethod else type(fun)
        return kind(_decorate(fun.__func__, positional, ranks, named))
    if not callable(fun):
        raise TypeError(f"auto_vmap(...) decorates a function, got {type(fun).__name__}")
    site = f"auto_vmap({function_name(fun)})"
    given = {name: value for name, value in named.items() if name in DEFAULTS}
    named_ranks = {name: rank for name, rank in named.items() if name not in DEFAULTS}
    # First, because an option that is refused may be meant as the rank of a parameter.
    declaration = declare(fun, positional, named_ranks, ranks, given, DEFAULTS)
    plain: Kernel[..., Any] = Kernel(KernelSpec(fun, declaration, {}, Members("kernels")))
    return plain.with_explicit(checked_options(given, site), site)
