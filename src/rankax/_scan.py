# SPDX-License-Identifier: MIT
"""Scans that store less: some of the ``ys``, or some of the carries of the reverse pass.

Both functions trace the body once (`_trace_body`) and then lay the same step out in nested
`jax.lax.scan` loops: `_scan_kept` keeps one step of each block, `_scan_checkpointed` checkpoints
each chunk. A layout only cuts the items it is given, and hands them to the step. So `_run_layout`
can choose what they are: nothing, where the step reads ``xs`` in place by a running index, as long
as nobody differentiates; slices of ``xs``, whose cotangents form one array, in a derivative.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from rankax._errors import function_location, function_name, listed, table
from rankax._slicing import (
    KeptSteps,
    common_length,
    cut_steps,
    find_kept_steps,
    positive_int,
    scalar,
    split_into_chunks,
)
from rankax._tangents import jvp_of_live
from rankax._trees import leaves_with_names

__all__ = ["checkpoint_chunked_scan", "sliced_scan"]

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def sliced_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    start: int | None = None,
    stop: int | None = None,
    step: int | None = None,
    checkpoint: bool = False,
) -> tuple[Carry, Y]:
    r"""Scan, and keep only the outputs ``ys[start:stop:step]``.

    Equivalent to ::

        carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)
        ys = jax.tree.map(lambda y: y[start:stop:step], ys)

    but the other ``ys`` are never stored, and what serves them alone is not computed where the
    compiler can see it.

    Parameters
    ----------
    f : callable
        The scan body: takes a carry and one slice of ``xs``, returns a pair ``(carry, y)``.
    init : pytree
        The first carry. Its leaves keep their shapes and dtypes.
    xs : pytree, optional
        Arrays of one length along axis 0, looped over. All of them are used, also at skipped
        steps.
    length : int, optional
        Number of steps; needed only without ``xs``.
    reverse : bool, default False
        Run from the last step to the first. The slice still counts from the first.
    unroll : int or bool, default 1
        How many steps to put in one iteration of the compiled loop; True (or 0) for all of them.
    start, stop, step : int, optional
        The slice of ``ys``, with Python's meaning: negative numbers count from the end, numbers
        out of range are clipped, a negative step turns the order around.
    checkpoint : bool, default False
        Let the reverse pass store one carry per kept step, and recompute the stretch from one to
        the next.

    Returns
    -------
    carry : pytree
        The carry after all steps, skipped ones included.
    ys : pytree
        The kept outputs, stacked along axis 0, with dtypes as `jax.lax.scan` gives them.

    Raises
    ------
    TypeError
        If an argument has the wrong type, ``f`` does not return a pair, or the carry it returns
        differs from ``init`` in structure, shape or dtype.
    ValueError
        If ``step`` is 0, ``length`` is negative, missing or contradicts ``xs``, or the leaves of
        ``xs`` differ in length or have no axis.

    See Also
    --------
    checkpoint_chunked_scan : Checkpoints that do not depend on which outputs are kept.

    Notes
    -----
    *Traces.* ``f`` is traced once, whatever the length and the slice, also under `jax.grad`; twice
    where `jax.lax.scan` does so, to give a weakly typed ``init`` the dtype that ``f`` returns. The
    compiled program holds between one and six copies of it.

    *Memory.* For ``n`` steps of which ``k`` are kept, beyond inputs and outputs: forward, one step,
    and one copy of the ``k`` outputs where the slice leaves no room for the last block, as
    ``ys[::3]`` of 10, or ``step`` is negative. ``xs`` is read in place. A derivative copies
    ``xs`` at most once, not at all if the kept steps divide it evenly. The reverse pass stores what
    ``f`` needs to be differentiated at ``n`` steps; with ``checkpoint``, ``k`` carries and what
    ``f`` needs at the steps of the longest stretch without a kept step.

    *Time.* That of `jax.lax.scan`; with ``checkpoint``, one more evaluation of each step in the
    reverse pass.

    Examples
    --------
    A spring, of whose 1000 steps every 250th is kept:

    >>> import jax, jax.numpy as jnp
    >>> from rankax import sliced_scan
    >>> def leapfrog(state, dt):
    ...     position, velocity = state
    ...     velocity = velocity - dt * position
    ...     position = position + dt * velocity
    ...     return (position, velocity), position
    >>> init, dts = (jnp.array(1.0), jnp.array(0.0)), jnp.full(1000, 0.01)
    >>> carry, ys = sliced_scan(leapfrog, init, dts, start=249, step=250)
    >>> ys.shape
    (4,)
    >>> bool(ys[-1] == carry[0])
    True
    """
    where = _name_of_call("sliced_scan", f)
    window = slice(*_slice_bounds(where, start=start, stop=stop, step=step))
    init, xs, length, unroll = _scan_arguments(where, f, init, xs, length, unroll)
    if _is_debugging():
        carry, ys = lax.scan(f, init, xs, length, reverse, unroll)
        return carry, jax.tree.map(lambda y: y[window], ys)
    kept = find_kept_steps(length, window, reverse=reverse)
    body, operands = _trace_body(where, f, init, xs)

    def layout(loop: _Loop, carry: Any, items: Any) -> tuple[Any, Any]:
        if kept.all and not checkpoint:
            return loop.run(carry, items, length)
        return _scan_kept(loop, carry, items, kept, checkpoint=checkpoint)

    in_place = not kept.all
    carry, ys = _run_layout(layout, body, operands, length, reverse, unroll, in_place=in_place)
    if window.step is not None and window.step < 0:
        ys = jax.tree.map(lambda y: lax.rev(y, (0,)), ys)
    return carry, ys


def checkpoint_chunked_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    chunk_size: int | Sequence[int] | None = None,
    policy: Callable[..., bool] | None = None,
) -> tuple[Carry, Y]:
    r"""Scan, and let the reverse pass store one carry per chunk instead of every step.

    Equivalent to ::

        carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)

    in values and in derivatives of every order. The reverse pass recomputes each chunk from its
    first carry (Griewank and Walther, *Algorithm 799: revolve*, 2000, treat which chunks are best).

    Parameters
    ----------
    f, init, xs, length, reverse, unroll
        As in `sliced_scan` and `jax.lax.scan`.
    chunk_size : int or sequence of int, optional
        At most how many steps lie between two checkpoints. A smaller chunk is used where it
        divides the length (down to 4/5 of the bound) or makes the chunks alike in size; the last
        one may be shorter. A sequence nests checkpoints, outermost first: ``(1000, 30)`` puts one
        every 1000 steps, and while such a chunk is recomputed, one every 30. ``None`` puts one
        checkpoint around the whole scan.
    policy : callable, optional
        What a chunk may store nevertheless, as in `jax.checkpoint` (see
        `jax.checkpoint_policies`). Default: nothing.

    Returns
    -------
    carry, ys : pytree
        Those of `jax.lax.scan`.

    Raises
    ------
    TypeError
        If an argument has the wrong type, ``f`` does not return a pair, or the carry it returns
        differs from ``init`` in structure, shape or dtype.
    ValueError
        If a chunk size is not positive, the sequence is empty, ``length`` is negative, missing or
        contradicts ``xs``, or the leaves of ``xs`` differ in length or have no axis.

    See Also
    --------
    sliced_scan : Also leaves out some of the ``ys``.

    Notes
    -----
    *Traces.* ``f`` is traced once, however the length divides, also under `jax.grad`; twice where
    `jax.lax.scan` does so, to give a weakly typed ``init`` the dtype that ``f`` returns.

    *Memory.* For ``n`` steps in chunks of ``c``, the reverse pass stores ``n / c`` carries and what
    ``f`` needs at ``c`` steps: least near ``c = sqrt(n)``. Nested ``d`` deep it is near
    ``n ** (1 / (d + 1))`` of each. Where the chunks do not divide the length, ``ys`` are copied
    once, and a derivative copies ``xs`` once.

    *Time.* The reverse pass evaluates ``f`` once more per level of nesting.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import checkpoint_chunked_scan
    >>> def logistic(x, rate):
    ...     return rate * x * (1 - x), None
    >>> def end(x0, **options):
    ...     return checkpoint_chunked_scan(logistic, x0, jnp.full(101, 1.5), **options)[0]
    >>> plain = jax.grad(lambda x0: jax.lax.scan(logistic, x0, jnp.full(101, 1.5))[0])(0.2)
    >>> bool(jnp.isclose(jax.grad(lambda x0: end(x0, chunk_size=10))(0.2), plain, rtol=1e-5))
    True
    """
    where = (
        f"checkpoint_chunked_scan({function_name(f)})" if callable(f) else "checkpoint_chunked_scan"
    )
    sizes = _chunk_sizes(where, chunk_size)
    if policy is not None and not callable(policy):
        raise TypeError(f"{where}: policy must be callable or None, got {type(policy).__name__}")
    init, xs, length, unroll = _scan_arguments(where, f, init, xs, length, unroll)
    if _is_debugging():
        return lax.scan(f, init, xs, length, reverse, unroll)
    body, operands = _trace_body(where, f, init, xs)

    def layout(loop: _Loop, carry: Any, items: Any) -> tuple[Any, Any]:
        return _scan_checkpointed(loop, carry, items, length, sizes or (length,), policy)

    cut_evenly = not sizes or length <= sizes[0] or split_into_chunks(length, sizes[0]).even
    in_place = not cut_evenly
    return _run_layout(layout, body, operands, length, reverse, unroll, in_place=in_place)


# What is asked for: checked before the body is traced.


def _name_of_call(function: str, f: Any) -> str:
    return f"{function}({function_name(f)})" if callable(f) else function


def _slice_bounds(where: str, **bounds: Any) -> list[int | None]:
    """Check ``start``, ``stop`` and ``step``; any integer but a step of 0 is legal."""
    for name, bound in bounds.items():
        if bound is not None:
            bounds[name] = _index(where, name, bound, "an int or None")
    if bounds["step"] == 0:
        raise ValueError(f"{where}: step must not be 0")
    return list(bounds.values())


def _index(where: str, name: str, value: Any, expected: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        kind = "a traced array" if isinstance(value, jax.core.Tracer) else type(value).__name__
        raise TypeError(f"{where}: {name} must be {expected}, got {kind}") from None


def _chunk_sizes(where: str, chunk_size: Any) -> tuple[int, ...]:
    """Return the nested chunk sizes, outermost first; none at all for ``None``."""
    if chunk_size is None:
        return ()
    if not isinstance(chunk_size, Sequence):
        return (positive_int(chunk_size, where, "chunk_size"),)
    if not chunk_size:
        raise ValueError(f"{where}: chunk_size must hold at least one size, got {chunk_size!r}")
    return tuple(positive_int(size, where, f"chunk_size[{i}]") for i, size in enumerate(chunk_size))


def _scan_arguments(
    where: str, f: Any, init: Any, xs: Any, length: Any, unroll: Any
) -> tuple[Any, Any, int, int | bool]:
    """Check what `jax.lax.scan` takes; return arrays, the number of steps and a positive unroll."""
    if not callable(f):
        raise TypeError(f"{where}: f must be callable, got {type(f).__name__}")
    if not isinstance(unroll, bool):
        unroll = _index(where, "unroll", unroll, "a bool or a non-negative int")
        if unroll < 0:
            raise ValueError(f"{where}: unroll must be a bool or a non-negative int, got {unroll}")
        unroll = unroll or True  # 0 unrolls the entire loop, also in versions of JAX that refuse it
    init, xs = _as_arrays(where, init, "init"), _as_arrays(where, xs, "xs")
    return init, xs, _scan_length(where, xs, length), unroll


def _as_arrays(where: str, tree: Any, name: str) -> Any:
    _check_leaves(where, tree, name)
    return jax.tree.map(jnp.asarray, tree)


def _check_leaves(where: str, tree: Any, name: str) -> None:
    for path, leaf in leaves_with_names(tree, name):
        try:
            jnp.asarray(leaf)
        except TypeError:
            raise TypeError(
                f"{where}: {path} must be an array or a scalar, got {_type_name(leaf)}"
            ) from None


def _scan_length(where: str, xs: Any, length: Any) -> int:
    if length is not None:
        if isinstance(length, bool):
            raise TypeError(f"{where}: length must be a non-negative int, got {length}")
        length = _index(where, "length", length, "a non-negative int")
        if length < 0:
            raise ValueError(f"{where}: length must be a non-negative int, got {length}")
    leaves = leaves_with_names(xs, "xs")
    if not leaves:
        if length is None:
            raise ValueError(f"{where}: give length, or xs with at least one array to scan over")
        return length
    steps = common_length([(path, leaf, 0) for path, leaf in leaves], where)
    if length is not None and length != steps:
        rows = [(path, str(leaf.shape), str(steps)) for path, leaf in leaves]
        raise ValueError(
            f"{where}: length is {length}, but the leading axis of xs is {steps}; "
            "leave length out\n\n" + table(("leaf", "shape", "length"), rows, range(len(rows)))
        )
    return steps


def _is_debugging() -> bool:
    """Whether `jax.disable_jit` is on, so that the body itself must run, step by step on values."""
    return jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]


# The body: traced once, then a step that can be laid out in several loops.

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class _Body:
    """A traced scan body, without any array: those that it closes over are handed to `step`."""

    jaxpr: Any
    out_tree: Any

    def step(self, consts: list[Any]) -> Step:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            out = jax.core.eval_jaxpr(self.jaxpr, consts, *jax.tree.leaves((carry, x)))
            return jax.tree.unflatten(self.out_tree, out)

        return step


class _Operands(NamedTuple):
    """All arrays that a scan reads."""

    consts: list[Any]
    init: Any
    xs: Any


def _trace_body(where: str, f: Callable[..., Any], init: Any, xs: Any) -> tuple[_Body, _Operands]:
    """Trace ``f`` for one step, and check what it returns.

    As in `jax.lax.scan`, a weakly typed leaf of ``init`` takes the dtype that the body returns for
    it, which costs a second trace.
    """
    x = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, weak_type=_is_weak(leaf)), xs
    )

    def checked(carry: Any, x: Any) -> tuple[Any, Any]:
        out = f(carry, x)
        _check_pair(where, f, out)
        _check_leaves(where, out[0], "the returned carry")
        _check_leaves(where, out[1], "y")
        return tuple(out)

    trace = jax.make_jaxpr(checked, return_shape=True)
    jaxpr, out = trace(init, x)
    _check_carry_structure(where, f, init, out[0])
    promoted = jax.tree.map(_promote_weak_type, init, out[0])
    if any(jax.tree.leaves(jax.tree.map(lambda a, b: a.dtype != b.dtype, init, promoted))):
        jaxpr, out = trace(promoted, x)
    _check_carry_types(where, f, promoted, out[0])
    body = _Body(jaxpr.jaxpr, jax.tree.structure(out))
    return body, _Operands(list(jaxpr.consts), promoted, xs)


def _is_weak(leaf: jax.Array) -> bool:
    return getattr(leaf, "weak_type", False)  # which PRNG keys do not have


def _promote_weak_type(leaf: jax.Array, out: jax.ShapeDtypeStruct) -> jax.Array:
    if not _is_weak(leaf) or leaf.dtype == out.dtype:
        return leaf
    return lax.convert_element_type(leaf, jnp.result_type(leaf, out.dtype))


def _check_pair(where: str, f: Callable[..., Any], out: Any) -> None:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        came = f"{type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else None
        raise TypeError(
            f"{where}: the scan body {function_location(f)} must return a pair (carry, y), got "
            f"{came or _type_name(out)}"
        )


def _type_name(value: Any) -> str:
    """``float32[3]`` for an array, the name of its type for anything else."""
    if hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return type(value).__name__


def _check_carry_structure(where: str, f: Callable[..., Any], init: Any, out: Any) -> None:
    given, returned = jax.tree.structure(init), jax.tree.structure(out)
    if given == returned:
        return
    before, after = dict(leaves_with_names(init, "init")), dict(leaves_with_names(out, "init"))
    missing = [path for path in before if path not in after]
    extra = [path for path in after if path not in before]
    details = [
        *([f"it lacks {listed(missing)}"] if missing else []),
        *([f"it adds {listed(extra)}"] if extra else []),
    ]
    raise TypeError(
        f"{where}: the scan body {function_location(f)} must return a carry with the structure of "
        f"init; {' and '.join(details) or 'its containers differ'}\n\n"
        + table(("carry", "structure"), [("init", str(given)), ("returned", str(returned))], [1])
    )


def _check_carry_types(where: str, f: Callable[..., Any], init: Any, out: Any) -> None:
    named, returned = leaves_with_names(init, "init"), jax.tree.leaves(out)
    rows = [
        (path, _type_name(leaf), _type_name(new))
        for (path, leaf), new in zip(named, returned, strict=True)
    ]
    if odd := [i for i, (_, given, new) in enumerate(rows) if given != new]:
        raise TypeError(
            f"{where}: the scan body {function_location(f)} must return a carry with the shapes "
            f"and dtypes of init; {listed([rows[i][0] for i in odd])} "
            f"{'differs' if len(odd) == 1 else 'differ'}\n\n"
            + table(("leaf", "carry in", "carry out"), rows, odd)
        )


# The loops. `items` is what they slice: xs, or nothing where the step reads xs by itself.


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A step and how it is looped, which is alike in all parts of a layout."""

    step: Step
    reverse: bool
    unroll: int | bool

    def run(self, carry: Any, items: Any, length: int) -> tuple[Any, Any]:
        return lax.scan(self.step, carry, items, length, self.reverse, self.unroll)

    def skip(self, carry: Any, items: Any, length: int) -> Any:
        if not length:
            return carry
        only_carry = dataclasses.replace(self, step=lambda c, x: (self.step(c, x)[0], None))
        return only_carry.run(carry, items, length)[0]

    def blocks(self, block: Step, carry: Any, items: Any, count: int, size: int) -> tuple[Any, Any]:
        """Loop over ``count`` blocks of ``size`` items; splitting the axis is only a reshape."""
        stacked = jax.tree.map(lambda leaf: leaf.reshape(count, size, *leaf.shape[1:]), items)
        unroll = self.unroll if self.unroll is True else max(1, self.unroll // size)
        return lax.scan(block, carry, stacked, count, self.reverse, unroll)

    def cut(self, items: Any, begin: int, end: int) -> Any:
        return cut_steps(items, begin, end, reverse=self.reverse)

    def join(self, ys: Any, later: Any) -> Any:
        """Join the outputs of two successive parts; a reversed loop writes backwards."""
        parts = (later, ys) if self.reverse else (ys, later)
        return jax.tree.map(lambda *leaves: lax.concatenate(leaves, 0), *parts)


def _scan_kept(
    loop: _Loop, carry: Any, items: Any, kept: KeptSteps, *, checkpoint: bool
) -> tuple[Any, Any]:
    """Walk the parts of `KeptSteps` one after the other; only kept steps have outputs."""
    remember = jax.checkpoint if checkpoint else lambda fun: fun

    def stretch(carry: Any, begin: int, length: int) -> Any:
        if not length:
            return carry
        skip = functools.partial(loop.skip, length=length)
        return remember(skip)(carry, loop.cut(items, begin, begin + length))

    def up_to_kept(carry: Any, items: Any) -> tuple[Any, Any]:
        carry = loop.skip(carry, loop.cut(items, 0, kept.before), kept.before)
        last = loop.cut(items, kept.before, kept.before + 1)
        return loop.step(carry, jax.tree.map(lambda leaf: leaf[0], last))

    def block(carry: Any, items: Any) -> tuple[Any, Any]:
        carry, y = up_to_kept(carry, items)
        rest = loop.cut(items, kept.before + 1, kept.stride)
        return loop.skip(carry, rest, kept.after), y

    at = kept.lead + kept.blocks * kept.stride
    carry = stretch(carry, 0, kept.lead)
    blocks = loop.cut(items, kept.lead, at)
    carry, ys = loop.blocks(remember(block), carry, blocks, kept.blocks, kept.stride)
    if kept.partial:
        end = at + kept.before + 1
        carry, y = remember(up_to_kept)(carry, loop.cut(items, at, end))
        ys = loop.join(ys, jax.tree.map(lambda leaf: jnp.expand_dims(leaf, 0), y))
        at = end
    return stretch(carry, at, kept.trail), ys


def _scan_checkpointed(
    loop: _Loop, carry: Any, items: Any, length: int, sizes: tuple[int, ...], policy: Any
) -> tuple[Any, Any]:
    """Checkpoint chunks of ``sizes[0]`` steps, and inside each of them those of ``sizes[1:]``."""
    if not sizes:
        return loop.run(carry, items, length)

    def chunk(size: int) -> Step:
        # A checkpoint around all of another would only add a recomputation.
        inner = tuple(s for s in sizes[1:] if s < size)
        return jax.checkpoint(
            lambda carry, items: _scan_checkpointed(loop, carry, items, size, inner, policy),
            policy=policy,
        )

    if length <= sizes[0]:
        return chunk(length)(carry, items)
    size = split_into_chunks(length, sizes[0]).size
    count = length // size
    whole = count * size
    carry, ys = loop.blocks(chunk(size), carry, loop.cut(items, 0, whole), count, size)
    ys = jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), ys)
    if whole < length:
        carry, rest = chunk(length - whole)(carry, loop.cut(items, whole, length))
        ys = loop.join(ys, rest)
    return carry, ys


