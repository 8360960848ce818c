# SPDX-License-Identifier: MIT
"""Arrays: small ones that are made on the way, what kind of array a value is, and where it is.

A small array is a literal inside a traced program, and an explicit transfer in an eager call.

A process with a GPU also computes on its CPU, and a program may be compiled for a machine that is
elsewhere. So what depends on the platform asks where the call runs, not for the default of the
process. A mesh with explicit axes is part of the types of arrays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import jax.ref
import numpy as np
from jax import core, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


class _StagedError(Exception):
    """Raised instead of adding a step to a program that is being traced."""


_probe = jax.extend.core.Primitive("rankax_probe")
_probe.multiple_results = True  # it returns none; tracers of other packages (Quax) need this
_probe.def_impl(list)


@_probe.def_abstract_eval
def _() -> Any:
    raise _StagedError


def is_staged() -> bool:
    """Return whether an outer program is being traced, as inside `jax.jit`.

    A bare `jax.vmap` or `jax.grad` traces no program. JAX asks for the abstract value of a
    primitive only when it adds the primitive to a program; otherwise it runs the primitive.
    (``jax.jit(inline=True)`` would also tell, but not every version of JAX inlines while tracing.)
    """
    try:
        _probe.bind()
    except _StagedError:
        return True
    return False


_plain = ContextVar("rankax_plain", default=False)


@contextlib.contextmanager
def plainly(value: bool) -> Generator[None]:
    """Enter a scope in which programs have no primitive of this library, or may have some."""
    token = _plain.set(value)
    try:
        yield
    finally:
        _plain.reset(token)


def is_plain() -> bool:
    """Whether programs are to have no primitive of this library."""
    return _plain.get()


def scalar(value: Any, dtype: Any) -> jax.Array:
    """Return a number as an array.

    In a traced program it is a literal, so that the program holds no array. In an eager call it is
    transferred explicitly, which `jax.transfer_guard` permits.
    """
    return lax.full((), value, dtype) if is_staged() else jax.device_put(np.asarray(value, dtype))


def counted(count: int, dtype: Any) -> jax.Array:
    """Return ``jnp.arange(count)``, made like `scalar`."""
    return lax.iota(dtype, count) if is_staged() else jax.device_put(np.arange(count, dtype=dtype))


def places_of(index: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the place along each axis of the item with a flat index."""
    places: list[Any] = []
    for size in reversed(sizes):
        number = scalar(max(size, 1), index.dtype)
        places.append(index % number)
        index = index // number
    return places[::-1]


def flat_index(places: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """Return the flat index of the item at some places, whose type the ``sizes`` take."""
    first, *others = places
    for place, size in zip(others, sizes[1:], strict=True):
        first = first * jnp.asarray(size, first.dtype) + place
    return first


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return ``jnp.zeros(shape)``, made like `scalar`; ``dtype`` may be a dtype of PRNG keys."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jnp.zeros(shape, dtype)
    return lax.broadcast(scalar(0, dtype), shape)


def zeros_of(aval: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return zeros of another shape, made like `scalar`, whose type is as weak as this one."""
    return as_weak(zeros(shape, aval.dtype), aval)


def as_weak(x: jax.Array, aval: Any) -> jax.Array:
    """Return an array whose type is weak if this one is, which that of a PRNG key never is."""
    return weakened(x) if getattr(aval, "weak_type", False) and not x.weak_type else x


def weakened(x: Any) -> Any:
    """Return an array with a weak type, for which JAX has no function."""
    convert = jax.extend.core.primitives.convert_element_type_p
    return convert.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


def is_ref(value: Any) -> bool:
    """Whether a value, or a variable of a program, is a `jax.Ref`."""
    return isinstance(getattr(value, "aval", None), jax.ref.AbstractRef)


def index_dtype(size: Any) -> Any:
    """Return the dtype of the flat indices of ``size`` items, which may not fit it."""
    return (
        jnp.int32
        if isinstance(size, int) and size < 2**31
        else jax.dtypes.canonicalize_dtype(jnp.int64)
    )


def too_many(size: Any) -> str:
    """Say that the indices of ``size`` items do not fit their dtype, if they do not."""
    if not isinstance(size, int) or size <= jnp.iinfo(index_dtype(size)).max:
        return ""
    return (
        f"the indices of {size} items need 64 bits; call "
        'jax.config.update("jax_enable_x64", True) first, or reduce one axis at a time'
    )


def check_no_ref(value: Any, site: str, name: str) -> None:
    """Refuse a `jax.Ref`: `jax.numpy.asarray` of one fails, or does not return."""
    if is_ref(value):
        raise TypeError(
            f"{site}: {name} is a jax.Ref, not an array; read it before the call: {name}[...]"
        )


def has_tangent(value: Any) -> bool:
    """Whether numbers of the type of an array, or of a Python scalar, have derivatives."""
    return jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.inexact)


def wide(dtype: Any) -> Any:
    """Return the dtype in which floats of less than 32 bits are added."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if is_narrow else dtype


def is_narrow(x: Any) -> bool:
    """Whether an array, or a type, has floats of less than 32 bits."""
    return not is_ref(x) and wide(x.dtype) != x.dtype


def in_32_bits(x: Any) -> Any:
    """Return an array of floats of less than 32 bits in float32."""
    return x.astype(jnp.float32) if is_narrow(x) else x


def gated(counts: jax.Array, x: Any) -> Any:
    """Return an array to which nothing is sent back unless an item counts.

    A cotangent of 0 is not nothing, because 0 times an infinite derivative is NaN, and because a
    rule of `jax.custom_vjp` may make anything of it. The transpose of a choice drops it.
    """
    return lax.select(counts, x, lax.stop_gradient(x)) if has_tangent(x) else x


def gated_if_small(counts: jax.Array, x: Any) -> Any:
    """Return the same of a small array that items share; each has a cotangent of its own then.

    These are added with at least 32 bits.
    """
    if is_ref(x) or jnp.size(x) > SMALL:
        return x
    own = gated(counts, in_32_bits(x))
    return own if own.dtype == x.dtype else own.astype(x.dtype)


SMALL = 64  # numbers of an array that items share, of which each has a cotangent of its own


def shape_of(value: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an array, a number or a stand-in, or the same with ``shape``."""
    if not hasattr(value, "dtype"):
        value = jax.eval_shape(lambda: jnp.asarray(value))
    dtype = value.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    weak_type = getattr(value, "weak_type", False)
    return jax.ShapeDtypeStruct(
        tuple(value.shape) if shape is None else shape, dtype, weak_type=bool(weak_type)
    )


# Where a call runs: on which platform, and on which mesh of devices its arrays are.


def sharding_of(leaf: Any) -> Any:
    """Return the sharding of an array; of a tracer, the one in its type."""
    if isinstance(leaf, core.Tracer):
        return getattr(jax.typeof(leaf), "sharding", None)
    return getattr(leaf, "sharding", None)


def is_spread(leaf: Any) -> bool:
    """Whether an array is on a mesh of several devices, or on any mesh with explicit axes."""
    sharding = sharding_of(leaf)
    if not isinstance(sharding, NamedSharding):
        return False
    return sharding.mesh.size > 1 or AxisType.Explicit in sharding.mesh.axis_types


def mesh_of(leaves: Sequence[Any]) -> Any:
    """Return the mesh that arrays are on, or else the mesh that is set; None without one."""
    shardings = [sharding_of(leaf) for leaf in leaves]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    meshes.append(jax.sharding.get_abstract_mesh())
    return next((mesh for mesh in meshes if not mesh.empty), None)


def on_mesh(leaves: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Enter the mesh with explicit axes that arrays are on, unless a mesh is entered already.

    Without it, arrays that are made on the way (zeros, counters) would not fit those on the mesh.
    """
    mesh = mesh_of(leaves) if jax.sharding.get_abstract_mesh().empty else None
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return nullcontext()
    if is_staged():
        return jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))
    try:
        return jax.set_mesh(mesh)
    except (TypeError, ValueError):
        # An eager derivative, or `jax.vmap`, in which JAX lets only the caller set the mesh.
        return nullcontext()


def on_every_device(leaf: Any) -> Any:
    """Return an array that the types of an explicit mesh shard as one that they do not."""
    sharding = sharding_of(leaf)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec()))


