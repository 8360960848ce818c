# SPDX-License-Identifier: MIT
"""Meshes of devices, and a batch axis that is cut into one contiguous part for each device.

On a mesh with explicit axes, shardings are part of types. A kernel that devices share is traced
without them, and so is the program that each device runs (`inside`, `without_mesh`); around it, all
axes of the mesh are automatic (`with_auto_axes`).

Where D devices do not divide N items, the first ``N % D`` parts have one item more than the others,
whose last item is there twice: so all parts are equally long (`dealt`, `joined`). `over_parts`
evaluates that place by itself. JAX cannot store such an axis in equal shards, so each device has
all of an array that is cut so inside a program, and each gets all outputs: one all-gather of those,
one of the cotangents in a reverse pass. Outputs on the first device alone would be smaller, but JAX
refuses to combine them with results that are on all devices, such as a sum.

``tests/devices`` checks what compiled programs send.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rankax.core.base.arrays import is_staged, on_mesh
from rankax.core.trace import programs


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh that is set."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


_is_inside = ContextVar("rankax_is_inside_parts", default=False)


def is_inside() -> bool:
    """Whether a kernel that devices share is being traced."""
    return _is_inside.get()


@contextlib.contextmanager
def inside() -> Generator[None]:
    """Trace a kernel that devices share: the calls that it makes in turn use no other devices.

    The program has the types of one device, without a mesh.
    """
    token = _is_inside.set(True)
    try:
        with no_mesh():
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
            with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
                return fun(*lists)
        with on_mesh([x for arrays in lists for x in arrays]):
            return jax.sharding.auto_axes(fun, out_sharding=specs)(*lists)

    return called


def without_mesh(item: programs.ItemProgram) -> programs.ItemProgram:
    """Return the item without the types of arrays on a mesh that it closes over."""
    if all(jax.typeof(x).sharding.mesh.empty for x in item.closed.consts):
        return item
    return dataclasses.replace(item, closed=programs.mapped_program(_untyped, item.closed))


def _untyped(jaxpr: Jaxpr) -> Any:
    # The types of equations follow from their inputs, but not those of the programs inside them.
    eqns: list[Any] = []
    moved: dict[Any, Any] = {}  # what only moves among devices is left out

    def variables(atoms: Sequence[Any]) -> list[Any]:
        return [x if isinstance(x, Literal) else moved.get(x, x) for x in atoms]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _ONLY_MOVE:
            moved.update(zip(eqn.outvars, variables(eqn.invars), strict=True))
        else:
            eqn = eqn.replace(invars=variables(eqn.invars)) if moved else eqn
            eqns.append(_unsharded(programs.with_subprograms(eqn, _retraced)))
    outvars = {"outvars": variables(jaxpr.outvars)} if moved else {}
    return jaxpr.replace(eqns=eqns, **outvars)


_ONLY_MOVE = ("reshard", "sharding_constraint")


def _unsharded(eqn: JaxprEqn) -> Any:
    shardings = {name: None for name, x in eqn.params.items() if isinstance(x, NamedSharding)}
    # `jax.vmap` of a kernel enters the mesh of what the kernel closes over, to broadcast it.
    with eqn.ctx.manager, no_mesh():
        eqn = eqn.replace(ctx=type(eqn.ctx)())
    return programs.with_params(eqn, **shardings) if shardings else eqn


def _retraced(jaxpr: Jaxpr) -> Any:
    """Trace a program anew, whose constants stay apart from it."""
    apart = jaxpr.replace(constvars=list(jaxpr.constvars))  # JAX 0.12 keeps constants in the jaxpr
    count = len(jaxpr.constvars)
    avals: list[Any] = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

    def run(*args: Any) -> list[Any]:
        return programs.evaluate(_untyped(apart), args[:count], *args[count:])

    with no_mesh():
        new = jax.make_jaxpr(run)(*avals).jaxpr
    if not count:
        return new
    assert not new.constvars, new.constvars
    return programs.with_variables(
        new, new.invars[count:], new.outvars, constvars=new.invars[:count]
    )


@dataclasses.dataclass(frozen=True)
class Parts:
    """One axis of a batch, cut into ``count`` contiguous parts, one for each device.

    Each part has ``shorter`` items, and the first ``longer`` parts have one more.
    """

    axis: int
    length: int
    count: int
    names: tuple[str, ...]  # the mesh axes that shard it
    mesh: Any

    @property
    def shorter(self) -> int:
        return self.length // self.count

    @property
    def longer(self) -> int:
        return self.length % self.count

    @property
    def mesh_here(self) -> Any:
        """The mesh as it is entered, whose axes may be of another type."""
        here = jax.sharding.get_abstract_mesh()
        if here.empty:
            return self.mesh
        if not isinstance(self.mesh, Mesh) or self.mesh.shape != here.shape:
            return here
        # With its devices: of a program whose arguments are on no mesh, JAX would not know them.
        return Mesh(self.mesh.devices, here.axis_names, axis_types=here.axis_types)

    def begin(self, number: Any) -> Any:
        """Return where the part of this number begins."""
        shorter, longer = (np.asarray(n, number.dtype) for n in (self.shorter, self.longer))
        return number * shorter + jnp.minimum(number, longer)

    def dealt(self, x: Any, axis: int) -> Any:
        """Return an array of an axis that the parts do not divide as one that they do."""
        if not x.shape[axis] % self.count:  # it is one
            return x
        x = _on_each(x, self.mesh_here)
        head, tail = self._split(x, axis, self.longer * (self.shorter + 1))
        tail = _rows(tail, axis, self.count - self.longer)
        last = lax.slice_in_dim(tail, self.shorter - 1, None, axis=axis + 1)
        tail = lax.concatenate([tail, last], axis + 1)
        whole = lax.concatenate([head, lax.collapse(tail, axis, axis + 2)], axis)
        return _on_each(whole, self.mesh_here)

    def joined(self, x: jax.Array, axis: int) -> jax.Array:
        """Return such an array with each item once, on each device."""
        rows = _rows(_on_each(x, self.mesh_here), axis, self.count)
        head, tail = self._split(rows, axis, self.longer)
        tail = lax.slice_in_dim(tail, 0, self.shorter, axis=axis + 1)
        return lax.concatenate([lax.collapse(each, axis, axis + 2) for each in (head, tail)], axis)

    def _split(self, x: jax.Array, axis: int, at: int) -> list[jax.Array]:
        return [lax.slice_in_dim(x, *ends, axis=axis) for ends in ((0, at), (at, None))]


def _rows(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Make an axis two, the first of which has length ``count``."""
    return lax.reshape(x, (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]))


def gathered(arrays: Sequence[jax.Array], mesh: Any) -> list[jax.Array]:
    """Send arrays that have the parts on axis 0 to all devices, those of one dtype as one array."""
    outs = list(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        positions = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        flat = [lax.collapse(arrays[i][:, None], 1) for i in positions]
        whole = _on_each(lax.concatenate(flat, 1), mesh, [0])
        ends = itertools.accumulate(x.shape[1] for x in flat)
        for i, piece in zip(positions, jnp.split(whole, list(ends)[:-1], 1), strict=True):
            outs[i] = lax.reshape(piece, arrays[i].shape)
    return outs


def _on_each(x: jax.Array, mesh: Any, axes: Sequence[int] | None = None) -> jax.Array:
    """Give each device all of an array along these axes, by default all; XLA settles the others."""
    if not is_staged():  # the sharding of an eager array is settled
        return x
    axes = range(x.ndim) if axes is None else axes
    spec = [None if axis in axes else PartitionSpec.UNCONSTRAINED for axis in range(x.ndim)]
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
