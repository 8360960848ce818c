# SPDX-License-Identifier: MIT
"""One decorated kernel: from the arguments of a call to nested maps.

What depends on the structure of the arguments alone (`_Structure`), and what depends on their
shapes (the plan and its `Nesting`), is worked out once and kept, for a loop calls with the same
ones again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from rankax._base.blocks import blocks_of, in_blocks
from rankax._base.functions import caller_level, function_location, function_name, unwrapped
from rankax._base.trees import check_outputs, leaves_with_names
from rankax._base.words import shortened
from rankax._call.nest import (
    Bounds,
    PartNest,
    map_levels,
    planned_reduction,
    reduce_levels,
    tiled,
)
from rankax._call.over_parts import Layout, axes_of_leaves, in_order, of_all
from rankax._declare.dims import Rank
from rankax._declare.ranks import Declaration, parts_with_ranks, ranks_of_leaves
from rankax._devices.parts import Parts, find_parts, is_spread
from rankax._fit.cpu import best_tile, tiles_matter
from rankax._fit.memory import Task, fit_to_limit, shape_of
from rankax._loop.keys import PLACE, item_key
from rankax._options import DEFAULTS, Options, resolve
from rankax._plan.batch import BatchPlan
from rankax._plan.budget import MemoryFit
from rankax._plan.leaves import LeafPlan, leaf_plan
from rankax._plan.levels import Shape
from rankax._plan.nesting import Nesting, plan_nesting
from rankax._plan.report import output_error
from rankax._progress.report import Progress, told
from rankax._trace.item import has_order, trace_item

__all__ = ["Call", "Kernel", "is_array", "is_number"]

_MOST_KEPT = 1024  # structures per kernel, and plans per structure


@dataclasses.dataclass(frozen=True)
class _Structure:
    """What the tree structure of the ranked arguments decides."""

    paths: tuple[str, ...]  # of each leaf, in the caller's words
    ranks: tuple[Rank | None, ...]  # of each leaf
    lists: tuple[tuple[str, tuple[int, ...]], ...]  # each list under one rank: name, leaves
    keys: tuple[int, ...]  # the leaves that are typed PRNG keys
    nestings: dict[Any, Nesting] = dataclasses.field(default_factory=dict)  # by shapes, options


class Call(NamedTuple):
    """One call: its bound arguments, and those that have a rank as leaves."""

    bound: inspect.BoundArguments
    names: tuple[str, ...]
    leaves: list[Any]
    treedef: Any
    structure: _Structure


class Kernel:
    """A kernel and what is declared for it; the decorator's wrapper calls it."""

    def __init__(
        self,
        fun: Callable[..., Any],
        declaration: Declaration,
        given: Mapping[str, Any],
    ) -> None:
        self.fun = fun
        self.name = function_name(fun)
        self.declaration = declaration
        self.given = dict(given)
        self.own = Options(**given)
        self._structures: dict[Any, _Structure] = {}
        self._silent = set(declaration.silent)  # those not warned of yet
        self._defaults = {
            name: parameter.default
            for name, parameter in declaration.signature.parameters.items()
            if parameter.default is not parameter.empty
            # A positional-only one can be passed only if those before it are, ranked or not.
            and (name in declaration.ranks or parameter.kind is parameter.POSITIONAL_ONLY)
        }

    def __getstate__(self) -> dict[str, Any]:
        # What earlier calls left need not be picklable, and a copy finds its own again.
        return {**vars(self), "_structures": {}}

    # `self` is positional-only, for a kernel may be called with an argument of that name.

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel on every item of the batch."""
        return self.run(self.bind(args, kwargs), self.options(), args, kwargs)

    def options(self) -> Options:
        """Return the options of a call that is made now."""
        return resolve(self.given, self.own)

    def run(
        self,
        call: Call,
        options: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parts: tuple[Parts, ...] | None = None,
    ) -> Any:
        """Go on from a call that is bound, whose arguments were these, and lie in these parts."""
        parts = self.parts(call, options) if parts is None else parts
        if parts:
            part = self._part(call, parts, options)
            options, _ = self._within_limit(part, options)
            plan = self._nesting(part, options).plan
            if plan.steps > 1 or len(plan.reduced) > 1:
                return self._side_by_side(call, part, parts, options)
            options = dataclasses.replace(options, chunk_size=None)  # each device has all its items
        options, _ = self._within_limit(call, options)
        nesting = self._nesting(call, options)
        if options.reduce is not None or nesting.plan.levels:
            # Its loops are not known to the kernels that it calls, which are not to report as well.
            shown = options.progress if nesting.plan.steps > 1 else False
            with told(shown, self.name) as progress:
                return _through(*self._tiled(call, nesting, options), options, progress)
        return self._checked(self.fun(*args, **kwargs), nesting)

    def plan(self, /, *args: Any, **kwargs: Any) -> BatchPlan:
        """Say what a call with these arguments, or their `jax.ShapeDtypeStruct`, would do."""
        self.check_method("plan", args, kwargs)
        call, options = self.bind(args, kwargs, shapes_only=True), self.options()
        parts = self.parts(call, options)
        part = self._part(call, parts, options) if parts else call
        options, memory = self._within_limit(part, options)
        plan = self.planned(part, options).plan
        if parts:
            plan = of_all(plan, self._whole(call, options).plan, parts)
        untouched = self._untouched(call.bound)
        if memory is None and not untouched:
            return plan
        return dataclasses.replace(plan, untouched=untouched, memory=memory)

    # From arguments to leaves.

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Bind arguments to parameters; a default with a rank counts as passed."""
        try:
            bound = self.declaration.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise self._unbound(error, kwargs) from None
        if not self._defaults.keys() <= bound.arguments.keys():
            bound = self._rebound({**self._defaults, **bound.arguments})
        if self._silent:
            self._warn_of_arrays(bound)
        return bound

    def _unbound(self, error: TypeError, kwargs: dict[str, Any]) -> TypeError:
        options = DEFAULTS.keys() & kwargs.keys()
        unknown = sorted(options - self.declaration.signature.parameters.keys())
        if not unknown:
            return TypeError(f"{self.name}() {error}")
        (option, *_) = unknown
        return TypeError(
            f"{self.name}() got {option} among its arguments, but it is an option: "
            f"{self.name}.with_options({option}={kwargs[option]!r})(...)"
        )

    def check_method(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse ``obj.method.plan(...)``: Python hands ``obj`` to a call of the method only."""
        parameters = list(self.declaration.signature.parameters)
        if parameters[:1] != ["self"] or "self" in kwargs:
            return
        owner = getattr(unwrapped(self.fun), "__qualname__", "").rpartition(".")[0]
        owner = owner.rpartition(".")[2].replace("<locals>", "")
        try:
            self.declaration.signature.bind(*args, **kwargs)
        except TypeError:
            lacks_object = not args or owner not in {c.__name__ for c in type(args[0]).__mro__}
        else:  # arguments with defaults may hide that one is missing
            lacks_object = is_array(args[0]) or isinstance(args[0], jax.ShapeDtypeStruct)
        if lacks_object:
            raise TypeError(
                f"{self.name}.{what}() lacks the object of the method, which Python does not hand "
                "on here; ask the class, with the object first: "
                f"{owner or 'type(obj)'}.{self.name}.{what}(obj, ...)"
            )

    def _warn_of_arrays(self, bound: inspect.BoundArguments) -> None:
        """Warn, once for each parameter, of arrays whose annotation could not give them a rank."""
        for name in tuple(self._silent):
            if arrays := arrays_of(bound.arguments.get(name), name):
                found = shortened([f"{path} {shape}" for path, shape in arrays])
                warnings.warn(
                    f"{self.name}(): the annotation of {name} declares no rank, so it goes whole "
                    f"to every item of the batch, with its arrays {found}; give auto_vmap a rank "
                    f"for it, or {name}=None if that is meant",
                    stacklevel=caller_level(),
                )
                self._silent.discard(name)

    def _untouched(self, bound: inspect.BoundArguments) -> tuple[tuple[str, Shape], ...]:
        """Return path and shape of every array that has axes, but no rank."""
        return tuple(
            found
            for name, value in bound.arguments.items()
            for path, part, rank in self._parts(name, value)
            if rank is None
            for found in arrays_of(part, path)
        )

    def _rebound(self, arguments: dict[str, Any]) -> inspect.BoundArguments:
        """Bind values by parameter, which `inspect` turns into ``args`` and ``kwargs`` again."""
        signature = self.declaration.signature
        in_order = {name: arguments[name] for name in signature.parameters if name in arguments}
        return inspect.BoundArguments(signature, in_order)  # pyright: ignore[reportArgumentType]

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, shapes_only: bool = False
    ) -> Call:
        """Bind arguments and flatten those that have a rank."""
        call = self.flattened(args, kwargs)
        leaves, structure = call.leaves, call.structure
        for i, rank in enumerate(structure.ranks):
            if rank is not None and not (is_array(leaves[i]) or is_number(leaves[i])):
                leaves[i] = self.converted(leaves[i], structure.paths[i], shapes_only)
        for i in structure.keys:
            self.check_key(leaves[i], structure.paths[i], structure.ranks[i])
        return call

    def flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call as `bind` does, but with leaves of any kind."""
        bound = self._bound(args, kwargs)
        names = tuple(name for name in self.declaration.ranks if name in bound.arguments)
        values = [bound.arguments[name] for name in names]
        leaves, treedef = jax.tree.flatten(values)
        structure = self._structure(names, values, leaves, treedef)
        return Call(bound, names, leaves, treedef, structure)

    def rebind(
        self, names: tuple[str, ...], leaves: list[Any], treedef: Any, others: dict[str, Any]
    ) -> Call:
        """Return a call as `bind` does, of leaves that are given; ``others`` have no rank."""
        values = treedef.unflatten(leaves)
        bound = self._rebound({**others, **dict(zip(names, values, strict=True))})
        structure = self._structure(names, values, leaves, treedef)
        return Call(bound, names, leaves, treedef, structure)

    def check_key(self, leaf: Any, path: str, rank: Rank | None) -> None:
        """Refuse a raw key, whose numbers would be taken for a batch of keys."""
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return
        is_split = rank is not None and rank.is_split
        declared = "has the rank SplitKey" if is_split else "is annotated as a PRNG key"
        if is_number(leaf):
            raise TypeError(
                f"{self.name}(): {path} {declared}, but it is the number {leaf!r}; make a key of "
                f"it: jax.random.key({leaf!r})"
            )
        raise TypeError(
            f"{self.name}(): {path} {declared}, but it is an array of dtype "
            f"{dtype} and shape {leaf.shape}; make keys with jax.random.key, not "
            f"jax.random.PRNGKey, or pass jax.random.wrap_key_data({path})"
        )

    def _structure(
        self, names: tuple[str, ...], values: list[Any], leaves: list[Any], treedef: Any
    ) -> _Structure:
        """Give each leaf its rank, and refuse a list of numbers under one rank."""
        key = (names, treedef)
        structure = self._structures.get(key)
        if structure is None:
            structure = self._new_structure(names, values)
            _keep(self._structures, key, structure)
        for name, group in structure.lists:
            if all(is_number(leaves[i]) or isinstance(leaves[i], np.generic) for i in group):
                raise TypeError(
                    f"{self.name}(): {name} is a list of numbers, where an array is meant; pass "
                    f"jnp.asarray({name}). (A list of scalars, each an argument of its own, has a "
                    "rank for each in the declaration.)"
                )
        return structure

    def _parts(self, name: str, value: Any) -> list[tuple[str, Any, Rank | None]]:
        try:
            return parts_with_ranks(self.declaration.ranks.get(name), value, name)
        except ValueError as error:
            raise ValueError(f"{function_location(self.fun)}: {error}") from None

    def _new_structure(self, names: tuple[str, ...], values: list[Any]) -> _Structure:
        paths: list[str] = []
        ranks: list[Rank | None] = []
        lists: list[tuple[str, tuple[int, ...]]] = []
        for name, value in zip(names, values, strict=True):
            for path, part, rank in self._parts(name, value):
                if rank is not None:
                    lists += _lists(part, path, len(ranks))
                paths += [path for path, _ in leaves_with_names(part, path)]
                ranks += [rank] * (len(paths) - len(ranks))
        keys = [i for i, rank in enumerate(ranks) if rank is not None and rank.is_key]
        return _Structure(tuple(paths), tuple(ranks), tuple(lists), tuple(keys))

    def converted(self, leaf: Any, path: str, shapes_only: bool) -> Any:
        """Return what stands for a leaf that is neither an array nor a number, or refuse it."""
        if hasattr(leaf, "__jax_array__"):
            return jnp.asarray(leaf)
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        if is_shape and shapes_only:
            return leaf
        if is_shape:
            raise TypeError(
                f"{self.name}(): {path} is a ShapeDtypeStruct, which has no values; pass it "
                f"through jax.eval_shape({self.name}, ...), or to {self.name}.plan(...)"
            )
        if kind := blocks_of(leaf):
            raise in_blocks(kind, self.name, path)
        came = f"an array of dtype {leaf.dtype}" if isinstance(leaf, np.ndarray) else repr(leaf)
        raise TypeError(
            f"{self.name}(): {path} has a rank, so it must be an array or a number, but it is "
            f"{type(leaf).__name__} ({came:.60}); a parameter that takes other objects has rank "
            "None"
        )

    # From leaves to a plan.

    def agreed(self, call: Call, options: Options) -> Nesting:
        """Check that the shapes of a call agree, and return the plan without tiles."""
        return self._nesting(call, options)

    def planned(self, call: Call, options: Options) -> Nesting:
        """Return what a call would carry out, of which the leaves may be shapes."""
        nesting = self._nesting(call, options)
        if nesting.plan.steps <= 1 or not tiles_matter(dict(options.compiler_options or ())):
            return nesting
        shapes, fill = self._stand_ins(call)

        def trace(given: list[Any]) -> None:
            nonlocal nesting
            nesting = self._tiled(fill(given), nesting, options)[-1]

        jax.eval_shape(trace, shapes)
        return nesting

    def _stand_ins(self, call: Call) -> tuple[list[Any], Callable[[list[Any]], Call]]:
        """Return the shapes among the arguments, and the call with arrays in their places."""
        others = {k: v for k, v in call.bound.arguments.items() if k not in call.names}
        tree = call.leaves, others if _has_stand_in(others) else {}
        leaves, treedef = jax.tree.flatten(tree)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]

        def fill(given: list[Any]) -> Call:
            merged = list(leaves)
            for i, leaf in zip(at, given, strict=True):
                merged[i] = leaf
            ranked, filled = treedef.unflatten(merged)
            bound = self._rebound({**call.bound.arguments, **filled})
            return call._replace(leaves=ranked, bound=bound)

        return [leaves[i] for i in at], fill

    def _nesting(self, call: Call, options: Options, tile: int | None = None) -> Nesting:
        """Plan the maps for the shapes of this call, or find them again."""
        ranks = call.structure.ranks
        shapes = tuple(
            None if rank is None else getattr(leaf, "shape", ())
            for leaf, rank in zip(call.leaves, ranks, strict=True)
        )
        key = shapes, tile, options.chunk_size, options.reduce, options.reduce_axis
        nesting = call.structure.nestings.get(key)
        if nesting is None:
            arrays = [
                (i, call.structure.paths[i], tuple(shape), rank)
                for i, (shape, rank) in enumerate(zip(shapes, ranks, strict=True))
                if rank is not None and shape is not None
            ]
            untouched = functools.partial(self._untouched, call.bound)
            nesting = plan_nesting(
                self.fun,
                arrays,
                options.chunk_size,
                untouched,
                planned_reduction(options.reduce, options.reduce_axis),
                tile,
            )
            _keep(call.structure.nestings, key, nesting)
        return nesting

    # Batches that lie on several devices.

    def parts(self, call: Call, options: Options) -> tuple[Parts, ...]:
        """Return the parts in which the batch of a call lies; none where `jax.vmap` will do."""
        is_seen = options.shards is not None or any(map(is_spread, call.leaves))
        if not is_seen:
            return ()
        whole = self._whole(call, options)
        is_chunked = options.chunk_size is not None or options.memory_limit is not None
        # Several reduced axes become one, of which parts may be no runs.
        if not is_chunked and len(whole.plan.reduced) < 2:
            return ()
        leaves = [call.leaves[i] for i in whole.mapped]
        plans = self._leaf_plans(call, whole)
        axes = axes_of_leaves(whole.plan.batch_shape, [plans[i].batch_axes for i in whole.mapped])
        shape, where = whole.plan.batch_shape, f"{self.name}()"
        parts = find_parts(options.shards, leaves, axes, shape, where, in_chunks=is_chunked)
        return in_order(parts, whole.plan, options.reduce, where, given=options.shards is not None)

    def _whole(self, call: Call, options: Options) -> Nesting:
        """Plan the call without chunks."""
        return self._nesting(call, dataclasses.replace(options, chunk_size=None))

    def _leaf_plans(self, call: Call, nesting: Nesting) -> dict[int, LeafPlan]:
        """Return the plan of each ranked leaf by its position."""
        ranked = [i for i, rank in enumerate(call.structure.ranks) if rank is not None]
        return dict(zip(ranked, nesting.plan.leaves, strict=True))

    def _layout(self, call: Call, parts: tuple[Parts, ...], options: Options) -> Layout:
        whole = self._whole(call, options)
        plans = self._leaf_plans(call, whole)
        shape = whole.plan.batch_shape
        axes = axes_of_leaves(shape, [plans[i].batch_axes for i in whole.mapped])
        return Layout(shape, parts, axes, whole.plan.reduced)

    def _part(self, call: Call, parts: tuple[Parts, ...], options: Options) -> Call:
        """Return the call of one part, of which the mapped leaves are shapes only."""
        leaves = list(call.leaves)
        layout = self._layout(call, parts, options)
        for i, axes in zip(self._whole(call, options).mapped, layout.axes, strict=True):
            leaves[i] = shape_of(leaves[i], layout.shape_of_part(leaves[i].shape, axes))
        return call._replace(leaves=leaves)

    def _side_by_side(
        self, call: Call, part: Call, parts: tuple[Parts, ...], options: Options
    ) -> Any:
        """Walk all parts at once, each as a call of its own."""
        whole = self._whole(call, options)
        stored = list(call.leaves)
        for position, shape in whole.reshaped:
            stored[position] = jnp.reshape(stored[position], shape)
        plans = self._leaf_plans(call, whole)
        items = [shape_of(call.leaves[i], plans[i].core_shape) for i in whole.mapped]
        items += [PLACE for _ in whole.splits]
        on_item = self._on_item(call, whole, stored)
        item = trace_item(on_item, lambda *items: (items, {}), items, 0)
        if has_order(item.closed):
            return self.run(call, options, call.bound.args, call.bound.kwargs, ())
        is_tiled = tiles_matter(dict(options.compiler_options or ()))
        nesting = self._nesting(part, options, best_tile(item.closed) if is_tiled else None)
        leaves = [call.leaves[i] for i in whole.mapped]
        layout = self._layout(call, parts, options)
        with told(options.progress, self.name, layout.count) as progress:
            bounds = Bounds(options.chunk_size, options.checkpoint, progress, by_index=True)
            nesting = dataclasses.replace(nesting, splits=whole.splits)  # by numbers of the whole
            walk = PartNest(nesting, whole.mapped, bounds)
            return walk.over(item, leaves, layout, options.reduce)

    # From a plan to the result.

    def _tiled(
        self, call: Call, nesting: Nesting, options: Options
    ) -> tuple[Callable[..., Any], list[Any], Nesting]:
        """Return the kernel of one item, the leaves that are mapped, and the maps in tiles."""
        whole = list(call.leaves)
        for position, shape in nesting.reshaped:
            whole[position] = jnp.reshape(whole[position], shape)

        on_item = self._on_item(call, nesting, whole)
        leaves = [whole[i] for i in nesting.mapped]
        fun, tile = tiled(on_item, leaves, nesting, dict(options.compiler_options or ()))
        return fun, leaves, nesting if tile is None else self._nesting(call, options, tile)

    def _on_item(self, call: Call, nesting: Nesting, whole: list[Any]) -> Callable[..., Any]:
        """Return the kernel as a function of the mapped leaves, then of a number for each split."""

        @functools.wraps(self.fun, updated=())  # for errors, which name the kernel
        def on_item(*items: Any) -> Any:
            leaves = list(whole)  # a copy, or else the items would outlive their trace in `whole`
            numbers = items[len(nesting.mapped) :]
            for position, item in zip(nesting.mapped, items, strict=False):
                leaves[position] = item
            for split, number in zip(nesting.splits, numbers, strict=True):
                leaves[split.position] = item_key(leaves[split.position], number)
            values = zip(call.names, call.treedef.unflatten(leaves), strict=True)
            bound = self._rebound({**call.bound.arguments, **dict(values)})
            out = self._checked(self.fun(*bound.args, **bound.kwargs), nesting)
            check_outputs(self.fun, out)
            return out

        return on_item

    def _within_limit(self, call: Call, options: Options) -> tuple[Options, MemoryFit | None]:
        """Turn a memory limit into a chunk size, and return what it was measured to need."""
        limit = options.memory_limit
        if limit is None:
            return options, None
        options = dataclasses.replace(options, memory_limit=None)
        loose = self._nesting(call, dataclasses.replace(options, chunk_size=None))
        if not loose.plan.levels or not loose.plan.evaluations:
            return options, None
        item, consts, out_tree = self._item_of_shapes(call, loose)
        compiler_options = dict(options.compiler_options or ())
        tile = best_tile(item) if tiles_matter(compiler_options) else None

        def program(chunk_size: int) -> tuple[int, Callable[..., Any], list[Any]]:
            chosen = dataclasses.replace(options, chunk_size=chunk_size)
            nesting = self._nesting(call, chosen, tile)
            reshaped = dict(nesting.reshaped)

            def whole(consts: list[Any], leaves: list[Any]) -> list[Any]:
                @functools.wraps(self.fun, updated=())
                def on_item(*items: Any) -> Any:
                    found, given = consts[: len(item.consts)], consts[len(item.consts) :]
                    outs = core.eval_jaxpr(item.jaxpr, found, *given, *items)
                    return out_tree.unflatten(outs)

                return jax.tree.leaves(_through(on_item, leaves, nesting, chosen))

            shapes = [shape_of(call.leaves[i], reshaped.get(i)) for i in nesting.mapped]
            return nesting.plan.in_flight, whole, shapes

        most = min(options.chunk_size or loose.plan.evaluations, loose.plan.evaluations)
        by_item = self._nesting(call, dataclasses.replace(options, chunk_size=1)).plan
        task = Task(
            f"{self.name}()",
            limit,
            tuple(level.size for level in by_item.levels),
            most,
            with_gradient=options.checkpoint,
            compiler_options=options.compiler_options,
        )
        of_call = loose.plan.leaves, loose.plan.batch_shape, options.reduce, options.reduce_axis
        memory = fit_to_limit(task, item, consts, program, of_call)
        return dataclasses.replace(options, chunk_size=memory.chunk_size), memory

    def _item_of_shapes(self, call: Call, nesting: Nesting) -> tuple[Any, list[Any], Any]:
        """Trace the kernel for one item; return also what it uses besides, and its output's tree.

        What it uses are the constants of what is traced (closed-over arrays, arguments that are not
        mapped), and what stands for an argument of which only the shape is given.
        """
        plans = self._leaf_plans(call, nesting)
        items = [shape_of(call.leaves[i], plans[i].core_shape) for i in nesting.mapped]
        items += [PLACE for _ in nesting.splits]
        shapes, fill = self._stand_ins(call)
        trees: list[Any] = []

        def on_item(given: list[Any], items: list[Any]) -> list[Any]:
            filled = fill(given)
            out = self._on_item(filled, nesting, filled.leaves)(*items)
            outs, tree = jax.tree.flatten(out)
            trees.append(tree)
            return outs

        closed = jax.make_jaxpr(on_item)(shapes, items)
        return closed, [*closed.consts, *shapes], trees[-1]

    def _checked(self, out: Any, nesting: Nesting) -> Any:
        """Compare one item's output with the declared one; free of charge where nothing is."""
        declared = self.declaration.outputs
        if declared is None:
            return out
        try:
            ranks = ranks_of_leaves(declared, out, "output")
        except ValueError as error:
            raise ValueError(f"{function_location(self.fun)}: {error}") from None
        named = zip(leaves_with_names(out, "output"), ranks, strict=True)
        pairs = [
            (leaf_plan(path, jnp.shape(leaf), rank), rank)
            for (path, leaf), rank in named
            if rank is not None
        ]
        if error := output_error(self.fun, pairs, nesting.sizes):
            raise error
        return out