class Target(NamedTuple):
    """Where a call runs, if that need not be where JAX runs by default.

    Attributes
    ----------
    platform : str
        ``"cpu"``, ``"gpu"`` or ``"tpu"``.
    device : jax.Device or None
        One to compile for, if one is known.
    """

    platform: str
    device: Any = None


def is_cpu(target: Target | None) -> bool:
    """Whether a call to this target runs on a CPU."""
    return (target.platform if target else jax.default_backend()) == "cpu"


def target_of(arrays: Iterable[Any] = ()) -> Target | None:
    """Return where a call with these arrays runs; None: where JAX runs by default.

    The first of these that is known decides:

    * the device that an array is committed to, also one that `jax.grad` differentiates now;
    * the mesh in the type of a tracer, and the sharding of a `jax.ShapeDtypeStruct`;
    * the mesh that is set, and the call in whose kernel this one is (`inside_call`);
    * `jax.default_device`.

    Inside `jax.jit`, an array on a single device shows none of that, because JAX chooses the
    platform when it lowers the program, after the trace.
    """
    known = next(filter(None, map(_target, arrays)), None)
    around = _of_mesh(jax.sharding.get_abstract_mesh()) or _outer.get() or _set_by_caller()
    if around is None and known is not None and known.platform == jax.default_backend():
        return None
    return known or around


_outer: ContextVar[Target | None] = ContextVar("rankax_target", default=None)


@contextlib.contextmanager
def inside_call(target: Target | None) -> Generator[None]:
    """Enter a call that runs there: so do those that its kernel makes, with tracers."""
    token = _outer.set(target)
    try:
        yield
    finally:
        _outer.reset(token)


def _set_by_caller() -> Target | None:
    config: Any = jax.config
    device = config.jax_default_device
    if device is None:
        return None
    return Target(device) if isinstance(device, str) else _of_device(device)


def _target(value: Any) -> Target | None:
    while isinstance(value, core.Tracer):
        if found := _of_mesh(getattr(jax.typeof(value).sharding, "mesh", None)):
            return found
        # The value itself, where `jax.grad` or `jax.vmap` evaluates now.
        value = getattr(value, "primal", getattr(value, "val", None))
    sharding = getattr(value, "sharding", None)
    if sharding is None or not getattr(value, "committed", True):
        return None  # JAX moves it to where it runs by default
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return _of_mesh(mesh)
    return _of_device(next(iter(sharding.device_set)))


def _of_device(device: Any) -> Target:
    return Target(device.platform, device)


def _of_mesh(mesh: Any) -> Target | None:
    """Return the target of an abstract mesh; None if it does not tell, as before JAX 0.12."""
    device = getattr(mesh, "abstract_device", None)
    if device is None:
        return None
    platform = getattr(device, "platform", None) or ("cpu" if device.device_kind == "cpu" else None)
    return platform and Target(platform)
