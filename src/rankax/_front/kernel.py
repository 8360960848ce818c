# SPDX-License-Identifier: MIT
"""`auto_vmap`, the object that it returns, and the bound methods of that.

Tools treat it as they treat a function, because it has ``__get__`` and no ``__set__``: it is a
routine to `inspect`, `help`, doctest and Sphinx, and binds to an object as a function does. What
rankax itself needs is in slots, so that a wrapper that copies the attributes of what it wraps, as
`functools.wraps` does, copies only what the user has set. A kernel of a module is pickled by its
name, as functions are. One of ``__main__`` or of a function is pickled by value, which takes
cloudpickle, as with `jax.jit`. A bound method is pickled by its object and its name.

`auto_vmap` takes options and named ranks in one ``**named``, because it has to know which options
were passed: a parameter of the kernel wins over an option of its name (`core/declare/ranks.py`).
The signature that `help` shows is set separately.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    get_overloads,
    overload,
)

import jax

from rankax._options import NAMES, Given, OfMaps, Options, check_together, checked_options
from rankax.call.kernels import KernelCall, KernelSpec, bind, check_promotion
from rankax.core.base.cache import Members
from rankax.core.base.messages import function_name, listed, unwrapped
from rankax.core.base.trees import ByKey, Items, Node
from rankax.core.declare.dims import Dim, Rank
from rankax.core.declare.ranks import RankTree, declare
from rankax.core.declare.split_key import SplitKey
from rankax.ext.annotations import annotated_ranks
from rankax.ext.blocks.call import call_on_blocks
from rankax.ext.check import check, nonfinite
from rankax.ext.devices.place import DevicesOption
from rankax.ext.explain.call import plan_kernel
from rankax.ext.jit import evaluate_compiled, lowered
from rankax.ext.progress import ProgressOption
from rankax.ext.ragged.results import call_ragged, plan_ragged
from rankax.ext.reductions.read import Reduce, ReductionName
from rankax.ext.tune import tune
from rankax.pipeline import evaluate

if TYPE_CHECKING:  # the types of what features return
    from rankax.ext.check import CheckReport, NonFinite
    from rankax.ext.explain.plan import BatchPlan
    from rankax.ext.tune import Tuning

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)
S = TypeVar("S")


class Kernel(Generic[P, R]):
    """A decorated kernel, which takes any broadcastable batch of what its function takes."""

    __slots__ = ("__dict__", "__weakref__", "spec", "tuning")

    __wrapped__: Callable[..., Any]
    __name__: str
    __qualname__: str
    tuning: Tuning | None

    def __init__(self, spec: KernelSpec, tuning: Tuning | None = None) -> None:
        self.spec, self.tuning = spec, tuning
        if hasattr(spec.fun, "__name__"):
            functools.update_wrapper(self, spec.fun)
        else:  # a partial is described by its function, another object by its class
            self.__name__ = self.__qualname__ = spec.name
            functools.update_wrapper(self, unwrapped(spec.fun), updated=())
            self.__wrapped__ = spec.fun
        if spec.declaration.masks:
            vars(self)["__signature__"] = spec.declaration.signature

    # `self` is positional-only because a kernel may be called with an argument of that name.

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        kernel, arguments = self.unbound(args)
        call = bind(kernel.spec, arguments, kwargs, takes_foreign=True)
        check_promotion(call)
        return kernel.run(call)

    def run(self, call: KernelCall) -> Any:
        """Evaluate a bound call."""
        if call.is_foreign:
            return call_on_blocks(self, call, self.spec.options())
        if call.structure.nodes:
            return call_ragged(call)
        if call.kernel.preset.jit:
            return evaluate_compiled(call)
        return evaluate(call, call.kernel.options())

    def plan(self, /, *args: Any, **kwargs: Any) -> BatchPlan:
        """Return what a call with these arguments, or their `jax.ShapeDtypeStruct`, would do."""
        kernel, args = self.unbound(args)
        call = bind(kernel.spec, args, kwargs, shapes_only=True)
        check_promotion(call)
        if call.structure.nodes:
            return plan_ragged(call)
        return plan_kernel(call)

    @property
    def lower(self) -> Callable[..., Any]:
        """Lower the call with these arguments: ``jax.jit(f).lower(...)``."""
        spec = self.spec
        if not spec.preset.jit:
            name = spec.name
            raise AttributeError(f"{name} has no lower; {name}.with_options(jit=True) has one")
        return functools.partial(lowered, spec, call_ragged, *self.unbound(())[1])

    @overload
    def with_options(self, **options: Unpack[OfMaps]) -> Self: ...

    @overload
    def with_options(self, **options: Unpack[Given]) -> Kernel[P, Any]: ...

    def with_options(self, **options: Unpack[Given]) -> Any:
        """Return the kernel with these options; always the same one, with what it compiled."""
        site = f"{self.spec.name}.with_options"
        explicit = {**self.spec.explicit, **checked_options(options, site)}
        return self._bound(self.with_explicit(explicit, site))

    def with_explicit(self, explicit: dict[str, Any], site: str) -> Kernel[P, R]:
        """Return the kernel with these options only, which are checked."""
        spec = self.spec

        def make() -> Kernel[P, R]:
            check_together(Options(**explicit), site)
            _check_over(explicit.get("over"), spec.declaration.axes, site)
            return Kernel(KernelSpec(spec.fun, spec.declaration, explicit, spec.members))

        return spec.members.get_or_make(frozenset(explicit.items()), make)

    def tune(
        self,
        /,
        *args: Any,
        memory_limit: int | str | None = None,
        gradient: bool = False,
        seconds: float = 5,
        **kwargs: Any,
    ) -> Self:
        """Return the kernel with the fastest options that were found on this machine."""
        kernel, args = self.unbound(args)
        result = tune(kernel, args, kwargs, memory_limit, gradient, seconds)
        # A new object, because `with_options` shares its own with callers who did not tune.
        return self._bound(Kernel(kernel.with_options(**result.options).spec, result))

    def check(
        self, /, *args: Any, items: int = 16, seed: int = 0, gradient: bool = False, **kwargs: Any
    ) -> CheckReport:
        """Compare some items of a call with single evaluations; raise if they differ."""
        kernel, args = self.unbound(args)
        return check(kernel, args, kwargs, items, seed, gradient=gradient)

    def nonfinite(
        self, /, *args: Any, gradient: bool = False, most: int = 10, **kwargs: Any
    ) -> NonFinite:
        """Count the items whose value, or gradient, is not finite, and name the first ones."""
        kernel, args = self.unbound(args)
        return nonfinite(kernel, args, kwargs, most, gradient=gradient)

    @property
    def signature(self) -> str | None:
        """The gufunc signature, such as ``"(n,3),(n)->()"``; None if there is none."""
        declaration = self.spec.declaration
        return to_gufunc(declaration.ranks, declaration.outputs)

    # In a class.

    @overload
    def __get__(self, instance: None, owner: Any = None, /) -> Kernel[P, R]: ...

    @overload
    def __get__(
        self: Kernel[Concatenate[S, Q], R], instance: S, owner: Any = None, /
    ) -> Method[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        return self if instance is None else Method(self, instance)

    def unbound(self, args: tuple[Any, ...]) -> tuple[Kernel[..., Any], tuple[Any, ...]]:
        """Return what a class has as its attribute, and arguments with the object in front."""
        return self, args

    def _bound(self, kernel: Any) -> Any:
        """Bind another kernel to the object, if there is one."""
        return kernel

    @property
    def __globals__(self) -> dict[str, Any]:
        """The namespace of its annotations, for `jaxtyping.jaxtyped` above it."""
        return inspect.unwrap(self).__globals__

    @property
    def rankax_parts(self) -> Any:
        """What decides its values, for the record of a stream."""
        return _described(self.spec), self.spec.fun, *self.unbound(())[1]

    # As a function is shown, copied and pickled.

    def __repr__(self) -> str:
        return f"<rankax kernel {_described(self.spec)}>"

    def __deepcopy__(self, memo: Any = None) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        with contextlib.suppress(AttributeError, KeyError):
            kernel = operator.attrgetter(self.__qualname__)(sys.modules[self.__module__])
            if kernel is self and self.__module__ != "__main__":
                return self.__qualname__
        return super().__reduce_ex__(protocol)


class Method(Kernel[P, R]):
    """A kernel that is bound to an object, and a pytree whose child is the object."""

    __slots__ = ("__func__", "__self__")

    def __init__(self, __func__: Kernel[..., R], __self__: Any) -> None:
        self.__func__, self.__self__ = __func__, __self__
        self.spec, self.tuning = __func__.spec, __func__.tuning
        vars(self).update(vars(__func__))
        if self.spec.declaration.masks:
            _, *passed = self.spec.declaration.signature.parameters.values()
            vars(self)["__signature__"] = inspect.Signature(passed)

    def unbound(self, args: tuple[Any, ...]) -> tuple[Kernel[..., Any], tuple[Any, ...]]:
        return self.__func__, (self.__self__, *args)

    def _bound(self, kernel: Any) -> Any:
        return Method(kernel, self.__self__)

    @property
    def __wrapped__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return types.MethodType(self.__func__.__wrapped__, self.__self__)

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        return self  # which makes it a routine, too

    def __eq__(self, other: object) -> bool:
        is_method = isinstance(other, Method)
        return is_method and (other.__self__ is self.__self__ and other.__func__ is self.__func__)

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __deepcopy__(self, memo: Any = None) -> Any:
        return Method(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.__self__, self.__name__)  # as for a method of a function


jax.tree_util.register_dataclass(Method, ["__self__"], ["__func__"])


class ClassMethod(classmethod):  # pyright: ignore[reportMissingTypeArgument]
    """A class method that binds a kernel as all versions of Python before 3.13 do."""

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        kernel: Any = self.__func__
        return Method(kernel, owner)


def _check_over(over: tuple[str, ...] | None, axes: tuple[str, ...], site: str) -> None:
    """Refuse names that no batch axis has."""
    for name in over or ():
        if name not in axes:
            close = difflib.get_close_matches(name, axes, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"they are {listed(axes)}"
            hint = hint if axes else 'name it in the ranks, as in x="i | 3", y="j | 3"'
            raise ValueError(f"{site}: over names {name!r}, but no batch axis is called so; {hint}")


# The text that shows a kernel: ``energy(s: 0, v: 1, m: 2), chunk_size=100``.


def _described(spec: KernelSpec) -> str:
    """Return name, ranks and options."""
    ranks = spec.declaration.ranks
    parameters = [
        shown
        for name, parameter in spec.declaration.signature.parameters.items()
        for shown in _ranks(str(inspect.Parameter(name, parameter.kind)), ranks.get(name))
    ]
    options = [f"{name}={value}" for name, value in spec.explicit.items()]
    return ", ".join([f"{spec.name}({', '.join(parameters)})", *options])


def _ranks(path: str, ranks: Any) -> list[str]:
    """Write each rank with the path to what it is for; an annotated class by its name."""
    if isinstance(ranks, (Items, Node)):
        pairs = [(path.lstrip("*") + key, rank) for key, rank in ranks.entries.items()]
        pairs += [(path, ranks.rest)] if isinstance(ranks, Items) else []
        return [shown for pair in pairs for shown in _ranks(*pair)]
    if ranks is None:
        return [path]
    return [f"{path}: {ranks.cls.__name__ if isinstance(ranks, ByKey) else ranks}"]


# The gufunc signature.


def to_gufunc(ranks: dict[str, Any], outputs: Any) -> str | None:
    """Write ranks as one signature; None if a parameter or the output is not a single array.

    An axis without a name gets a unique one: ``v_0``. A signature has no names of batch axes.
    """
    results = list(outputs) if type(outputs) in (tuple, list) else [outputs]
    declared = [*ranks.values(), *results]
    if not ranks or not results or not all(isinstance(rank, Rank) for rank in declared):
        return None
    if any(rank.batch for rank in ranks.values()):
        return None
    inputs = [_group(rank, name) for name, rank in ranks.items()]
    written = [_group(rank, f"out{i}") for i, rank in enumerate(results)]
    return f"{','.join(inputs)}->{','.join(written)}"


def _group(rank: Rank, name: str) -> str:
    words: list[str] = []
    for axis, dim in enumerate(rank.dims or (Dim("_"),) * rank.rank):
        words.append(dim.name or (f"{name}_{axis}" if dim.size is None else str(dim.size)))
    return f"({','.join(words)})"


# The decorator.


@overload
def auto_vmap(  # pyright: ignore[reportOverlappingOverload]  # a rank may be any object
    fun: Callable[P, R], /
) -> Kernel[P, R]: ...


@overload
def auto_vmap(
    *positional_ranks: Any,
    ranks: Mapping[str, Any] | None = None,
    chunk_size: int | Literal["auto"] | None = "auto",
    memory_limit: int | str | None = None,
    reduce: ReductionName | None = None,
    reduce_axis: int | Sequence[int] | None = None,
    over: str | Sequence[str] | None = None,
    where: None = None,
    batch_shape: int | Sequence[int] | None = None,
    checkpoint: bool | None = None,
    jit: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    progress: ProgressOption = False,
    devices: DevicesOption = None,
    lockstep: bool = True,
    bucket: bool | Sequence[int] = False,
    batched: bool = False,
    cpu_math: bool = False,
    xla_cpu: bool = True,
    hoist: bool = True,
    fused: bool | Literal["auto"] = False,
    **named_ranks: RankTree,
) -> Callable[[Callable[P, R]], Kernel[P, R]]: ...


@overload
def auto_vmap(
    *positional_ranks: Any,
    ranks: Mapping[str, Any] | None = None,
    chunk_size: int | Literal["auto"] | None = "auto",
    memory_limit: int | str | None = None,
    reduce: Reduce = None,
    reduce_axis: int | Sequence[int] | None = None,
    over: str | Sequence[str] | None = None,
    where: str | int | None = None,
    batch_shape: int | Sequence[int] | None = None,
    checkpoint: bool | None = None,
    jit: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    progress: ProgressOption = False,
    devices: DevicesOption = None,
    lockstep: bool = True,
    bucket: bool | Sequence[int] = False,
    batched: bool = False,
    cpu_math: bool = False,
    xla_cpu: bool = True,
    hoist: bool = True,
    fused: bool | Literal["auto"] = False,
    **named_ranks: RankTree,
) -> Callable[[Callable[P, Any]], Kernel[P, Any]]: ...


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
        parentheses is a signature of the kernel: ``"(n,3),(n)->()"``. Left of a bar are the names
        of batch axes: ``x="i | 3", y="j | 3"``. ``None``, or no rank, passes
        any Python object through. An argument that is ``None`` passes through, too. `SplitKey`
        splits a random key, and `Mask` says which rows of a `Ragged` item are real. A tree of ranks
        spreads over a pytree; `ranks_like` makes one from an example. Parameters without a rank get
        one from their jaxtyping annotation. See :doc:`/declaring`.
    ranks : dict, optional
        Ranks by parameter name, whatever the parameters are called.
    **named_ranks : int, None, str, or a pytree prefix of these
        Ranks by parameter name; the only way for keyword-only parameters. A parameter wins over the
        option of its name, which ``with_options`` takes. One rank on ``*args``
        applies to each of them; a rank on ``**kwargs`` applies to each value without its own.

    Memory
    ------
    chunk_size : int, "auto" or None, default "auto"
        Maximum number of evaluations in flight, over all batch axes together. None: no bound.
        ``"auto"``: no bound for a map; with ``reduce``, as many as have their values in the cache
        of a CPU, or store 256 MiB of them on a GPU. See :doc:`/howto/gpu`.
    memory_limit : int or str, optional
        Bytes, ``"2 GB"``, or ``"50%"`` of the free memory. A chunk size is chosen whose temporary
        memory, forward and in gradients, fits the limit. With ``chunk_size``, also that of a
        reduction by default, the smaller bound counts. See :doc:`/howto/chunk_size`.
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
    over : str or tuple of str, optional
        The same by name, for batch axes that have names: ``over="j"``. See :ref:`names`.
    where : str or int, optional
        The argument that says whether an item counts, one boolean with a rank; or the key, field or
        index of such an output. An output inside another is given by its path:
        ``"['masks']['ok']"``. Items left out add nothing to results and gradients, even if they are
        infinite or NaN. See :ref:`items-that-count`.

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
        Apply the rules for XLA on a CPU. ``False`` leaves the plain program, a scan
        over `jax.vmap`. See :ref:`xla-cpu`.
    hoist : bool, default True
        Evaluate what depends on fewer batch axes than an item over those axes only, before the
        loop, as `jax.vmap` does: in ``exp(-|net(x) - net(y)|**2)``, ``net(y)`` once for each ``y``,
        not once for each pair. Its results are kept, up to 64 MB or eight times the arguments and
        outputs, and ``plan`` shows them; ``memory_limit`` counts them. Nothing is moved with
        ``where=``, ``batched=True`` or ``bucket=``. Chunks of pairs that multiply, or whose work
        cannot be moved, have as many rows as columns on a CPU. ``False``: evaluate everything of an
        item for each item, in other chunks.
    fused : bool or "auto", default False
        Evaluate a reduction as one kernel, compiled by NVIDIA Warp, which keeps the numbers of an
        item in registers: for pairs on an NVIDIA GPU. ``True`` is an error, which names the
        operation, where an item is not straight-line arithmetic of few numbers; ``"auto"`` fuses
        what it can, on a GPU only. ``plan`` says whether a call is fused. Needs ``rankax[warp]``.
        See :ref:`fused`.

    Devices
    -------
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the batch: ``"all"`` local devices, the first n, a list, or mesh axes.
        None: as the arrays are sharded. ``False``: do not divide the batch. ``chunk_size`` and
        ``memory_limit`` count per device. See :doc:`/howto/devices`.
    progress : bool, str, callable or observer, default False
        Show a bar (a string is its label), or call a function with ``(done, total)``, in items. See
        :ref:`progress`. An observer is told of each step: see :ref:`observer`.

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
    program. The kernel is traced once per call; with ``jit=True``, once for each program that is
    compiled.

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
    is_bare = ranks is None and named.keys() <= {*NAMES}
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
_shown = inspect.signature(get_overloads(auto_vmap)[-1]).parameters.values()
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
    declaration, given = declare(fun, positional, named, ranks, {*NAMES}, annotated_ranks)
    plain: Kernel[..., Any] = Kernel(KernelSpec(fun, declaration, {}, Members("kernels")))
    return plain.with_explicit(checked_options(given, site), site)
