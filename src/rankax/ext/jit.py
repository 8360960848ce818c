# SPDX-License-Identifier: MIT
"""``jit=True``: compile the mapped call, with everything but arrays static.

Inside an outer program that is being traced, the kernel is called directly, so that the outer
program shows no call. An unhashable ``self`` is identified by the object; other static values by
value and type, so that ``1``, ``1.0`` and ``True`` give three programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rankax._errors import BatchShapeError, CoreDimensionError, RankError
from rankax._options import Options
from rankax.call.kernels import (
    KernelCall,
    KernelSpec,
    Shell,
    bind,
    check_promotion,
    is_array,
    is_number,
)
from rankax.core.base.arrays import is_staged, weakened
from rankax.core.base.trees import check_outputs, leaves_with_names
from rankax.core.loop.spec import PLACE
from rankax.core.plan.schedule import Shape
from rankax.core.protocols import HERE, Placement
from rankax.ext.bucket import (
    Filling,
    as_inputs,
    cut,
    filled,
    filling_of,
    with_places,
)
from rankax.ext.progress import wait_for_reports
from rankax.pipeline import evaluate, place_of

_MOST_KEPT = 4096  # programs, as many as `jax.jit` keeps


class _Frame(NamedTuple):
    """The static part of a call, by which the compiled program is looked up."""

    shell: Shell
    static: tuple[_Fixed | None, ...]  # of each value; None if traced
    options: Options
    place: Placement  # where it is evaluated, which tracers do not show
    filled: tuple[int, ...]  # the padded batch axes; their true lengths come last
    cut: Shape | None  # the batch shape with them
    weak: tuple[int, ...]  # the leaves of a weak type


@dataclasses.dataclass(unsafe_hash=True)
class _Fixed:
    """A static value, compared by its key."""

    value: Any = dataclasses.field(compare=False)
    key: Any


def evaluate_compiled(call: KernelCall) -> Any:
    """Evaluate a call by the compiled program of its kernel."""
    kernel, staged = call.kernel, is_staged()
    frame, arrays, filling = _split(call, is_alone=not staged)
    if staged:  # the outer program shows no call of ours
        return _run(kernel, frame, [jnp.asarray(x) if is_number(x) else x for x in arrays])
    try:
        out = _compiled(kernel, frame, arrays)
        return cut(out, filling, frame.options) if filling else out
    except (BatchShapeError, CoreDimensionError, RankError) as error:
        vars(error).pop("__notes__", None)  # JAX's, about hidden frames
        raise


def evaluate_part(part: KernelCall) -> Any:
    """Evaluate a part of a call by its compiled program."""
    frame, arrays, _ = _split(part)
    return _compiled(part.kernel, frame, arrays)


def kept_with_programs(call: KernelCall, make: Callable[[], Any], *key: Hashable) -> Any:
    """Return what ``make`` returns, which is kept as the program of a call is.

    It follows from the kernel, the types of the arrays, which may be shapes, and the ``key``.
    """
    frame, arrays, _ = _split(call, shapes_only=True)
    types = [
        (getattr(x, "shape", ()), getattr(x, "dtype", type(x)), getattr(x, "weak_type", None))
        for x in arrays
    ]
    return call.structure.plans.get_or_make((frame, *types, *key), make)


# `kernel` is positional-only because a kernel may be called with an argument of that name.


def lowered(
    kernel: KernelSpec, call_ragged: Callable[[KernelCall], Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Lower the call with these arguments: ``jax.jit(f).lower(...)``."""
    call = bind(kernel, args, kwargs, shapes_only=True)
    check_promotion(call)
    is_ragged = bool(call.structure.nodes)
    frame, arrays, _ = _split(call, shapes_only=True, is_alone=not is_ragged)
    if not is_ragged:
        return _jitted(kernel, frame, arrays).lower(*arrays)

    def fun(*arrays: Any) -> Any:  # one program of these lengths
        return call_ragged(_call_of(kernel, frame, iter(arrays)))

    fun.__name__ = kernel.name
    return frame.options.compiled(fun, arrays).lower(*arrays)


def _compiled(kernel: KernelSpec, frame: _Frame, arrays: Sequence[Any]) -> Any:
    jitted, shown = _jitted(kernel, frame, arrays), frame.options.progress
    if shown is False and frame.place is HERE:  # to enter both contexts takes two microseconds
        return jitted(*arrays)
    with wait_for_reports(shown, kernel.name), frame.place.around(f"{kernel.name}()"):
        return jitted(*arrays)


