# SPDX-License-Identifier: MIT
"""``chunked_vmap``: `jax.vmap` in chunks; ``chunked_reduce``: without ever storing the outputs.

`AxisMap` binds their calls; all checks precede the trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rankax.core.base.arrays import check_no_ref
from rankax.core.base.messages import (
    argument_names,
    check_callable,
    checked_int,
    common_length,
    function_name,
    noted_errors,
    plural,
)
from rankax.core.base.trees import leaves_with_names, spread_prefix
from rankax.core.call.run import Bound, run, sizes_of
from rankax.core.hooks import Form, form_of
from rankax.core.options import OPTIONS, Options, check_together, options_of, scope
from rankax.core.plan.schedule import WHOLE_CHUNKS, Plan, Tiles, plan_axis
from rankax.core.reduce.run import read_reductions
from rankax.core.trace.programs import checked_output_axes, is_axis
from rankax.ext.ragged.type import Ragged


def chunked_vmap(
    fun: Callable[..., Any],
    chunk_size: int | None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    checkpoint: bool | None = None,
    memory_limit: int | str | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
    devices: int | str | Sequence[Any] | jax.sharding.PartitionSpec | None = None,
    lockstep: bool = True,
    batched: bool = False,
    cpu_math: bool | None = None,
) -> Callable[..., Any]:
    r"""Map ``fun`` over an axis with at most ``chunk_size`` items in flight.

    Equivalent to ::

        jax.vmap(fun, in_axes, out_axes, axis_name=axis_name, axis_size=axis_size)

    but evaluated chunk by chunk, so that the intermediate values of at most ``chunk_size`` items
    exist at once, in the forward pass and in derivatives of every order.

    Parameters
    ----------
    fun : callable
        Takes and returns pytrees of arrays, for one item.
    chunk_size : int or None
        Maximum number of items evaluated at once. A smaller chunk is used where it divides the axis
        (down to 4/5 of the bound) or evens out the chunks, and a much smaller one on a CPU with JAX
        0.12, where its values fit the cache. ``None``, or a bound at least as large as the axis,
        gives exactly the program of `jax.vmap` (without ``cpu_math``). ``1`` evaluates ``fun``
        itself, item by item, without `jax.vmap`: a `jax.lax.cond` stays a branch, and ordered
        callbacks stay in order.
    in_axes, out_axes : int, None, or a pytree prefix of those, default 0
        As in `jax.vmap`; negative axes count from the end. Keyword arguments are mapped over
        axis 0. ``None`` passes an argument to every item; for an output it promises that the value
        does not depend on the item.
    axis_name : hashable, optional
        Accepted for code that replaces `jax.vmap`. With more than one chunk, a collective over it
        is an error, because it would see only the items of one chunk.
    axis_size : int, optional
        Length of the mapped axis, needed only if no argument is mapped.
    checkpoint : bool, optional
        Recompute each chunk in the reverse pass instead of storing the intermediate values of
        all chunks. ``False`` saves one evaluation, but needs memory that grows with the axis.
        None: as in `auto_vmap`.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries stay within this limit:
        bytes, ``"2 GB"``, or ``"50%"`` of the free memory. See `auto_vmap`.
    progress : bool, str or callable, default False
        Show a bar (a string is its label), or call a function with ``(done, total)``, as in
        `auto_vmap`. A single chunk shows nothing.
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the mapped axis: ``"all"`` local devices, the first n, a list, or mesh
        axes. ``None``: as the arrays are sharded. ``False``: do not divide the axis. With several
        CPU devices, all cores work. See Notes.
    lockstep : bool, default True
        ``False``: each item stops when it is done, if a loop in ``fun`` depends on the item. Each
        of ``chunk_size`` lanes takes the next item when its own is done. See `auto_vmap`.
    batched : bool, default False
        ``fun`` takes a batch itself: in each argument that is mapped, and in each output, it has
        one axis in front, for the items of a chunk. ``in_axes`` says where the axis is in the
        whole array. See `auto_vmap`.
    cpu_math : bool, optional
        On a CPU, compute sines, angles and powers by vectorised programs in place of the C library,
        each to 4 units in the last place. None: as `rankax.options` says, or else not. See
        `auto_vmap`. (`rankax.options` also has ``xla_cpu``.)

    Returns
    -------
    callable
        Takes the arguments of ``fun`` with the mapped axis added, and returns its outputs with the
        axis at ``out_axes``. Shapes and dtypes are as with `jax.vmap`.

    Raises
    ------
    TypeError
        ``chunk_size`` is not an int or None.
    TypeError
        ``in_axes`` or ``out_axes`` holds anything but ints and None.
    TypeError
        ``fun`` returns something other than arrays.
    ValueError
        ``chunk_size`` is not positive, ``memory_limit`` cannot be read, or one item needs more.
    ValueError
        The mapped axes differ in length, a leaf has no such axis, ``in_axes`` does not fit the
        arguments, or nothing is mapped.
    ValueError
        While tracing: ``out_axes`` does not fit what ``fun`` returns.
    ValueError
        While tracing, with more than one chunk: ``fun`` uses a collective over ``axis_name``; or it
        has an ordered effect, and a chunk has more than one item.

    Notes
    -----
    *Memory.* For ``n`` items, beyond inputs and outputs: forward, the intermediate values of one
    chunk, for any ``n``. In `jax.jvp` and `jax.vjp`, the same if the chunk divides the axis and the
    axis is 0. Otherwise, and for outputs that have an axis of length 1 in each item, also one copy
    of the outputs and of their tangents or cotangents. Inputs are not copied, nor are their
    tangents or cotangents; except that, in derivatives in this second case, those narrower than 32
    bits are copied as ``float32`` (``float16`` is not).

    *Time.* ``fun`` is traced once per call, however the axis divides. Outside `jax.jit`, a loop
    that does the same as an earlier one is not compiled again, except in derivatives if ``fun`` has
    custom rules. Where no chunk divides the axis, the last one overlaps its neighbour and fewer
    than ``n / chunk_size`` items are computed twice; their cotangents count once.

    *Devices.* An axis that devices share is evaluated in parts, one per device, side by side:
    ``chunk_size`` and ``memory_limit`` count per device, and nothing is sent except the cotangents
    of shared arguments, which are summed over the devices once. Outputs have the same sharding as
    with `jax.vmap`; if the devices do not divide the axis, each has all of them. Without
    ``devices``, sharding is read from concrete arrays in an eager call, and always on a mesh with
    explicit axes. The axis of a kernel with ordered effects is not divided.

    *Classes.* A pytree class is rebuilt with the values of one item, or of all, never with the
    values of a chunk, so it may check or convert its fields.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import chunked_vmap
    >>> def spread(points):  # (k, 3) -> (): needs (k, k, 3) numbers on the way
    ...     return jnp.sum((points[:, None] - points[None]) ** 2)
    >>> clouds = jnp.arange(10 * 4 * 3.0).reshape(10, 4, 3)
    >>> chunked_vmap(spread, 3)(clouds).shape
    (10,)
    >>> jax.grad(lambda c: chunked_vmap(spread, 3)(c).sum())(clouds).shape
    (10, 4, 3)
    """
    check_callable(fun, "chunked_vmap", "fun")
    site = f"chunked_vmap({function_name(fun)})"
    options = options_of(
        site,
        chunk_size=chunk_size,
        checkpoint=checkpoint,
        memory_limit=memory_limit,
        progress=progress,
        devices=devices,
        lockstep=lockstep,
        batched=batched,
        **_given(cpu_math=cpu_math),
    )
    axes = AxisMap(fun, site, in_axes, axis_size, out_axes, axis_name)
    return function_of_batches(axes, options, _given(cpu_math=cpu_math))


def chunked_reduce(
    fun: Callable[..., Any],
    reduce: Any,
    chunk_size: int | None,
    in_axes: Any = 0,
    *,
    where: str | int | None = None,
    axis_size: int | None = None,
    checkpoint: bool | None = None,
    memory_limit: int | str | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
    devices: int | str | Sequence[Any] | jax.sharding.PartitionSpec | None = None,
    lockstep: bool = True,
    batched: bool = False,
    cpu_math: bool | None = None,
) -> Callable[..., Any]:
    r"""Map ``fun`` over an axis and reduce its outputs, with few items in flight.

    Equivalent, for ``reduce="sum"``, to ::

        lambda *args: jax.tree.map(lambda out: out.sum(0), jax.vmap(fun, in_axes)(*args))

    but evaluated tile by tile, so that neither the outputs of all items nor their intermediate
    values are ever stored, in the forward pass and in derivatives of every order.

    Parameters
    ----------
    fun : callable
        Takes and returns pytrees of arrays, for one item.
    reduce : str, Reduction, None, or a pytree prefix of those
        How to reduce each output of ``fun``, or each subtree of outputs. A name: ``"sum"``,
        ``"mean"``, ``"prod"``, ``"max"``, ``"min"``, ``"argmax"``, ``"argmin"``, ``"any"``,
        ``"all"``, ``"logsumexp"`` or ``"gram"``, with the values and dtypes of `jax.numpy`
        (`jax.nn.logsumexp`; `rankax.reductions.Gram`). An object from `rankax.reductions`, such as
        ``TopK(3)`` or ``Best("distance")``. ``None`` keeps an output whole, with the mapped axis in
        front.
    chunk_size : int or None
        Maximum number of items evaluated at once. On a CPU, from JAX 0.12 on, a tile is smaller.
        ``None``: all at once, by `jax.vmap` and the `jax.numpy` function.
    where : str or int, optional
        The key, field or index of the output that says whether an item counts: one boolean. Items
        left out add nothing to results and gradients. See `auto_vmap`.
    in_axes, axis_size
        As in `jax.vmap`; keyword arguments are mapped over axis 0.
    checkpoint : bool, optional
        Recompute each tile in the reverse pass instead of storing its intermediate values. None:
        as in `auto_vmap`.
    memory_limit : int or str, optional
        Choose a chunk size, of at most ``chunk_size``, whose temporaries stay within this limit:
        bytes, ``"2 GB"``, or ``"50%"`` of the free memory. See `auto_vmap`.
    progress : bool, str or callable, default False
        Show a bar (a string is its label), or call a function with ``(done, total)``, as in
        `auto_vmap`. The gradient of some reductions makes two forward passes.
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the mapped axis: ``"all"`` local devices, the first n, a list, or mesh
        axes. ``None``: as the arrays are sharded. ``False``: do not divide the axis. With several
        CPU devices, all cores work. See Notes.
    lockstep : bool, default True
        ``False``: each item stops when it is done, if a loop in ``fun`` depends on the item. See
        `auto_vmap`.
    batched : bool, default False
        ``fun`` takes a batch itself: in each argument that is mapped, and in each output, it has
        one axis in front, for the items of a chunk. ``in_axes`` says where the axis is in the
        whole array. See `auto_vmap`.
    cpu_math : bool, optional
        On a CPU, compute sines, angles and powers by vectorised programs in place of the C library,
        each to 4 units in the last place. None: as `rankax.options` says, or else not. See
        `auto_vmap`. (`rankax.options` also has ``xla_cpu``.)

    Returns
    -------
    callable
        Takes the arguments of ``fun`` with the mapped axis added, and returns its reduced outputs.

    Raises
    ------
    TypeError
        ``reduce`` holds anything else, or an argument has the wrong type.
    ValueError
        No reduction has this name, or an output cannot be reduced this way. This error and the
        following ones are raised before the loop is compiled.
    ValueError
        The mapped axes differ in length.
    ValueError
        ``memory_limit`` cannot be read, or one item needs more.

    Notes
    -----
    *Memory.* One tile and its accumulators, for any number of items; in a derivative, ``prod`` and
    ``Fold`` store one accumulator per tile.

    *Derivatives.* Sums, means and moments are differentiated tile by tile; ``logsumexp`` in a
    second pass; ``max``, ``min``, ``TopK``, ``BottomK`` and ``Best`` at the winners only, each of
    which is evaluated once more. Among equal items, the first gets the whole derivative;
    `jax.numpy.max` divides it among them.

    *Order.* Items are added in a different order from `jax.numpy`, so the last digits of a sum
    differ. The last tile overlaps the one before it if no tile divides the axis; items that were
    counted before add nothing and send nothing back: no item counts twice.

    *Devices.* Each device reduces its own part of the axis, which may have any length, and the
    partial states are merged once: sums, means, ``any`` and ``all`` by one sum or similar
    collective over the devices, all others by sending the states, one or a few numbers per device,
    to every device.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from rankax import chunked_reduce
    >>> def potential(source, mass):
    ...     return -mass / jnp.linalg.norm(source)
    >>> sources, masses = jnp.full((10_000, 3), 2.0), jnp.full(10_000, 3.0**0.5)
    >>> chunked_reduce(potential, "sum", chunk_size=1000)(sources, masses).round()
    Array(-5000., dtype=float32)
    """
    check_callable(fun, "chunked_reduce", "fun")
    caller = f"chunked_reduce({function_name(fun)})"
    options = options_of(
        caller,
        where=where,
        chunk_size=chunk_size,
        checkpoint=checkpoint,
        memory_limit=memory_limit,
        progress=progress,
        devices=devices,
        lockstep=lockstep,
        batched=batched,
        **_given(cpu_math=cpu_math),
    )
    options = options.replace(reduce=read_reductions(reduce, caller))
    axes = AxisMap(fun, caller, in_axes, axis_size)
    return function_of_batches(axes, options, _given(cpu_math=cpu_math))


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that a scope does not decide."""
    return {name: value for name, value in options.items() if value is not None}


