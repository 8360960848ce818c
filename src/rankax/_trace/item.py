# SPDX-License-Identifier: MIT
"""The program of one item: a kernel is traced once, and its outputs are checked there.

Trees are flattened on entry and rebuilt on exit; in between there are only leaves. A pytree class
may check or convert the fields that it is rebuilt from, so it must see only the values of one item,
or those of the whole batch.
"""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rankax._base.functions import function_location, traced_as
from rankax._base.trees import check_outputs, leaves_with_names, spread_prefix
from rankax._base.words import listed, table
from rankax._trace.programs import ClosedJaxpr, evaluate


@dataclasses.dataclass(frozen=True)
class ItemProgram:
    """The traced kernel, from the mapped leaves of one item to its outputs."""

    where: str  # the kernel and its source line, for errors
    closed: Any  # the traced program
    out_tree: Any
    out_names: tuple[str, ...]
    out_axes: tuple[int | None, ...]  # where the mapped axis goes, counted from the front
    outputs: tuple[Any, ...] = ()  # what each reduction takes (`rankax._reduce`), if there are any

    def __call__(self, *leaves: Any) -> list[Any]:
        try:
            return evaluate(self.closed.jaxpr, self.closed.consts, *leaves)
        except NotImplementedError as error:  # such as a callback that `jax.vmap` cannot map
            error.add_note(f"This error comes from {self.where}")
            raise

    def with_constants(self, consts: Sequence[Any]) -> Self:
        """Return the same program with other arrays in place of those that it closes over."""
        return dataclasses.replace(self, closed=ClosedJaxpr(self.closed.jaxpr, list(consts)))

    def reuses_key(self) -> jax.errors.KeyReuseError:
        return jax.errors.KeyReuseError(
            f"{self.where}: it uses one PRNG key in every chunk, either an "
            "argument that is not mapped or a key from outside, or two chunks overlap; map over "
            "jax.random.split(key, n) with a chunk_size that divides n, or use "
            "jax.random.clone(key) in the kernel where all items are meant to draw the same"
        )

    def check_order(self) -> None:
        """Refuse to map a program with an ordered effect, which JAX cannot."""
        if has_order(self.closed):
            raise ValueError(
                f"{self.where}: it has an ordered effect, as a callback with ordered=True, which "
                "JAX cannot map; with chunk_size=1 the items run one after the other in their "
                "order, and with ordered=False the order is left open"
            )

    def check_unmapped_outputs(self) -> None:
        """Refuse outputs whose ``out_axes`` is None, but which depend on the item.

        `jax.vmap` of the traced program decides: it knows which outputs are mapped.
        """
        odd = [
            name
            for i, (name, axis) in enumerate(zip(self.out_names, self.out_axes, strict=True))
            if axis is None and self._depends_on_item(i)
        ]
        if odd:
            raise ValueError(
                f"{self.where}: out_axes is None for {listed(odd)}, which says "
                f"that {'it is' if len(odd) == 1 else 'they are'} the same for all items, but "
                f"{'it depends' if len(odd) == 1 else 'they depend'} on the item; give an axis"
            )

    def _depends_on_item(self, output: int) -> bool:
        avals = self.closed.in_avals
        two = [jax.ShapeDtypeStruct((2, *aval.shape), aval.dtype) for aval in avals]

        def is_refused(out_axis: int | None) -> bool:
            try:
                jax.eval_shape(jax.vmap(lambda *x: self(*x)[output], out_axes=out_axis), *two)
            except ValueError:
                return True
            return False

        return bool(two) and is_refused(None) and not is_refused(0)


def is_axis(entry: Any) -> bool:
    """Whether this is an entry of ``in_axes`` or ``out_axes``, and not a container of those."""
    return entry is None or (isinstance(entry, (int, np.integer)) and not isinstance(entry, bool))


def trace_item(
    fun: Callable[..., Any],
    inputs: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
    avals: Sequence[Any],
    out_axes: Any,
    axis_name: Hashable | None = None,
) -> ItemProgram:
    """Trace ``fun`` for one item.

    Parameters
    ----------
    fun : callable
        The kernel.
    inputs : callable
        Makes the arguments of ``fun`` from the mapped leaves of one item.
    avals : sequence
        Shape and dtype of each of those leaves.
    out_axes : pytree prefix
        Where the mapped axis goes in each output.
    axis_name : hashable, optional
        The name of the mapped axis; collectives over it are refused.
    """
    found: list[tuple[Any, list[str], list[int | None]]] = []

    @traced_as(fun)
    def on_leaves(*leaves: Any) -> list[Any]:
        args, kwargs = inputs(*leaves)
        out = fun(*args, **kwargs)
        axes = checked_output_axes(fun, out, out_axes)
        outs, tree = jax.tree.flatten(out)
        found.append((tree, [name for name, _ in leaves_with_names(out, "output")], axes))
        return outs

    vars(on_leaves).setdefault("__signature__", _LEAVES)  # JAX asks for it
    try:
        closed = jax.make_jaxpr(on_leaves)(*avals)
    except NameError as error:
        if axis_name is None or f"axis name: {axis_name}" not in str(error):
            raise
        raise _no_collective(fun, axis_name) from error
    # A collective may also have found an axis of this name outside.
    names = [getattr(effect, "name", None) for effect in closed.effects]
    if axis_name is not None and axis_name in names:
        raise _no_collective(fun, axis_name)
    tree, out_names, axes = found[-1]
    return ItemProgram(function_location(fun), closed, tree, tuple(out_names), tuple(axes))


