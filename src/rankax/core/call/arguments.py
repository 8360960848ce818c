# SPDX-License-Identifier: MIT
"""What a decorated kernel is, and how arguments match its parameters: which of them are arrays."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax.core.base.arrays import check_no_ref
from rankax.core.base.cache import Kept, Members
from rankax.core.base.messages import caller_level, function_name, listed, shortened
from rankax.core.base.trees import leaves_with_names
from rankax.core.declare.dims import Rank
from rankax.core.declare.ranks import Declaration
from rankax.core.options import DEFAULTS, Options, resolve
from rankax.core.plan.levels import Shape
from rankax.ext.blocks.arrays import blocks_of, in_blocks


@dataclasses.dataclass(eq=False)
class KernelSpec:
    """What `bind` and `run` know of a decorated kernel, which has it as its ``spec``."""

    fun: Callable[..., Any]
    declaration: Declaration
    explicit: Mapping[str, Any]  # the options set for this kernel
    members: Members[Any]  # the kernels that differ in their options only

    def __post_init__(self) -> None:
        declaration, self.name = self.declaration, function_name(self.fun)
        self.preset = Options(**self.explicit)
        self.structures: Kept[Any] = Kept(1024, "structures of arguments")
        self.silent = set(declaration.silent)  # parameters not warned about yet
        self.defaults = {
            name: parameter.default
            for name, parameter in declaration.signature.parameters.items()
            if parameter.default is not parameter.empty
            # A positional-only argument can be passed only if all before it are, ranked or not.
            and (name in declaration.ranks or parameter.kind is parameter.POSITIONAL_ONLY)
        }

    def options(self) -> Options:
        """Return the options of a call made now."""
        return resolve(self.explicit, self.preset)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Bind arguments to parameters; a default with a rank counts as passed."""
        try:
            bound = self.declaration.signature.bind(*args, **kwargs)
        except TypeError as error:
            options = DEFAULTS.keys() - self.declaration.signature.parameters.keys()
            option = min(options & kwargs.keys(), default=None)
            if option is None:
                masks = listed([*self.declaration.masks])
                hint = f"; do not pass {masks}, which rankax fills in" if masks else ""
                raise TypeError(f"{self.name}() {error}{hint}") from None
            raise TypeError(
                f"{self.name}() got {option} among its arguments, but it is an option: "
                f"{self.name}.with_options({option}={kwargs[option]!r})(...)"
            ) from None
        if not self.defaults.keys() <= bound.arguments.keys():
            bound = self.rebind({**self.defaults, **bound.arguments})
        if self.silent:
            self._warn_of_arrays(bound)
        return bound

    def rebind(self, arguments: dict[str, Any], *, written: bool = False) -> inspect.BoundArguments:
        """Bind values by parameter name; `inspect` derives ``args`` and ``kwargs`` from them.

        With ``written``, they are those of the kernel as it was written, with its masks.
        """
        signature = self.declaration.signature
        if written and self.declaration.written is not None:
            signature = self.declaration.written
        ordered = {name: arguments[name] for name in signature.parameters if name in arguments}
        return inspect.BoundArguments(signature, ordered)  # pyright: ignore[reportArgumentType]

    def _warn_of_arrays(self, bound: inspect.BoundArguments) -> None:
        """Warn, once per parameter, about arrays that get no rank from their annotation."""
        for name in tuple(self.silent):
            if arrays := arrays_of(bound.arguments.get(name), name):
                paths = shortened([f"{path} {shape}" for path, shape in arrays])
                warnings.warn(
                    f"{self.name}(): the annotation of {name} declares no rank, so it goes whole "
                    f"to every item of the batch, with its arrays {paths}; give auto_vmap a rank "
                    f"for it, or {name}=None if that is meant",
                    stacklevel=caller_level(),
                )
                self.silent.discard(name)

    def converted(self, leaf: Any, path: str, *, shapes_only: bool) -> Any:
        """Convert a leaf that is neither an array nor a number, or refuse it."""
        check_no_ref(leaf, f"{self.name}()", path)
        if hasattr(leaf, "__jax_array__"):
            return jnp.asarray(leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            if shapes_only:
                return leaf
            raise TypeError(
                f"{self.name}(): {path} is a ShapeDtypeStruct, which has no values; pass it "
                f"through jax.eval_shape({self.name}, ...), or to {self.name}.plan(...)"
            )
        if package := blocks_of(leaf):
            raise in_blocks(package, self.name, path)
        kind = type(leaf).__name__
        if isinstance(leaf, np.ma.MaskedArray):
            came = f"{kind}; pass {path}.filled(...), and the mask as an argument of its own"
        elif isinstance(leaf, np.ndarray):
            came = f"{kind} (an array of dtype {leaf.dtype}); convert it to numbers first, such as "
            came += f"{path}.astype(float)"
        elif hasattr(leaf, "__array__") and not isinstance(leaf, np.generic):
            # Its repr may be a table of several lines.
            came = f"{kind}; pass jnp.asarray({path})"
        else:
            came = f"{kind} ({leaf!r:.60}); a parameter that takes other objects has rank None"
        raise TypeError(
            f"{self.name}(): {path} has a rank, so it must be an array or a number, but it is "
            f"{came}"
        )

    def check_key(self, leaf: Any, path: str, rank: Rank | None) -> None:
        """Refuse a raw key, whose numbers would be mistaken for a batch of keys."""
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return
        is_split = rank is not None and rank.is_split
        declared = "has the rank SplitKey" if is_split else "is annotated as a PRNG key"
        if is_number(leaf):
            raise TypeError(
                f"{self.name}(): {path} {declared}, but it is the number {leaf!r}; make a key from "
                f"it: jax.random.key({leaf!r})"
            )
        raise TypeError(
            f"{self.name}(): {path} {declared}, but it is an array of dtype "
            f"{dtype} and shape {leaf.shape}; make keys with jax.random.key, not "
            f"jax.random.PRNGKey, or pass jax.random.wrap_key_data({path})"
        )


# Leaves.


def is_array(leaf: Any) -> bool:
    """Whether JAX accepts this leaf as an array without conversion."""
    if isinstance(leaf, jax.Array):
        return True
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return False
    if isinstance(leaf, np.ma.MaskedArray):
        return False
    return leaf.dtype.kind not in "OSTUMm" and leaf.dtype.type is not np.void


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python scalar, which JAX treats as a weakly typed array."""
    return isinstance(leaf, (int, float, complex))


def arrays_of(value: Any, path: str) -> list[tuple[str, Shape]]:
    """Return path and shape of every array inside ``value`` that has axes."""
    if value is None or isinstance(value, (int, float, complex, str)):
        return []
    try:
        if not any(map(_has_axes, jax.tree.leaves(value))):  # much faster than making the paths
            return []
    except (TypeError, ValueError):  # a dict whose keys JAX cannot sort
        return []
    named = leaves_with_names(value, path)
    return [(at, tuple(leaf.shape)) for at, leaf in named if _has_axes(leaf)]


def _has_axes(leaf: Any) -> bool:
    return (is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)) and bool(leaf.shape)