def _jitted(kernel: KernelSpec, frame: _Frame, arrays: Sequence[Any]) -> Any:
    functions, jitted = kernel.programs
    try:
        key = frame, *[x.aval for x in arrays], *map(type, arrays)
    except AttributeError:  # of NumPy, or a number
        key = frame, *[(type(x), np.shape(x), getattr(x, "dtype", None)) for x in arrays]
    try:
        return jitted[key]
    except KeyError:
        pass

    def fun(*arrays: Any) -> Any:
        out = _run(kernel, frame, arrays)
        check_outputs(kernel.fun, out)  # without batch axes, nothing else does
        return out

    fun.__name__ = kernel.name  # as shown by profilers and HLO dumps
    if len(jitted) >= _MOST_KEPT:
        functions.clear()
        jitted.clear()
    fun = functions.setdefault(frame, fun)
    return jitted.setdefault(key, frame.options.compiled(fun, arrays))


def _split(
    call: KernelCall, *, shapes_only: bool = False, is_alone: bool = True
) -> tuple[_Frame, list[Any], Filling | None]:
    """Split a call into a static frame and traced arrays; return its padding, too."""
    options = call.kernel.options().at(call.leaves)
    weak: tuple[int, ...] = ()
    filling = filling_of(call, options) if options.bucket and is_alone else None
    if filling is not None:
        weak = tuple(i for i in filling.shapes if getattr(call.leaves[i], "weak_type", False))
        call = filled(call, filling)
    place = HERE if call.structure.nodes else place_of(call, options)
    (values, shell), ranks = call.split(), call.structure.ranks
    if place is not HERE:
        values = place.put(values, call, options)
    inputs = [
        leaf
        if i < len(ranks) and ranks[i] is not None
        else _as_input(leaf, call, i, shapes_only=shapes_only)
        for i, leaf in enumerate(values)
    ]
    static = tuple([x if isinstance(x, _Fixed) else None for x in inputs])
    arrays = [x for x in inputs if not isinstance(x, _Fixed)]
    if call.lengths:
        arrays += as_inputs([np.asarray(n, PLACE.dtype) for n in call.lengths.values()])
    frame = _Frame(shell, static, options, place, tuple(call.lengths), call.cut, weak)
    return frame, arrays, filling


def _as_input(value: Any, call: KernelCall, place: int, *, shapes_only: bool) -> Any:
    """Return the array to trace, or the static value, for a leaf without a rank.

    Equal values are distinguished: ``1``, ``1.0`` and ``True``; ``0.0`` and ``-0.0``; not NaN.
    """
    if is_array(value) or (shapes_only and isinstance(value, jax.ShapeDtypeStruct)):
        return value
    if hasattr(value, "__jax_array__"):
        return jnp.asarray(value)
    kind = type(value)
    if isinstance(value, (float, complex)):
        return _Fixed(value, (kind, value.real.hex(), value.imag.hex()))
    try:
        hash(value)
    except TypeError:
        others = sorted(call.others.items())  # as in a flattened dict
        paths = list(call.structure.paths)
        paths += [path for n, other in others for path, _ in leaves_with_names(other, n)]
        if paths[place] == "self":
            return _Fixed(value, (kind, id(value)))
        raise TypeError(
            f"{call.site}: {paths[place]} is not an array, so jit=True makes it a static "
            f"argument, but {kind.__name__} cannot be hashed; pass a hashable value "
            "(a tuple for a list), or an array"
        ) from None
    return _Fixed(value, (kind, value))


def _call_of(kernel: KernelSpec, frame: _Frame, traced: Iterator[Any]) -> KernelCall:
    """Return the call of a frame, with the first of these arrays."""
    values = [next(traced) if fixed is None else fixed.value for fixed in frame.static]
    for i in frame.weak:
        values[i] = weakened(values[i])
    return frame.shell.call(kernel, values)


def _run(kernel: KernelSpec, frame: _Frame, arrays: Sequence[Any]) -> Any:
    traced = iter(arrays)
    call = _call_of(kernel, frame, traced)
    lengths = dict(zip(frame.filled, traced, strict=True))
    call = dataclasses.replace(call, cut=frame.cut, lengths=lengths)
    out = evaluate(call, frame.options, frame.place)
    are_states = frame.options.reduce is not None and frame.options.reduce.of_run is not None
    return with_places(out, call, frame.options) if lengths and not are_states else out