def _run_layout(
    layout: Callable[[_Loop, Any, Any], tuple[Any, Any]],
    body: _Body,
    operands: _Operands,
    length: int,
    reverse: bool,
    unroll: int | bool,
    *,
    in_place: bool,
) -> tuple[Any, Any]:
    """Run a layout of the body, and read ``xs`` in place where the layout would copy parts of it.

    Reading by index copies nothing, but transposed, each inner loop would begin with a cotangent as
    large as ``xs`` and end with adding all of it. So a derivative, of any order, is that of the
    layout which slices ``xs``.
    """

    def sliced(operands: _Operands) -> tuple[Any, Any]:
        loop = _Loop(body.step(operands.consts), reverse, unroll)
        return layout(loop, operands.init, operands.xs)

    def indexed(operands: _Operands) -> tuple[Any, Any]:
        body_step = body.step(operands.consts)

        def step(state: tuple[Any, jax.Array], _: None) -> tuple[tuple[Any, jax.Array], Any]:
            carry, done = state
            at = length - 1 - done if reverse else done
            take = functools.partial(lax.dynamic_index_in_dim, index=at, axis=0, keepdims=False)
            carry, y = body_step(carry, jax.tree.map(take, operands.xs))
            return (carry, done + 1), y

        none_done = scalar(0, jnp.int32 if length < 2**31 else jnp.int64)
        (carry, _), ys = layout(_Loop(step, reverse, unroll), (operands.init, none_done), None)
        return carry, ys

    if not in_place or not jax.tree.leaves(operands.xs):
        return sliced(operands)
    run = jax.custom_jvp(indexed)
    run.defjvp(functools.partial(jvp_of_live, sliced), symbolic_zeros=True)
    return run(operands)