def _through(
    on_item: Callable[..., Any],
    leaves: list[Any],
    nesting: Nesting,
    options: Options,
    progress: Progress | None = None,
) -> Any:
    """Take leaves through the nest of maps around what is done for one item."""
    bounds = Bounds(options.chunk_size, options.checkpoint, progress)
    if options.reduce is None:
        return map_levels(on_item, leaves, nesting, bounds)
    return reduce_levels(on_item, leaves, nesting, options.reduce, bounds).assembled()


def is_array(leaf: Any) -> bool:
    """Whether JAX takes this leaf for an array as it stands."""
    if isinstance(leaf, jax.Array):
        return True
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return False
    return leaf.dtype.kind not in "OSTUMm" and leaf.dtype.type is not np.void


def _has_stand_in(value: Any) -> bool:
    try:
        return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value))
    except (TypeError, ValueError):  # no pytree, as in `arrays_of`
        return False


def arrays_of(value: Any, path: str) -> list[tuple[str, Shape]]:
    """Return path and shape of every array inside ``value`` that has axes."""
    if value is None or isinstance(value, (int, float, complex, str)):
        return []
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError):  # JAX cannot sort the keys of a dict: no pytree, so untouched
        return []
    if not any(map(_has_axes, leaves)):  # which is seen much faster than the paths are made
        return []
    named = leaves_with_names(value, path)
    return [(at, tuple(leaf.shape)) for at, leaf in named if _has_axes(leaf)]


def _has_axes(leaf: Any) -> bool:
    return (is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)) and bool(leaf.shape)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python scalar that JAX takes for a weakly typed array."""
    return isinstance(leaf, (int, float, complex))


def _lists(part: Any, path: str, start: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name each outermost list inside ``part``, with the positions of its leaves."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, node in leaves_with_names(part, path, stops=lambda n: isinstance(n, list)):
        count = jax.tree.structure(node).num_leaves
        if isinstance(node, list) and count:
            found.append((name, tuple(range(start, start + count))))
        start += count
    return found


def _keep(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Remember ``value``, within bounds."""
    if len(cache) >= _MOST_KEPT:
        cache.clear()
    cache[key] = value
