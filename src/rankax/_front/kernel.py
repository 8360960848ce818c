# SPDX-License-Identifier: MIT
"""The object that `auto_vmap` returns, and its bound methods.

Tools treat it as they treat a function, because it has ``__get__`` and no ``__set__``: it is a
routine to `inspect`, `help`, doctest and Sphinx, and binds to an object as a function does. What
rankax itself needs is in slots, so that a wrapper that copies the attributes of what it wraps, as
`functools.wraps` does, copies only what the user has set. A kernel is copied and pickled like a
function, by its name if that leads back to it; a bound method, by its object and its name.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    overload,
)

import jax

from rankax._front.options import Given
from rankax.core.base.messages import unwrapped
from rankax.core.base.trees import ByKey, Items, Node
from rankax.core.call.bind import SPECS, BoundKernel, KernelSpec, bind
from rankax.core.declare.dims import Dim, Rank
from rankax.core.hooks import METHODS
from rankax.core.options import Options, check_together, checked_options

if TYPE_CHECKING:  # the types of what extensions return
    from rankax.ext.check.call import CheckReport, NonFinite
    from rankax.ext.explain.plan import BatchPlan
    from rankax.ext.tune.table import Tuning

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
        # As `functools.wraps` does, also for a callable without a name.
        if hasattr(spec.fun, "__name__"):
            functools.update_wrapper(self, spec.fun)
        else:
            # A partial is named and described by its function, another callable by its class.
            named = unwrapped(spec.fun)
            named = named if hasattr(named, "__name__") else type(named)
            described = ("__module__", "__name__", "__qualname__", "__doc__")
            functools.update_wrapper(self, named, described, updated=())
            self.__wrapped__ = spec.fun
        for name in vars(self).keys() & vars(Kernel).keys():
            if not name.startswith("__"):  # a user-defined attribute would hide a method
                del vars(self)[name]
        if spec.declaration.masks:
            vars(self)["__signature__"] = spec.declaration.signature

    # `self` is positional-only because a kernel may be called with an argument of that name.

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        kernel, arguments = self.unbound(args)
        spec = kernel.spec
        call = bind(spec, arguments, kwargs, takes_foreign=True, takes_nodes=True)
        if call.is_foreign:
            return METHODS["foreign"](kernel, call, spec.options())
        return kernel.run_bound(call)

    def run_bound(self, call: BoundKernel) -> Any:
        """Evaluate a bound call."""
        return METHODS["nodes"](call) if call.structure.nodes else self.spec.call(call)

    def plan(self, /, *args: Any, **kwargs: Any) -> BatchPlan:
        """Return what a call with these arguments, or their `jax.ShapeDtypeStruct`, would do."""
        kernel, args = self.unbound(args)
        call = bind(kernel.spec, args, kwargs, shapes_only=True, takes_nodes=True)
        return METHODS["plan_nodes" if call.structure.nodes else "plan"](call)

    @property
    def lower(self) -> Callable[..., Any]:
        """Lower the call with these arguments: ``jax.jit(f).lower(...)``."""
        lower, name = getattr(self.spec, "lower", None), self.spec.name
        if lower is None:
            raise AttributeError(f"{name} has no lower; {name}.with_options(jit=True) has one")
        return functools.partial(lower, *self.unbound(())[1])

    def with_options(self, **options: Unpack[Given]) -> Self:
        """Return the kernel with these options; always the same one, with what it compiled."""
        site = f"{self.spec.name}.with_options"
        explicit = {**self.spec.explicit, **checked_options(options, site)}
        return self._bound(self.with_explicit(explicit, site))

    def with_explicit(self, explicit: dict[str, Any], site: str) -> Kernel[P, R]:
        """Return the kernel with these options only, which are checked."""
        spec = self.spec

        def make() -> Kernel[P, R]:
            check_together(Options(**explicit), site)
            kind = next((SPECS[name] for name in SPECS if explicit.get(name)), KernelSpec)
            return Kernel(kind(spec.fun, spec.declaration, explicit, spec.members))

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
        result = METHODS["tune"](kernel, args, kwargs, memory_limit, gradient, seconds)
        # A new object, because `with_options` shares its own with callers who did not tune.
        return self._bound(Kernel(kernel.with_options(**result.options).spec, result))

    def check(
        self, /, *args: Any, items: int = 16, seed: int = 0, gradient: bool = False, **kwargs: Any
    ) -> CheckReport:
        """Compare some items of a call with single evaluations; raise if they differ."""
        kernel, args = self.unbound(args)
        return METHODS["check"](kernel, args, kwargs, items, seed, gradient=gradient)

    def nonfinite(
        self, /, *args: Any, gradient: bool = False, most: int = 10, **kwargs: Any
    ) -> NonFinite:
        """Count the items whose value, or gradient, is not finite, and name the first ones."""
        kernel, args = self.unbound(args)
        return METHODS["nonfinite"](kernel, args, kwargs, most, gradient=gradient)

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

    def __set_name__(self, owner: type, name: str) -> None:
        # Python's tools look for the docstring of an overridden method for functions only.
        overridden = getattr(super(owner, owner), name, None)
        is_own = self.__qualname__ == f"{owner.__qualname__}.{name}"
        if is_own and self.__doc__ is None and callable(overridden):
            self.__doc__ = overridden.__doc__

    def unbound(self, args: tuple[Any, ...]) -> tuple[Kernel[..., Any], tuple[Any, ...]]:
        """Return what a class has as its attribute, and arguments with the object in front."""
        return self, args

    def _bound(self, kernel: Any) -> Any:
        """Bind another kernel to the object, if there is one."""
        return kernel

    @property
    def __globals__(self) -> dict[str, Any]:
        """The namespace of its annotations, as jaxtyping asks of what it wraps."""
        fun: Any = unwrapped(self.spec.fun)
        return fun.__globals__

    @property
    def rankax_parts(self) -> Any:
        """What decides its values, for the record of a stream."""
        return _described(self.spec), self.spec.fun, *self.unbound(())[1]

    # As a function is shown, copied and pickled.

    def __repr__(self) -> str:
        return f"<rankax kernel {_described(self.spec)}>"

    def __deepcopy__(self, memo: Any = None) -> Self:
        return self

    __copy__ = __deepcopy__

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _is_found_by_name(self) and not _goes_by_value(self.__module__):
            return self.__qualname__
        return super().__reduce_ex__(protocol)

    def __setstate__(self, state: Any) -> None:
        attributes, slots = state
        vars(self).update(attributes)
        self.spec, self.tuning = slots["spec"], slots["tuning"]
        if self.tuning is None:
            self.spec.members.get_or_make(frozenset(self.spec.explicit.items()), lambda: self)


class Method(Kernel[P, R]):
    """A kernel that is bound to an object, and a pytree whose child is the object."""

    __slots__ = ("__func__", "__self__")

    def __init__(self, kernel: Kernel[..., R], instance: Any) -> None:
        self.__func__, self.__self__ = kernel, instance
        self.__dict__ = vars(kernel)  # its name, docstring and other attributes
        if kernel.spec.declaration.masks:
            _, *passed = kernel.spec.declaration.signature.parameters.values()
            self.__dict__ = {**vars(kernel), "__signature__": inspect.Signature(passed)}
        self.spec, self.tuning = kernel.spec, kernel.tuning

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

    def __repr__(self) -> str:
        return f"<rankax method {_described(self.spec, skip=1)} of {self.__self__!r}>"

    def __deepcopy__(self, memo: Any = None) -> Any:
        return Method(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        name = self.__func__.__name__
        if getattr(self.__self__, name, None) == self:
            return getattr, (self.__self__, name)
        return Method, (self.__func__, self.__self__)


def _flattened(method: Method[..., Any]) -> Any:
    key = jax.tree_util.GetAttrKey("__self__")
    return ((key, method.__self__),), method.__func__


jax.tree_util.register_pytree_with_keys(
    Method, _flattened, lambda kernel, children: Method(kernel, *children)
)


class ClassMethod(classmethod):  # pyright: ignore[reportMissingTypeArgument]
    """A class method that binds a kernel as all versions of Python before 3.13 do."""

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        kernel: Any = self.__func__
        return Method(kernel, type(instance) if owner is None else owner)


# Pickling.


def _is_found_by_name(kernel: Kernel[..., Any]) -> bool:
    """Whether the name of a kernel leads back to it, as pickle looks for functions."""
    found: Any = sys.modules.get(kernel.__module__)
    for name in kernel.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kernel


def _goes_by_value(module: str) -> bool:
    """Whether cloudpickle is asking, and would pickle a function of this module by value.

    cloudpickle decides this only for functions and classes, and other objects can tell who pickles
    them only from the frame. A reducer of `copyreg` cannot tell either, because all picklers share
    it; one in the table of cloudpickle's own class would miss its copies, as in joblib. Other
    picklers, such as the one of multiprocessing, find ``__main__`` by name.
    """
    frame: Any = inspect.currentframe()
    pickler = frame.f_back.f_back.f_globals
    if "cloudpickle" not in pickler["__name__"]:
        return False
    by_value = ["__main__", *pickler["list_registry_pickle_by_value"]()]
    return any(f"{module}.".startswith(f"{name}.") for name in by_value)


# The text that shows a kernel: ``energy(s: 0, v: 1, m: 2), chunk_size=100``.


def _described(spec: KernelSpec, skip: int = 0) -> str:
    """Return name, ranks and options; without the first parameters, which ``skip`` counts."""
    ranks = spec.declaration.ranks
    parameters = [
        shown
        for name, parameter in [*spec.declaration.signature.parameters.items()][skip:]
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

    An axis without a name gets a unique one: ``v_0``.
    """
    results = list(outputs) if type(outputs) in (tuple, list) else [outputs]
    declared = [*ranks.values(), *results]
    if not ranks or not results or not all(isinstance(rank, Rank) for rank in declared):
        return None
    inputs = [_group(rank, name) for name, rank in ranks.items()]
    written = [_group(rank, f"out{i}") for i, rank in enumerate(results)]
    return f"{','.join(inputs)}->{','.join(written)}"


def _group(rank: Rank, name: str) -> str:
    words: list[str] = []
    for axis, dim in enumerate(rank.dims or (Dim("_"),) * rank.rank):
        words.append(dim.name or (f"{name}_{axis}" if dim.size is None else str(dim.size)))
    return f"({','.join(words)})"
