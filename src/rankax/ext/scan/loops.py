# SPDX-License-Identifier: MIT
"""A scan as nested `jax.lax.scan` loops around one step.

A *schedule* arranges the loops. It only cuts the items that it receives and passes them on to the
step, so `run_scan` can choose what the items are. In a derivative they are slices of ``xs``, whose
cotangents form one array. Otherwise they can be nothing at all: the step reads ``xs`` in place, by
a running index.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr

from rankax.core.base import messages
from rankax.core.base.arrays import in_32_bits, scalar
from rankax.core.base.trees import check_leaves, leaves_with_names, type_name
from rankax.core.loop.eager_programs import Mode, call_of_kernel, kept_program, mode_of
from rankax.core.plan.schedule import is_known
from rankax.core.trace.derivatives import call_with_derivative_of, keep_rules
from rankax.core.trace.programs import ItemProgram, evaluate, with_axis
from rankax.ext.progress import Progress, checked_progress, progress_of_call

# The arguments.


class ScanCall(NamedTuple):
    """The arguments of a scan, checked; ``site`` is the call as errors name it."""

    site: str
    f: Callable[..., Any]
    init: Any
    xs: Any
    length: int
    reverse: bool
    unroll: int | bool
    progress: Any


def scan_call(
    scan: str, f: Any, init: Any, xs: Any, length: Any, reverse: bool, unroll: Any, progress: Any
) -> ScanCall:
    """Check the arguments; convert leaves to arrays and ``unroll`` to what every JAX accepts."""
    site = f"{scan}({messages.function_name(f)})" if callable(f) else scan
    progress = checked_progress(progress, site)
    messages.check_callable(f, site, "f")
    if not isinstance(unroll, bool):
        unroll = _checked_int(site, "unroll", unroll, "a bool or a non-negative int", least=0)
        unroll = unroll or True  # 0 unrolls the entire loop, but some versions of JAX refuse it
    check_leaves(site, init, "init")
    check_leaves(site, xs, "xs")
    init, xs = jax.tree.map(jnp.asarray, (init, xs))
    length = _scan_length(site, xs, length)
    return ScanCall(site, f, init, xs, length, reverse, unroll, progress)


def kept_steps(call: ScanCall, save_at: Any, **bounds: Any) -> Sequence[int]:
    """Return the steps whose outputs are kept, in the order of the outputs.

    They are counted in the order of execution, from 0, and a range if they form one. Of a slice,
    any integer is legal, except a step of 0.
    """
    site, length = call.site, call.length
    steps = range(length)[::-1] if call.reverse else range(length)
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if save_at is None:
        for name, bound in given.items():
            bounds[name] = _checked_int(site, name, bound, "an int or None", bools=True)
        if bounds["step"] == 0:
            raise ValueError(f"{site}: step must not be 0")
        return steps[slice(bounds["start"], bounds["stop"], bounds["step"])]
    if given:
        raise TypeError(
            f"{site}: save_at excludes start, stop and step, got {messages.listed([*given])}"
        )
    if not isinstance(save_at, Sequence) and getattr(save_at, "ndim", 0) != 1:
        raise TypeError(f"{site}: save_at must be a sequence of ints, got {_described(save_at)}")
    kept: list[int] = []
    for i, step in enumerate(save_at):
        index = _checked_int(site, f"save_at[{i}]", step, "an int")
        if not -length <= index < length:
            count = messages.plural(length, "step")
            raise ValueError(f"{site}: save_at[{i}] is {index}, but there are only {count}")
        kept.append(steps[index])
    stride = (kept[1] - kept[0] if len(kept) > 1 else 0) or 1
    even = range(kept[0], kept[0] + stride * len(kept), stride) if kept else range(0)
    return even if [*even] == kept else tuple(kept)


def _described(value: Any) -> str:
    return "a traced array" if isinstance(value, jax.core.Tracer) else type(value).__name__


def _checked_int(site: str, name: str, value: Any, expected: str, **options: Any) -> int:
    refusal = f"{site}: {name} must be {expected}, got"
    return messages.checked_int(value, refusal, came=_described(value), **options)


def chunk_sizes(site: str, chunk_size: Any, length: int) -> tuple[int, ...]:
    """Return the nested chunk sizes, outermost first."""
    if chunk_size is None:
        return (length,)
    if isinstance(chunk_size, str) and chunk_size == "sqrt":
        return (math.isqrt(max(length - 1, 0)) + 1,)
    if isinstance(chunk_size, str) or not isinstance(chunk_size, Sequence):
        return (messages.positive_int(chunk_size, site, "chunk_size"),)
    if not chunk_size:
        raise ValueError(f"{site}: chunk_size must hold at least one size, got {chunk_size!r}")
    return tuple(
        messages.positive_int(size, site, f"chunk_size[{i}]") for i, size in enumerate(chunk_size)
    )


def _scan_length(site: str, xs: Any, length: Any) -> int:
    if length is not None:
        length = _checked_int(site, "length", length, "a non-negative int", least=0)
    leaves = leaves_with_names(xs, "xs")
    if not leaves:
        if length is None:
            raise ValueError(f"{site}: give length, or xs with at least one array to scan over")
        return length
    steps = messages.common_length([(path, leaf, 0) for path, leaf in leaves], site)
    if length is not None and length != steps:
        rows = [(path, str(leaf.shape), str(steps)) for path, leaf in leaves]
        raise ValueError(
            f"{site}: length is {length}, but the leading axis of xs is {steps}; "
            "leave length out\n\n"
            + messages.table(("leaf", "shape", "length"), rows, range(len(rows)))
        )
    if not is_known(steps):
        raise ValueError(
            f"{site}: the leading axis of xs has the unknown length {steps}; use jax.lax.scan, "
            "which takes it, or export a known length"
        )
    return steps


# The body.


def trace_body(call: ScanCall) -> tuple[ItemProgram, list[Any], list[Any]]:
    """Trace the body for one step and check what it returns.

    Returns its program, whose ``out_tree`` is that of ``(carry, y)``, and the leaves of the first
    carry and of ``xs``. The program takes and returns leaves, because a class that checks or
    converts its leaves must only see the values of one step, or those of all steps.
    """
    tree = jax.tree.structure(call.init)
    items, x_tree = jax.tree.flatten(call.xs)
    x = [with_axis(leaf, 0) for leaf in items]
    location = messages.function_location(call.f)
    site = f"{call.site}: the scan body {location}"
    out_trees: list[Any] = []

    def described() -> tuple[Any, ...]:
        pairs = leaves_with_names(call.init, "carry")
        pairs += leaves_with_names(x_tree.unflatten(x), "x")
        return ("argument", "type"), [(name, type_name(leaf)) for name, leaf in pairs], ()

    @messages.traced_as(call.f)
    def on_leaves(carry: list[Any], x: list[Any]) -> list[Any]:
        with messages.noted_errors(call.f, described):
            out = call.f(tree.unflatten(carry), x_tree.unflatten(x))
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            is_sequence = isinstance(out, (tuple, list))
            came = f"{type(out).__name__} of {len(out)}" if is_sequence else type_name(out)
            raise TypeError(f"{site} must return a pair (carry, y), got {came}")
        check_carry(call.site, site, "init", call.init, out[0])
        check_leaves(call.site, out[1], "y")
        leaves, out_tree = jax.tree.flatten(tuple(out))
        out_trees.append(out_tree)
        return leaves

    closed, init = trace_step(site, "init", call.init, on_leaves, x)
    return ItemProgram(location, keep_rules(closed), out_trees[-1], (), ()), init, items


def check_carry(site: str, body: str, name: str, init: Any, carry: Any) -> None:
    """Refuse a returned carry of another structure than the first one, which is called ``name``."""
    check_leaves(site, carry, "the returned carry")
    before, after = jax.tree.structure(init), jax.tree.structure(carry)
    if before == after:
        return
    given, returned = (dict(leaves_with_names(tree, name)) for tree in (init, carry))
    missing = [path for path in given if path not in returned]
    extra = [path for path in returned if path not in given]
    details = [f"it lacks {messages.listed(missing)}"] if missing else []
    details += [f"it adds {messages.listed(extra)}"] if extra else []
    raise TypeError(
        f"{body} must return a carry with the structure of {name}; "
        f"{' and '.join(details) or 'its containers differ'}\n\n"
        + messages.table(
            ("carry", "structure"), [(name, str(before)), ("returned", str(after))], [1]
        )
    )


def trace_step(
    site: str, name: str, init: Any, step: Callable[..., list[Any]], *x: Any
) -> tuple[Any, list[jax.Array]]:
    """Trace a step from the leaves of a carry, and of ``x``, to those of the next carry and more.

    Returns the program and the leaves of the first carry. As in `jax.lax.scan`, a weakly typed leaf
    takes the dtype that the step returns for it, which costs a second trace. Any other change of
    type is refused.
    """
    leaves = jax.tree.leaves(init)
    trace = jax.make_jaxpr(step)
    closed = trace(leaves, *x)
    first = list(map(_promoted, leaves, closed.out_avals))
    if any(a.dtype != b.dtype for a, b in zip(leaves, first, strict=True)):
        closed = trace(first, *x)
    triples = zip(leaves_with_names(init, name), first, closed.out_avals, strict=False)
    rows = [(path, type_name(leaf), type_name(new)) for (path, _), leaf, new in triples]
    if odd := [i for i, (_, before, after) in enumerate(rows) if before != after]:
        raise TypeError(
            f"{site} must return a carry with the shapes and dtypes of {name}; "
            f"{messages.listed([rows[i][0] for i in odd])} "
            f"{'differs' if len(odd) == 1 else 'differ'}\n\n"
            + messages.table(("leaf", "carry in", "carry out"), rows, odd)
        )
    return closed, first


def _promoted(leaf: jax.Array, out: Any) -> jax.Array:
    """Give a weakly typed leaf of a first carry the dtype that the body returns for it."""
    is_weak = getattr(leaf, "weak_type", False)  # PRNG keys have no such attribute
    if not is_weak or leaf.dtype == out.dtype:
        return leaf
    return lax.convert_element_type(leaf, jnp.result_type(leaf, out.dtype))


# The loops.

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan, and how every loop of a schedule runs its steps, which take and return leaves."""

    length: int
    reverse: bool
    unroll: int | bool
    carry_tree: Any
    y_tree: Any
    y_avals: Sequence[Any] = ()  # the types of the leaves of an output
    step: Any = None  # from a carry and an item to the next carry and an output
    restart: Any = None  # from the carry after a kept step to that before the next, if they differ

    def on(self, jaxpr: Jaxpr, consts: list[Any]) -> Self:
        """Return the loop whose steps are those of the body, which closes over these arrays.

        In the loop they have at least 32 bits, in which their cotangents are added.
        """
        carried = self.carry_tree.num_leaves
        dtypes, wide = [x.dtype for x in consts], list(map(in_32_bits, consts))

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            pairs = zip(wide, dtypes, strict=True)
            own = [x if x.dtype == dtype else x.astype(dtype) for x, dtype in pairs]
            out = evaluate(jaxpr, own, *carry, *x)
            return out[:carried], out[carried:]

        avals = [y.aval for y in jaxpr.outvars[carried:]]
        return dataclasses.replace(self, step=step, y_avals=avals)

    def run(self, carry: Any, items: Any, length: int) -> tuple[Any, Any]:
        return lax.scan(self.step, carry, items, length, self.reverse, self.unroll)

    def skip(
        self, carry: Any, items: Any, begin: int, end: int, *, checkpoint: bool = False
    ) -> Any:
        """Return the carry after some steps, counted as in `cut`, without outputs."""
        if begin == end:
            return carry
        only_carry = dataclasses.replace(self, step=lambda c, x: (self.step(c, x)[0], None))
        run = functools.partial(only_carry.run, length=end - begin)
        return (jax.checkpoint(run) if checkpoint else run)(carry, self.cut(items, begin, end))[0]

    def in_chunks(
        self, chunk: Callable[[int], Step], carry: Any, items: Any, length: int, size: int
    ) -> tuple[Any, Any]:
        """Loop over chunks of ``size`` steps, the last of which may be shorter.

        ``chunk``: returns what runs the steps of a chunk, from their number. Its outputs have an
        axis in front, along which those of all chunks are joined.
        """
        count = length // size
        unroll = self.unroll if self.unroll is True else max(1, self.unroll // size)
        stacked = jax.tree.map(  # splitting the axis is only a reshape
            lambda leaf: leaf.reshape(count, size, *leaf.shape[1:]),
            self.cut(items, 0, count * size),
        )
        carry, ys = lax.scan(chunk(size), carry, stacked, count, self.reverse, unroll)
        ys = jax.tree.map(lambda y: lax.collapse(y, 0, 2), ys)
        if left := length % size:
            carry, rest = chunk(left)(carry, self.cut(items, length - left, length))
            ys = self.join(ys, rest)
        return carry, ys

    def cut(self, items: Any, begin: int, end: int) -> Any:
        """Cut the leading axis to some steps, counted in the order of execution."""

        def cut(leaf: jax.Array) -> jax.Array:
            length = leaf.shape[0]
            low, high = (length - end, length - begin) if self.reverse else (begin, end)
            return lax.slice_in_dim(leaf, low, high)

        return jax.tree.map(cut, items)

    def join(self, ys: Any, later: Any) -> Any:
        """Join the outputs of two successive loops; a reversed loop writes backwards."""
        pieces = (later, ys) if self.reverse else (ys, later)
        return jax.tree.map(lambda *leaves: lax.concatenate(leaves, 0), *pieces)


# Takes a loop, the first carry and the items; returns the last carry and the tree of all outputs.
Schedule = Callable[[Loop, Any, Any], tuple[Any, Any]]


def run_scan(
    call: ScanCall,
    choose: Callable[[Loop, ItemProgram, Any], tuple[Schedule, bool, Hashable]],
    kept: Callable[[Any], Any] = lambda ys: ys,
) -> tuple[Any, Any]:
    """Trace the body, choose a schedule and whether it reads ``xs`` in place, and run it.

    ``choose`` also returns by what an eager call finds its program (`kept_program`), or None. It
    gets the loop without steps, the body, and the leaves of the first carry and of ``xs``.

    Under `jax.disable_jit` the body itself runs, step by step, on values, and ``kept`` returns what
    the schedule would, given the outputs of all steps.
    """
    # The functions below must not hold `call`: JAX keeps them, and its leaves may be tracers.
    options = call.length, call.reverse, call.unroll
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        carry, ys = lax.scan(call.f, call.init, call.xs, *options)
        return carry, kept(ys)
    with progress_of_call(
        call.progress if call.length else False, messages.function_name(call.f)
    ) as shown:
        body, init, xs = trace_body(call)
        loop = Loop(*options, *body.out_tree.children())
        schedule, in_place, key = choose(loop, body, (init, xs))
        reports = shown and shown.reports(call.length, 1, call.length)
        carried = len(init)

        def program(body: ItemProgram, leaves: list[Any]) -> tuple[Any, Any]:
            run = functools.partial(_run_schedule, schedule, loop, body.closed.jaxpr, reports)
            arrays = list(body.closed.consts), leaves[:carried], leaves[carried:]
            sliced, indexed = (functools.partial(run, by_index=by) for by in (False, True))
            if in_place and arrays[2]:
                return call_with_derivative_of(sliced, indexed, *arrays)
            return sliced(*arrays)

        mode = mode_of([*init, *xs, *body.closed.consts])
        if reports is not None or body.closed.effects:
            mode = Mode.STAGED
        key = None if key is None else (key, loop)
        with call_of_kernel(body.site):
            jit: Any = lambda f, _: jax.jit(f)  # noqa: E731
            run: Any = kept_program(lambda: program, body, [*init, *xs], key, mode, jit)
            carry, ys = run()
        return loop.carry_tree.unflatten(carry), ys


def _run_schedule(
    schedule: Schedule,
    loop: Loop,
    jaxpr: Jaxpr,
    reports: Progress | None,
    consts: list[Any],
    init: list[Any],
    xs: list[Any],
    *,
    by_index: bool,
) -> tuple[Any, Any]:
    """Return the leaves of the last carry, and the tree of all outputs.

    By index is for a schedule that copies parts of ``xs``: reading ``xs`` in place copies nothing.
    Transposed, however, each inner loop would begin with a cotangent as large as ``xs`` and end by
    adding all of it. So derivatives, of every order, are those of the schedule that slices ``xs``.
    """
    plain = loop.on(jaxpr, consts)
    if not by_index and reports is None:
        return schedule(plain, init, xs)

    def step(state: tuple[Any, jax.Array], x: Any) -> tuple[tuple[Any, jax.Array], Any]:
        carry, done = state
        if reports is not None:
            reports.step(done)
        if by_index:
            at = loop.length - 1 - done if loop.reverse else done
            x = [lax.dynamic_index_in_dim(leaf, at, 0, keepdims=False) for leaf in xs]
        carry, y = plain.step(carry, x)
        return (carry, done + 1), y

    start = scalar(0, jnp.int32 if loop.length < 2**31 else jnp.int64)
    counting = dataclasses.replace(plain, step=step)
    (carry, done), ys = schedule(counting, (init, start), None if by_index else xs)
    if reports is not None:
        reports.end(done, (carry, ys))
    return carry, ys
