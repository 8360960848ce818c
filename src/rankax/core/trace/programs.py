# SPDX-License-Identifier: MIT
"""Traced programs: evaluating one, traversing the ones inside it, and tracing one item.

A primitive keeps the programs that it calls among its parameters: `jax.jit` holds one,
`jax.lax.cond` a tuple of branches, `jax.lax.custom_linear_solve` a NamedTuple. `subprograms` yields
them; `with_subprograms` replaces them. Each container is rebuilt with its own type, because JAX
reads the fields of a NamedTuple by name.

With `jax_remat3` (JAX 0.12), an equation with a checkpoint calls a high-level primitive, an object
that is itself a parameter and has the parameters that count here. `name_and_params` looks into it.

A kernel is traced once, for one item, and its outputs are checked there (`trace_item`). Trees are
flattened on entry and rebuilt on exit; in between there are only leaves. A pytree class may check
or convert the fields that it is rebuilt from, so it must see only the values of one item, or of
the whole batch.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

# From JAX 0.12 on, the first two are the same class.
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rankax.core.base.arrays import SMALL, is_staged, scalar
from rankax.core.base.messages import function_location, listed, table, traced_as
from rankax.core.base.trees import check_outputs, leaves_with_names, spread_prefix

# From an equation as a function, the equation, what it reads, and its values, to its results.
Step = Callable[[Callable[..., list[Any]], Any, list[Any], list[Any]], list[Any]]


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluate a program. Every output is an array.

    `jax.core.eval_jaxpr` returns a constant output as the number in the program, which has a dtype
    but no shape.
    """
    outs = core.eval_jaxpr(jaxpr, consts, *args)
    return as_arrays(outs, [v.aval for v in jaxpr.outvars])