def function_of_batches(
    axes: AxisMap, options: Options, given: Collection[str] = ()
) -> Callable[..., Any]:
    """Return a function as it is mapped; a scope does not decide the options in ``given``."""
    check_together(options, axes.site)
    axes.form = form_of(options)

    @functools.wraps(axes.fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return run(axes.bind(args, kwargs), in_scope(options, given))

    return mapped


def in_scope(options: Options, given: Collection[str] = ()) -> Options:
    """Return the options of a call of a function that takes its own as parameters.

    A scope decides how a compiler is treated, unless that is ``given``.
    """
    changes = {
        name: value
        for name, value in (scope.get() or {}).items()
        if OPTIONS[name].for_all and name not in given
    }
    return options.replace(**changes) if changes else options


# Binding.


@dataclasses.dataclass(eq=False)
class BoundAxes(Bound):
    """A bound call that maps one axis of each argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_axes: Any
    places: list[int | None]  # where each leaf has the mapped axis
    length: int

    def plan(self, options: Options, tiles: Tiles | None = WHOLE_CHUNKS) -> Plan:
        both = enumerate(zip(self.leaves, self.places, strict=True))
        arrays = tuple((i, tuple(leaf.shape), axis) for i, (leaf, axis) in both if axis is not None)
        reduce = "" if options.reduce is None else str(options.reduce)
        length = self.length if self.cut is None else self.cut[0]
        return plan_axis(self.name, length, arrays, *sizes_of(options, tiles), reduce)

    @property
    def ranked(self) -> list[int]:
        return [i for i, place in enumerate(self.places) if place is not None]

    def call(self, leaves: Sequence[Any], plan: Plan) -> Any:
        del plan
        args, kwargs = jax.tree.structure((self.args, self.kwargs)).unflatten(leaves)
        with noted_errors(self.fun, self._described):
            return self.fun(*args, **kwargs)

    def _described(self) -> tuple[Any, ...]:
        """Describe the arguments of one item, for an error of the function."""
        rows: list[tuple[str, ...]] = []
        for path, leaf, axis in zip(self.paths, self.leaves, self.places, strict=True):
            shape = np.shape(leaf) if hasattr(leaf, "shape") else ()
            core = shape if axis is None else (*shape[:axis], *shape[axis + 1 :])
            rows.append((path, str(shape), str(axis), str(core)))
        return ("argument", "shape", "in_axes", "one item"), rows, self.in_front

    def in_one_piece(self, plan: Plan) -> Any:
        """Call `jax.vmap`, with errors of rankax."""
        returned = False

        @functools.wraps(self.fun)
        def checked(*args: Any, **kwargs: Any) -> Any:
            nonlocal returned
            out = self.evaluate(jax.tree.leaves((args, kwargs)), plan)
            checked_output_axes(self.fun, out, self.out_axes)
            returned = True
            return out

        vmapped = jax.vmap(
            checked, self.in_axes, self.out_axes, axis_name=self.axis_name, axis_size=self.length
        )
        try:
            return vmapped(*self.args, **self.kwargs)
        except ValueError:
            if returned and self.axis_name is None:  # `fun` itself did not fail
                self.trace(plan).check_unmapped_outputs()
            raise


@dataclasses.dataclass
class AxisMap:
    """A function and the parameters with which `jax.vmap` maps it; they are checked here."""

    fun: Callable[..., Any]
    site: str  # how an error message begins
    in_axes: Any = 0
    axis_size: int | None = None
    out_axes: Any = 0
    axis_name: Hashable | None = None
    form: Form | None = None  # how the function is called, if it does not take one item

    def __post_init__(self) -> None:
        """Check what `jax.vmap` would check at the call; a list of ``in_axes`` becomes a tuple."""
        if self.axis_size is not None:
            refusal = f"{self.site}: axis_size must be a positive int, got"
            self.axis_size = checked_int(self.axis_size, refusal, least=0)
        if isinstance(self.in_axes, list):
            self.in_axes = tuple(self.in_axes)
        for parameter, axes in (("in_axes", self.in_axes), ("out_axes", self.out_axes)):
            for path, entry in jax.tree_util.tree_flatten_with_path(axes)[0]:
                if not is_axis(entry):
                    raise TypeError(
                        f"{self.site}: {parameter} must hold ints and None, got "
                        f"{type(entry).__name__} {entry!r} at "
                        f"{parameter}{jax.tree_util.keystr(path)}"
                    )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundAxes:
        """Give every leaf its axis and find the common length, or say which leaf does not fit."""
        in_axes, axis_size, site = self.in_axes, self.axis_size, self.site
        if isinstance(in_axes, tuple) and len(in_axes) != len(args):
            raise ValueError(
                f"{site}: in_axes has {plural(len(in_axes), 'entry')} for "
                f"{plural(len(args), 'positional argument')}"
            )
        prefixes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        names = argument_names(self.fun, len(args))
        named: list[tuple[str, Any]] = []
        places: list[int | None] = []
        for name, prefix, arg in [
            *zip(names, prefixes, args, strict=True),
            *((name, 0, kwargs[name]) for name in sorted(kwargs)),
        ]:
            found = leaves_with_names(arg, name)
            named += found
            try:
                places += spread_prefix(prefix, arg, name, is_entry=is_axis, what="in_axes")
            except ValueError as error:
                raise ValueError(f"{site}: {error}") from None
            _refuse_rows(arg, name, places[len(places) - len(found) :], site)
        pairs = list(zip(named, places, strict=True))
        table = [(name, x, axis) for (name, x), axis in pairs if axis is not None]
        if not table and axis_size is None:
            raise ValueError(
                f"{site}: nothing is mapped; map at least one array through in_axes, or give "
                "axis_size"
            )
        if axis_size is not None:
            table.append(("axis_size", np.broadcast_to(0, axis_size), 0))
        for name, x, _ in table:
            check_no_ref(x, site, name)
        length = common_length(table, site)
        leaves = [x if axis is None else jnp.asarray(x) for (_, x), axis in pairs]
        places = [None if axis is None else axis % jnp.ndim(x) for (_, x), axis in pairs]
        return BoundAxes(
            self.fun,
            function_name(self.fun),
            site,
            leaves,
            [name for name, _ in named],
            args,
            kwargs,
            in_axes,
            places,
            length,
            form=self.form,
            out_axes=self.out_axes,
            axis_name=self.axis_name,
        )


def _refuse_rows(arg: Any, name: str, places: Sequence[int | None], site: str) -> None:
    """Refuse to map the rows of ragged items as if they were items."""
    nodes = leaves_with_names(arg, name, stops=lambda node: isinstance(node, Ragged))
    for (path, node), place in zip(nodes, places, strict=True):
        is_whole = isinstance(node, Ragged) and node.values.shape[:1] == (node.lengths.sum(),)
        if is_whole and place is not None:
            raise TypeError(
                f"{site}: {path} is Ragged, and its rows are not items of a batch; use "
                'rankax.auto_vmap with a rank such as "n 3", or map only other arguments'
            )