_LEAVES = inspect.Signature([inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)])


def checked_output_axes(fun: Callable[..., Any], out: Any, out_axes: Any) -> list[int | None]:
    """Return where the mapped axis goes in each output of one item, or say which does not fit."""
    check_outputs(fun, out)
    where = function_location(fun)
    try:
        spread = spread_prefix(out_axes, out, "output", is_entry=is_axis, what="out_axes")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    axes: list[int | None] = []
    rows: list[tuple[str, ...]] = []
    odd: list[int] = []
    pairs = zip(leaves_with_names(out, "output"), spread, strict=True)
    for i, ((name, leaf), axis) in enumerate(pairs):
        rank = jnp.ndim(leaf)
        rows.append((name, str(jnp.shape(leaf)), str(axis), f"{-rank - 1} to {rank}"))
        # JAX expects ints, not the integers of NumPy.
        axes.append(None if axis is None else int(axis) % (rank + 1))
        if axis is not None and not -rank - 1 <= axis <= rank:
            odd.append(i)
    if odd:
        raise ValueError(
            f"{where}: {listed([rows[i][0] for i in odd])} cannot have the mapped axis where "
            "out_axes says\n\n"
            + table(("leaf", "shape of one item", "out_axes", "possible"), rows, odd)
        )
    return axes


def has_order(closed: Any) -> bool:
    """Whether a program has an effect that JAX keeps in order, and so cannot map."""
    return any("Ordered" in type(effect).__name__ for effect in closed.effects)


def _no_collective(fun: Callable[..., Any], axis_name: Hashable) -> ValueError:
    return ValueError(
        f"{function_location(fun)}: it uses a collective over axis_name={axis_name!r}, which would "
        "see the items of one chunk only; use jax.vmap, or take the collective out of the kernel"
    )


# Types of items and chunks. On a mesh with explicit axes, or inside `jax.shard_map`, they need the
# mesh: without it they do not fit the programs inside a kernel (`jit`, `scan`), nor their carries.


def with_axis(leaf: Any, axis: int, *size: int) -> jax.ShapeDtypeStruct:
    """Return the type of a leaf with ``axis`` of another size, or without it."""
    shape = (*leaf.shape[:axis], *size, *leaf.shape[axis + 1 :])
    spec = _spec(leaf)
    return _typed(leaf, shape, (*spec[:axis], *(None for _ in size), *spec[axis + 1 :]))


def with_shape(leaf: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return the type of a leaf with this shape; a new shape is not sharded."""
    return _typed(leaf, shape, _spec(leaf) if shape == leaf.shape else ())


def _typed(leaf: Any, shape: tuple[int, ...], spec: Sequence[Any]) -> jax.ShapeDtypeStruct:
    weak_type = getattr(leaf, "weak_type", False)  # PRNG keys have none
    on_mesh = _on_mesh(leaf, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=weak_type, **on_mesh)


def _spec(leaf: Any) -> tuple[Any, ...]:
    """Return the mesh axes that shard each axis of a leaf, as its type says."""
    sharding = getattr(getattr(leaf, "aval", leaf), "sharding", None)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return (*spec, *(None for _ in leaf.shape[len(spec) :]))


def _on_mesh(leaf: Any, spec: PartitionSpec) -> dict[str, Any]:
    """Return what the mesh adds to a type: a sharding, and whether devices differ in the value."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return {"sharding": NamedSharding(mesh, spec)}
    if AxisType.Manual not in mesh.axis_types:
        return {}
    aval = getattr(leaf, "aval", leaf)
    if (vma := getattr(aval, "vma", None)) is not None:  # JAX 0.7
        return {"vma": vma}
    if (varying := getattr(aval, "manual_axis_type", None)) is not None:
        return {"manual_axis_type": varying, "sharding": NamedSharding(mesh, PartitionSpec())}
    return {}
