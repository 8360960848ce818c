# SPDX-License-Identifier: MIT
"""A function that takes a batch itself, as the program of one item (``batched=True``).

The function takes and returns arrays with the items on axis 0. In the program of one item, a
primitive stands for a call of it with one item. The batching rule of the primitive makes one call
with all mapped items, so that the maps of a nest, one in another, give one axis. Loops, reductions
and devices know nothing of such functions.

* The function is traced for one item, and for the lengths that the chunks of a plan have. These
  programs are parameters of the primitive, apart from the lengths, so that what rewrites programs
  finds them (`with_subprograms`). No function is a parameter, so that programs can be compared,
  and an eager call finds what an earlier one compiled (`core/loop/eager_programs.py`).
* What the function closes over is an operand without that axis.
* Any other number of items, as under a `jax.vmap` from outside, is evaluated in groups of the
  longest length that divides it: side by side by `jax.vmap` of the program, or one after another if
  JAX cannot map the program.
* A derivative is that of the program for the items at hand, because the maps of a nest come first.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from rankax.call.base import Call
from rankax.core.base.messages import function_location, listed, plural, table
from rankax.core.loop.eager_programs import opened
from rankax.core.protocols import Form
from rankax.core.trace.derivatives import has_refs, of_some, primitive_of_program
from rankax.core.trace.programs import ItemProgram, evaluate, trace_item, with_shape


def call_for_item(
    fun: Callable[..., Any],
    on_arrays: Callable[[list[Any]], Any],
    items: Sequence[Any],
    lengths: Sequence[int],
) -> Any:
    """Call a function that takes a batch for one item; mapped items become one call.

    Parameters
    ----------
    fun : callable
        The function, for errors.
    on_arrays : callable
        Calls it with arrays that have an axis for the items in front.
    items : sequence of arrays
        Of one item.
    lengths : sequence of int
        How many items the chunks have, in ascending order.
    """
    arrays = [jnp.asarray(x) for x in items]
    each = (1, *(n for n in lengths if n not in (0, 1)))
    traces = [_trace(fun, on_arrays, arrays, n) for n in each]
    for n, longer in zip(each[1:], traces[1:], strict=True):
        _check_alike(fun, traces[0], longer, plural(n, "item"))
    consts = {id(const): const for traced in traces for const in traced.closed.consts}
    programs = [
        _with_operands(t.closed, _types(arrays, n), consts)
        for n, t in zip(each, traces, strict=True)
    ]
    operands = [lax.expand_dims(x, (0,)) for x in arrays] + list(consts.values())
    outs = _bind(operands, tuple(programs), each, len(arrays), 1)
    return traces[0].out_tree.unflatten([lax.squeeze(out, (0,)) for out in outs])


def _trace(
    fun: Callable[..., Any], on_arrays: Callable[..., Any], arrays: Sequence[Any], length: int
) -> ItemProgram:
    """Trace a function for this number of items, and check its outputs."""
    batch = functools.wraps(fun, updated=())(lambda *arrays: on_arrays([*arrays]))
    traced = trace_item(batch, lambda *arrays: (arrays, {}), _types(arrays, length), 0)
    closed, names, site = opened(traced.closed), traced.out_names, function_location(fun)
    shapes = [aval.shape for aval in closed.out_avals]
    if odd := [i for i, shape in enumerate(shapes) if shape[:1] != (length,)]:
        rows = [(name, str(shape)) for name, shape in zip(names, shapes, strict=True)]
        raise ValueError(
            f"{site}: with batched=True, the first axis of each output is that of the items, but "
            f"for {plural(length, 'item')}, {listed([names[i] for i in odd])} "
            f"{'has' if len(odd) == 1 else 'have'} another shape\n\n"
            + table(("output", "shape"), rows, odd)
        )
    if has_refs(closed.jaxpr.constvars, closed.effects):
        raise ValueError(
            f"{site}: with batched=True, it cannot use a jax.Ref; return the value instead"
        )
    return dataclasses.replace(traced, closed=closed)


def _types(arrays: Sequence[Any], length: int) -> list[Any]:
    return [with_shape(jax.typeof(x), (length, *x.shape)) for x in arrays]


def _check_alike(fun: Callable[..., Any], one: ItemProgram, longer: ItemProgram, many: str) -> None:
    """Refuse outputs of which more than the first axis depends on the number of items."""
    site = function_location(fun)
    if one.out_tree != longer.out_tree:
        raise ValueError(
            f"{site}: with batched=True, it must return the same outputs for any number of "
            f"items, but for {many} it returns {listed(longer.out_names)}, and for 1 item "
            f"{listed(one.out_names)}"
        )
    pairs = list(zip(one.closed.out_avals, longer.closed.out_avals, strict=True))
    odd = [i for i, (x, y) in enumerate(pairs) if (x.shape[1:], x.dtype) != (y.shape[1:], y.dtype)]
    if odd:
        named = zip(one.out_names, pairs, strict=True)
        rows = [(name, x.str_short(), y.str_short()) for name, (x, y) in named]
        raise ValueError(
            f"{site}: with batched=True, only the first axis of an output may depend on the "
            "number of items\n\n" + table(("output", "for 1 item", f"for {many}"), rows, odd)
        )


def _with_operands(closed: ClosedJaxpr, types: list[Any], consts: dict[int, Any]) -> Any:
    """Return the program as one of all operands: the items, then what any length closes over."""
    places = {key: place for place, key in enumerate(consts, start=len(types))}
    own = [places[id(const)] for const in closed.consts]

    def run(*operands: Any) -> list[Any]:
        return evaluate(closed.jaxpr, [operands[i] for i in own], *operands[: len(types)])

    shared = map(jax.typeof, consts.values())
    return jax.make_jaxpr(run)(*types, *(with_shape(aval, aval.shape) for aval in shared))


# The primitive. Its first operands have `size` items on axis 0. The program for so many, if there
# is one, is `call_jaxpr`, by which `checkify` knows it.


def _program_of(
    programs: Any,
    lengths: Sequence[int],
    items: int,
    size: int,
    call_jaxpr: ClosedJaxpr | None = None,
) -> Any:
    """Return the program for this number of items."""
    if call_jaxpr is not None:
        return call_jaxpr
    pairs = reversed([*zip(lengths, programs, strict=True)])
    length, closed = next(pair for pair in pairs if size % pair[0] == 0)
    if length == size:
        return closed
    one = programs[0]
    types = [with_shape(aval, aval.shape) for aval in one.in_avals]
    types[:items] = [with_shape(aval, (size, *aval.shape[1:])) for aval in one.in_avals[:items]]
    dims = [0 if i < items else None for i in range(len(types))]

    def run(*operands: Any) -> list[Any]:
        groups = [
            lax.reshape(x, (size // length, length, *x.shape[1:])) if dim == 0 else x
            for x, dim in zip(operands, dims, strict=True)
        ]
        outs = _each(closed, groups, dims)
        return [lax.reshape(out, (size, *out.shape[2:])) for out in outs]

    return jax.make_jaxpr(run)(*types)


def _each(closed: ClosedJaxpr, operands: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """Evaluate a program mapped over these axes of its operands."""
    run = functools.partial(evaluate, closed.jaxpr, closed.consts)
    at_once = jax.vmap(run, tuple(dims))
    try:
        jax.eval_shape(at_once, *operands)
    except NotImplementedError:  # what JAX raises where an operation has no rule
        pass
    else:
        return at_once(*operands)
    mapped = [i for i, dim in enumerate(dims) if dim is not None]
    rows = [jnp.moveaxis(operands[i], dims[i], 0) for i in mapped]
    of_row = of_some(run, operands, mapped)
    return lax.map(lambda row: of_row(*row), rows)


def _bind(
    operands: Sequence[Any], programs: Any, lengths: tuple[int, ...], items: int, size: int
) -> list[Any]:
    closed = dict(zip(lengths, programs, strict=True)).get(size)
    known = {} if closed is None else {"call_jaxpr": closed}
    own = {"programs": programs, "lengths": lengths, "items": items, "size": size}
    return _batch.bind(*operands, **own, **known)


def _types_of_outputs(*_: Any, programs: Any, size: int, **params: Any) -> tuple[list[Any], Any]:
    closed = params.get("call_jaxpr", programs[0])
    return [x.update(shape=(size, *x.shape[1:])) for x in closed.out_avals], closed.effects


def _batching_rule(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, items: int, size: int, **params: Any
) -> tuple[list[Any], list[int | None]]:
    """Make one call of all mapped items; but `jax.vmap` of it if what they share is mapped."""
    count = axis.size
    if all(dim is None for dim in dims):
        outs = _batch.bind(*operands, items=items, size=size, **params)
        return outs, [None] * len(outs)
    if any(dim is not None for dim in dims[items:]):
        outs = _each(_program_of(items=items, size=size, **params), operands, dims)
        return outs, [0] * len(outs)

    def joined(x: Any, dim: int | None) -> Any:
        x = jnp.moveaxis(x, dim, 0) if dim is not None else jnp.broadcast_to(x, (count, *x.shape))
        # To drop an axis, unlike a reshape, keeps what a mesh shares.
        return lax.squeeze(x, (1,)) if size == 1 else lax.collapse(x, 0, 2)

    def parted(out: Any) -> Any:
        if size == 1:
            return lax.expand_dims(out, (1,))
        return lax.reshape(out, (count, size, *out.shape[1:]))

    every = [joined(x, dim) for x, dim in zip(operands[:items], dims[:items], strict=True)]
    shared = operands[items:]
    programs, lengths = params["programs"], params["lengths"]
    outs = _bind([*every, *shared], programs, lengths, items, size * count)
    return [parted(out) for out in outs], [0] * len(outs)


_batch = primitive_of_program("rankax_batch", _program_of, _batching_rule, _types_of_outputs)


@dataclasses.dataclass(frozen=True)
class Batched(Form):
    """A kernel that takes a batch itself (`core/protocols.py`, `Form`)."""

    lengths: tuple[int, ...] = ()  # of the chunks that it is called with, in ascending order

    in_front = ("With batched=True, it gets them with one axis in front, for the items.",)
    takes_chunks = True

    def evaluate(self, call: Call, leaves: Sequence[Any], plan: Any) -> Any:
        """Evaluate the kernel for one item."""
        ranked = call.ranked

        def on_arrays(arrays: list[Any]) -> Any:
            own = dict(zip(ranked, arrays, strict=True))
            return call.call([own.get(i, leaf) for i, leaf in enumerate(leaves)], plan)

        return call_for_item(call.fun, on_arrays, [leaves[i] for i in ranked], self.lengths)
