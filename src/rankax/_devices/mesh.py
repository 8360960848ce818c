# SPDX-License-Identifier: MIT
"""Meshes of devices: the one that arrays are on, and the types that it adds to a program.

On a mesh with explicit axes, shardings are part of types. A kernel that devices share is traced
without them, and so is the program that each device runs (`inside`, `without_mesh`); around it, all
axes of the mesh are automatic (`with_auto_axes`).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import jax
from jax import core
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from rankax._base.arrays import is_staged
from rankax._trace.item import ItemProgram
from rankax._trace.programs import evaluate, mapped_program, with_params, with_subprograms

# JAX 0.7 has another name for the first and lacks the second: in `jit`, the caller sets the mesh.
_set_mesh: Any = getattr(jax, "set_mesh", None) or getattr(jax.sharding, "use_mesh", None)
_use_abstract_mesh: Any = getattr(jax.sharding, "use_abstract_mesh", None)


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
        mesh = getattr(mesh, "abstract_mesh", mesh)
        return _use_abstract_mesh(mesh) if _use_abstract_mesh else nullcontext()
    try:
        return _set_mesh(mesh)
    except (TypeError, ValueError):
        # An eager derivative, or `jax.vmap`, in which JAX lets only the caller set the mesh.
        return nullcontext()


def on_every_device(leaf: Any) -> Any:
    """Return an array that the types of an explicit mesh shard as one that they do not."""
    sharding = sharding_of(leaf)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec()))


def can_leave_mesh() -> bool:
    """Whether a program can be traced without the mesh that is entered: from JAX 0.8 on."""
    return _use_abstract_mesh is not None or jax.sharding.get_abstract_mesh().empty


def _no_mesh() -> contextlib.AbstractContextManager[Any]:
    return _use_abstract_mesh(AbstractMesh((), ())) if _use_abstract_mesh else nullcontext()


_is_inside = ContextVar("rankax_is_inside_parts", default=False)


def is_inside() -> bool:
    """Whether a kernel that devices share is being traced."""
    return _is_inside.get()


@contextlib.contextmanager
def inside(parts: Sequence[Any]) -> Generator[None]:
    """Trace a kernel that devices share: the calls that it makes in turn use no other devices.

    The program has the types of one device, without a mesh.
    """
    if not parts:
        yield
        return
    token = _is_inside.set(True)
    try:
        with _no_mesh():
            yield
    finally:
        _is_inside.reset(token)


def with_auto_axes(fun: Callable[..., Any], mesh: Any, specs: Any) -> Callable[..., Any]:
    """Return a function of lists of arrays in which no axis of the mesh is explicit.

    If one is, the shardings of the outputs are those of ``specs``.
    """
    here = jax.sharding.get_abstract_mesh()
    is_entered = here.empty or here.axis_names == mesh.axis_names
    if AxisType.Explicit not in mesh.axis_types and is_entered:
        return fun

    def called(*lists: list[Any]) -> Any:
        if not is_entered:  # arrays may lie on another mesh than the one that is set
            with _use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
                return fun(*lists)
        with on_mesh([x for arrays in lists for x in arrays]):
            return jax.sharding.auto_axes(fun, out_sharding=specs)(*lists)

    return called


def without_mesh(item: ItemProgram) -> ItemProgram:
    """Return the item without the types of arrays on a mesh that it closes over."""
    if all(jax.typeof(x).sharding.mesh.empty for x in item.closed.consts):
        return item
    return dataclasses.replace(item, closed=mapped_program(_untyped, item.closed))


def _untyped(jaxpr: Any) -> Any:
    # The types of equations follow from their inputs, but not those of the programs inside them.
    return jaxpr.replace(eqns=[_unsharded(with_subprograms(e, _retraced)) for e in jaxpr.eqns])


def _unsharded(eqn: Any) -> Any:
    shardings = {name: None for name, x in eqn.params.items() if isinstance(x, NamedSharding)}
    return with_params(eqn, **shardings) if shardings else eqn


def _retraced(jaxpr: Any) -> Any:
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    with _no_mesh():
        return jax.make_jaxpr(lambda *xs: evaluate(_untyped(jaxpr), (), *xs))(*avals).jaxpr