def evaluator(eqn: JaxprEqn, jaxpr: Jaxpr, inputs: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return an equation as a function."""
    return functools.partial(evaluate, only(eqn, jaxpr, inputs), ())


def only(eqn: JaxprEqn, jaxpr: Jaxpr, inputs: Sequence[Any]) -> Jaxpr:
    """Return the program of one equation of ``jaxpr``."""
    return with_variables(jaxpr, inputs, eqn.outvars, eqns=[eqn], effects=eqn.effects)


def with_variables(jaxpr: Jaxpr, invars: Sequence[Any], outvars: Any, **changes: Any) -> Any:
    """Return a program without constants, which has these variables and ``changes``."""
    unnamed = {"arg_names": ("",) * len(invars), "result_paths": ("",) * len(outvars)}
    debug_info = jaxpr.debug_info._replace(**unnamed)
    whole = {"constvars": [], "invars": list(invars), "outvars": outvars, **changes}
    return jaxpr.replace(debug_info=debug_info, **whole)


def evaluate_by(step: Step, jaxpr: Jaxpr, values: Sequence[Any]) -> list[Any]:
    """Evaluate a program by ``step`` for each equation, inside calls of `jax.jit` too.

    ``values`` belong to the constants and to the inputs. A step gets the equation as a function,
    the equation, the variables that it reads, and their values.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else known[var]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            given = [*inner.consts, *map(read, eqn.invars)]
            outs = evaluate_by(step, inner.jaxpr, given)
        else:
            free = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))
            outs = step(evaluator(eqn, jaxpr, free), eqn, free, [known[v] for v in free])
        known.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def as_arrays(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Return numbers as arrays of these types, and arrays as they are."""
    return [
        value if isinstance(value, jax.Array) else _as_array(value, aval)
        for value, aval in zip(values, avals, strict=True)
    ]


def _as_array(value: Any, aval: Any) -> jax.Array:
    # In a program, `jnp.asarray` keeps a weak type; outside, it is an implicit transfer.
    return jnp.asarray(value) if is_staged() else scalar(value, aval.dtype)


def name_and_params(eqn: JaxprEqn) -> tuple[str, dict[str, Any]]:
    """Return what an equation calls, and its parameters."""
    prim: Any = eqn.params.get("_prim")
    if type(prim).__name__ in _HIGH_LEVEL:
        return type(prim).__name__, prim.params
    return eqn.primitive.name, eqn.params


# All else is opaque. Test: ``tests/upstream/test_names.py``.
_HIGH_LEVEL = ("RematTraced", "CheckpointName", "HighLevelCall")


def with_params(eqn: JaxprEqn, **changes: Any) -> Any:
    """Return ``eqn`` with other values for some of its parameters."""
    if (params := name_and_params(eqn)[1]) is not eqn.params:
        changes = {"_prim": type(eqn.params["_prim"])(**{**params, **changes})}
    return eqn.replace(params={**eqn.params, **changes})


def subprograms(eqn: JaxprEqn) -> Iterator[Any]:
    """Yield the jaxpr of each program that an equation calls; of a branch, all of them."""
    waiting = [*name_and_params(eqn)[1].values()][::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            yield value.jaxpr if isinstance(value, ClosedJaxpr) else value
        # Most parameters hold nothing; to flatten them would take most of the time.
        elif isinstance(value, (tuple, list, dict)) and is_container(value):
            waiting += [*(value.values() if isinstance(value, dict) else value)][::-1]


def with_subprograms(eqn: JaxprEqn, fun: Callable[[Any], Any]) -> Any:
    """Return ``eqn`` with ``fun(jaxpr)`` in place of each program that it calls.

    The same object if ``fun`` returns every jaxpr unchanged.
    """
    changes = {}
    for name, value in name_and_params(eqn)[1].items():
        if not isinstance(value, (Jaxpr, ClosedJaxpr, tuple, list, dict)):
            continue  # to flatten it would take most of the time
        leaves, treedef = jax.tree.flatten(value, is_leaf=_is_leaf)
        # A program among other things may be one of two copies: a primitive of Equinox keeps a
        # function in one parameter, and the structure it was made with in another.
        if not all(isinstance(leaf, (Jaxpr, ClosedJaxpr)) for leaf in leaves):
            continue
        new = [
            mapped_program(fun, leaf) if isinstance(leaf, ClosedJaxpr) else fun(leaf)
            for leaf in leaves
        ]
        if any(a is not b for a, b in zip(new, leaves, strict=True)):
            changes[name] = treedef.unflatten(new)
    return with_params(eqn, **changes) if changes else eqn


def with_equations(jaxpr: Jaxpr, fun: Callable[[Any], Any]) -> Any:
    """Return ``jaxpr`` with ``fun(eqn)`` in place of each equation.

    The same object if ``fun`` returns every equation unchanged.
    """
    eqns = [fun(eqn) for eqn in jaxpr.eqns]
    is_same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


def mapped_program(fun: Callable[[Any], Any], closed: ClosedJaxpr) -> Any:
    """Return ``closed`` with ``fun(jaxpr)`` in place of its jaxpr, and the same constants."""
    jaxpr = fun(closed.jaxpr)
    return closed if jaxpr is closed.jaxpr else ClosedJaxpr(jaxpr, closed.consts)


def unchanged(program: Any) -> Any:
    """Return a program itself, where another function would change it."""
    return program


def is_container(value: Any) -> bool:
    """Whether ``value`` is a tuple, list, dict or NamedTuple, and not a class with other rules."""
    return type(value) in (tuple, list, dict) or (
        isinstance(value, tuple) and hasattr(value, "_fields")
    )


def _is_leaf(value: Any) -> bool:
    return not is_container(value)


@dataclasses.dataclass(frozen=True)
class ItemProgram:
    """The traced kernel, from the mapped leaves of one item to its outputs."""

    site: str  # the kernel and its source line, for errors
    closed: ClosedJaxpr  # the traced program
    out_tree: Any
    out_names: tuple[str, ...]
    out_axes: tuple[int | None, ...]  # where the mapped axis goes, counted from the front
    outputs: tuple[
        Any, ...
    ] = ()  # what each reduction takes (`rankax.core.reduce`), if there are any

    def __call__(self, *leaves: Any) -> list[Any]:
        try:
            return evaluate(self.closed.jaxpr, self.closed.consts, *leaves)
        except NotImplementedError as error:  # such as a callback that `jax.vmap` cannot map
            error.add_note(f"This error comes from {self.site}")
            raise

    def with_constants(self, consts: Sequence[Any]) -> Self:
        """Return the same program with other arrays in place of those that it closes over."""
        return dataclasses.replace(self, closed=ClosedJaxpr(self.closed.jaxpr, list(consts)))

    def with_literals(self) -> Self:
        """Return a program of which small arrays of integers, such as indices, are a part.

        As constants they would be operands: known when it runs, and not compared with those of
        programs that were kept.
        """
        consts = self.closed.consts
        others = [x for x in consts if not _is_index(x)]
        if len(others) == len(consts):
            return self

        def program(others: Sequence[Any], *args: Any) -> list[Any]:
            rest = iter(others)
            whole = [_spelled_out(x) if _is_index(x) else next(rest) for x in consts]
            return evaluate(self.closed.jaxpr, whole, *args)

        jaxpr, count = jax.make_jaxpr(program)(others, *self.closed.in_avals).jaxpr, len(others)
        constants, inputs = jaxpr.invars[:count], jaxpr.invars[count:]
        jaxpr = with_variables(jaxpr, inputs, jaxpr.outvars, constvars=constants)
        return dataclasses.replace(self, closed=ClosedJaxpr(jaxpr, others))

    def reuses_key(self) -> jax.errors.KeyReuseError:
        return jax.errors.KeyReuseError(
            f"{self.site}: it uses one PRNG key in every chunk, either an "
            "argument that is not mapped or a key from outside, or two chunks overlap; map over "
            "jax.random.split(key, n) with a chunk_size that divides n, or use "
            "jax.random.clone(key) in the kernel where all items are meant to draw the same"
        )

    def check_order(self) -> None:
        """Refuse to map a program with an ordered effect, which JAX cannot."""
        if has_order(self.closed):
            raise ValueError(
                f"{self.site}: it has an ordered effect, such as a callback with ordered=True, "
                "which JAX cannot map; with chunk_size=1 the items run one after another in order, "
                "and with ordered=False the order is left open"
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
                f"{self.site}: out_axes is None for {listed(odd)}, which says "
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


def _is_index(x: Any) -> bool:
    is_small = not isinstance(x, core.Tracer) and 0 < jnp.size(x) <= SMALL
    return is_small and (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == jnp.bool_)


def _spelled_out(x: Any) -> jax.Array:
    """Return an array made of literals."""
    numbers = [lax.full((1,), number, x.dtype) for number in np.ravel(x)]
    return lax.reshape(lax.concatenate(numbers, 0), x.shape)


class CollectiveError(ValueError):
    """Raised for a kernel that needs all items of its axis at once."""


def is_axis(entry: Any) -> bool:
    """Whether this is an entry of ``in_axes`` or ``out_axes``, and not a container of those."""
    return entry is None or (isinstance(entry, (int, np.integer)) and not isinstance(entry, bool))


def trace_item(
    fun: Callable[..., Any],
    inputs: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
    avals: Sequence[Any],
    out_axes: Any,
    axis: tuple[Hashable, int] | None = None,
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
    axis : (hashable, int), optional
        Name and length of the mapped axis. The length is a constant of the program; any other
        collective over the axis is refused.

    Raises
    ------
    CollectiveError
        For a collective over the axis.
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
        closed = jax.make_jaxpr(on_leaves, axis_env=[axis] if axis else None)(*avals)
    except AssertionError as error:  # how JAX refuses `jax.lax.pcast` outside `jax.shard_map`
        if axis is None or "varying" not in str(error):
            raise
        raise _no_collective(fun, axis[0]) from error
    if axis and _uses_axis(closed.jaxpr, axis[0]):
        raise _no_collective(fun, axis[0])
    tree, out_names, axes = found[-1]
    return ItemProgram(function_location(fun), closed, tree, tuple(out_names), tuple(axes))


def _uses_axis(jaxpr: Jaxpr, name: Hashable) -> bool:
    """Whether a program has a collective over this axis; not all of them have an effect."""
    if name in [getattr(effect, "name", None) for effect in jaxpr.effects]:
        return True

    def names(eqn: JaxprEqn) -> Iterator[Any]:
        for axes in (eqn.params.get("axes", ()), eqn.params.get("axis_name", ())):
            yield from axes if isinstance(axes, tuple) else (axes,)

    return any(
        name in [axis for axis in names(eqn) if not isinstance(axis, int)]
        or any(_uses_axis(inner, name) for inner in subprograms(eqn))
        for eqn in jaxpr.eqns
    )


def _no_collective(fun: Callable[..., Any], name: Hashable) -> CollectiveError:
    return CollectiveError(
        f"{function_location(fun)}: it uses a collective over axis_name={name!r}, which would see "
        "the items of one chunk only; use jax.vmap, or take the collective out of the kernel"
    )


_LEAVES = inspect.Signature([inspect.Parameter("leaves", inspect.Parameter.VAR_POSITIONAL)])


def checked_output_axes(fun: Callable[..., Any], out: Any, out_axes: Any) -> list[int | None]:
    """Return where the mapped axis goes in each output of one item, or say which does not fit."""
    check_outputs(fun, out)
    try:
        axes = spread_prefix(out_axes, out, "output", is_entry=is_axis, what="out_axes")
    except ValueError as error:
        raise ValueError(f"{function_location(fun)}: {error}") from None
    pairs = list(zip(axes, map(jnp.ndim, jax.tree.leaves(out)), strict=True))
    if all(axis is None or -rank - 1 <= axis <= rank for axis, rank in pairs):
        # JAX expects ints, not the integers of NumPy.
        return [None if axis is None else int(axis) % (rank + 1) for axis, rank in pairs]
    rows: list[tuple[str, ...]] = []
    odd: list[int] = []
    for (name, leaf), (axis, rank) in zip(leaves_with_names(out, "output"), pairs, strict=True):
        if axis is not None and not -rank - 1 <= axis <= rank:
            odd.append(len(rows))
        rows.append((name, str(jnp.shape(leaf)), str(axis), f"{-rank - 1} to {rank}"))
    raise ValueError(
        f"{function_location(fun)}: {listed([rows[i][0] for i in odd])} cannot have the mapped "
        "axis where out_axes says\n\n"
        + table(("leaf", "shape of one item", "out_axes", "possible"), rows, odd)
    )


def has_order(closed: ClosedJaxpr | JaxprEqn) -> bool:
    """Whether a program has an effect that JAX keeps in order, and so cannot map.

    No public class tells, so the name does. Test: ``tests/upstream/test_names.py``.
    """
    return any("Ordered" in type(effect).__name__ for effect in closed.effects)


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
    varying = getattr(getattr(leaf, "aval", leaf), "manual_axis_type", None)
    if AxisType.Manual not in mesh.axis_types or varying is None:
        return {}
    return {"manual_axis_type": varying, "sharding": NamedSharding(mesh, PartitionSpec())}
