# SPDX-License-Identifier: MIT
"""A decorated kernel, and how a call is bound: its arguments become leaves, with ranks and paths.

What depends only on the structure of the arguments (`Structure`) or only on their shapes (plans) is
computed once and kept, because loops make the same call again and again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from rankax._errors import BatchShapeError
from rankax._options import NAMES, Options, resolve
from rankax.call.base import Call, sizes_of
from rankax.core.base.arrays import check_no_ref, is_staged
from rankax.core.base.cache import Kept, KeptDict, Members
from rankax.core.base.messages import (
    caller_level,
    function_location,
    function_name,
    listed,
    noted_errors,
    shortened,
)
from rankax.core.base.trees import (
    Items,
    check_outputs,
    check_returned,
    is_sparse,
    leaves_with_names,
    refusal_of_sparse,
)
from rankax.core.declare.dims import Dim, Rank
from rankax.core.declare.ranks import Declaration, ranks_of_output, subtrees_with_ranks
from rankax.core.plan.report import call_error, output_error
from rankax.core.plan.schedule import (
    NO_ARRAY,
    WHOLE_CHUNKS,
    LeafPlan,
    Plan,
    Shape,
    Split,
    Tiles,
    leaf_plan,
    plan_ranks,
)
from rankax.core.protocols import ITEM
from rankax.ext.batched import Batched
from rankax.ext.blocks.arrays import blocks_of, in_blocks
from rankax.ext.ragged.type import Ragged


@dataclasses.dataclass(eq=False)
class KernelSpec:
    """What `bind` and `run` know of a decorated kernel, which has it as its ``spec``."""

    fun: Callable[..., Any]
    declaration: Declaration
    explicit: Mapping[str, Any]  # the options set for this kernel
    members: Members[Any]  # the kernels that differ in their options only

    def __post_init__(self) -> None:
        declaration, self.name = self.declaration, function_name(self.fun)
        self.preset = Options(**self.explicit)
        self.structures: Kept[Any] = Kept(1024, "structures of arguments")
        self.silent = set(declaration.silent)  # parameters not warned about yet
        parameters = declaration.signature.parameters
        of_many = {p.kind: p.name for p in parameters.values()}  # there is one of each such kind
        self.many, self.by_name = of_many.get(inspect.Parameter.VAR_KEYWORD, ""), dict[str, Any]()
        if isinstance(tree := declaration.ranks.get(self.many), Items):
            self.by_name = {key: rank for key, rank in tree.entries.items() if rank is not None}
        self.loose = of_many.get(inspect.Parameter.VAR_POSITIONAL, "")
        # Whether to warn of one array that is two arguments, whose items a reduction pairs.
        self.warns_of_pairs = self.preset.reduce is not None and not declaration.axes
        self.defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not parameter.empty
            # A positional-only argument can be passed only if all before it are, ranked or not.
            and (name in declaration.ranks or parameter.kind is parameter.POSITIONAL_ONLY)
        }

    @functools.cached_property
    def programs(self) -> tuple[KeptDict, KeptDict]:
        """Functions of the arrays by frame; `jax.jit` of them by frame and types (`ext/jit.py`).

        Both are dicts, emptied when full: a warm call takes 2 to 7 % longer with `Kept`.
        """
        return KeptDict("functions of jit=True"), KeptDict("programs of jit=True")

    @functools.cached_property
    def unnamed(self) -> KernelSpec:
        """The same kernel, of whose batch axes none has a name."""
        declaration = dataclasses.replace(self.declaration, axes=())
        explicit = {name: value for name, value in self.explicit.items() if name != "over"}
        unnamed = KernelSpec(self.fun, declaration, explicit, self.members)
        unnamed.warns_of_pairs = False
        return unnamed

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("programs", "unnamed")  # a copy compiles itself
        return {k: v for k, v in vars(self).items() if k not in dropped}

    def options(self) -> Options:
        """Return the options of a call made now."""
        return resolve(self.explicit, self.preset)

    def arguments_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Bind arguments to parameters; a default with a rank counts as passed."""
        try:
            bound = self.declaration.signature.bind(*args, **kwargs)
        except TypeError as error:
            options = {*NAMES} - self.declaration.signature.parameters.keys()
            option = min(options & kwargs.keys(), default=None)
            if option is None:
                masks = listed([*self.declaration.masks])
                hint = f"; do not pass {masks}, which rankax fills in" if masks else ""
                raise TypeError(f"{self.name}() {error}{hint}") from None
            raise TypeError(
                f"{self.name}() got {option} among its arguments, but it is an option: "
                f"{self.name}.with_options({option}={kwargs[option]!r})(...)"
            ) from None
        if not self.defaults.keys() <= bound.arguments.keys():
            bound = self.in_order({**self.defaults, **bound.arguments})
        if self.silent:
            self._warn_of_arrays(bound)
        if self.by_name:
            self._check_met(bound)
        return bound

    def in_order(
        self, arguments: dict[str, Any], *, written: bool = False
    ) -> inspect.BoundArguments:
        """Bind values by parameter name; `inspect` derives ``args`` and ``kwargs`` from them.

        With ``written``, bind to the kernel as it was written, with its masks.
        """
        signature = self.declaration.signature
        if written and self.declaration.written is not None:
            signature = self.declaration.written
        ordered = {name: arguments[name] for name in signature.parameters if name in arguments}
        return inspect.BoundArguments(signature, ordered)  # pyright: ignore[reportArgumentType]

    def _warn_of_arrays(self, bound: inspect.BoundArguments) -> None:
        """Warn, once per parameter, about arrays that get no rank from their annotation."""
        for name in tuple(self.silent):
            if arrays := arrays_of(bound.arguments.get(name), name):
                paths = shortened([f"{path} {shape}" for path, shape in arrays])
                warnings.warn(
                    f"{self.name}(): the annotation of {name} declares no rank, so it goes whole "
                    f"to every item of the batch, with its arrays {paths}; give auto_vmap a rank "
                    f"for it, or {name}=None if that is meant",
                    stacklevel=caller_level(),
                )
                self.silent.discard(name)

    def _check_met(self, bound: inspect.BoundArguments) -> None:
        """Refuse a call in which the rank of an item of ``**kwargs`` meets no argument.

        It may be left out where nothing can be meant by it: arrays that no rank is for came by
        position, or are all that came.
        """
        arguments, ranks = bound.arguments, self.declaration.ranks
        others = arguments.keys() & ranks.keys() - {self.many}
        is_mapped = bool(others) or ranks[self.many].rest is not None
        passed = {f"[{name!r}]" for name in arguments.get(self.many, ())}
        absent = [key.strip("[']") for key in self.by_name if key not in passed]
        if not absent:
            return
        came = [] if self.loose in ranks else arrays_of(arguments.get(self.loose), self.loose)
        if not (came or is_mapped or passed & self.by_name.keys()):
            came = [pair for name, value in arguments.items() for pair in arrays_of(value, name)]
        if came:
            raise TypeError(
                f"{self.name}(): the rank of {listed(absent)} meets no argument of that name; the "
                f"call passes {shortened([f'{path} {shape}' for path, shape in came])}, without a "
                f"rank. Pass {listed(absent)} by name, or give ranks as the call passes arguments"
            )

    def converted(self, leaf: Any, path: str, *, shapes_only: bool) -> Any:
        """Convert a leaf that is neither an array nor a number, or refuse it."""
        check_no_ref(leaf, f"{self.name}()", path)
        if hasattr(leaf, "__jax_array__"):
            return jnp.asarray(leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            if shapes_only:
                return leaf
            raise TypeError(
                f"{self.name}(): {path} is a ShapeDtypeStruct, which has no values; pass it "
                f"through jax.eval_shape({self.name}, ...), or to {self.name}.plan(...)"
            )
        if (package := blocks_of(leaf)) is not None:
            raise in_blocks(package, self.name, path)
        kind = type(leaf).__name__
        if isinstance(leaf, np.ma.MaskedArray):
            came = f"{kind}; pass {path}.filled(...), and the mask as an argument of its own"
        elif isinstance(leaf, np.ndarray):
            came = f"{kind} (an array of dtype {leaf.dtype}); convert it to numbers first, such as "
            came += f"{path}.astype(float)"
        elif hasattr(leaf, "__array__") and not isinstance(leaf, np.generic):
            # Its repr may be a table of several lines.
            came = f"{kind}; pass jnp.asarray({path})"
        else:
            came = f"{kind} ({leaf!r:.60}); a parameter that takes other objects has rank None"
        raise TypeError(
            f"{self.name}(): {path} has a rank, so it must be an array or a number, but it is "
            f"{came}"
        )

    def check_key(self, leaf: Any, path: str, rank: Rank | None) -> None:
        """Refuse a raw key, whose numbers would be mistaken for a batch of keys."""
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return
        is_split = rank is not None and rank.is_split
        declared = "has the rank SplitKey" if is_split else "is annotated as a PRNG key"
        if is_number(leaf):
            raise TypeError(
                f"{self.name}(): {path} {declared}, but it is the number {leaf!r}; make a key from "
                f"it: jax.random.key({leaf!r})"
            )
        raise TypeError(
            f"{self.name}(): {path} {declared}, but it is an array of dtype "
            f"{dtype} and shape {leaf.shape}; make keys with jax.random.key, not "
            f"jax.random.PRNGKey, or pass jax.random.wrap_key_data({path})"
        )


# Leaves.


def _made_again(value: Any) -> Any:
    """Rebuild a pytree of arrays, as `jax.vmap` does.

    A model of Flax knows in which trace it was made, and `nnx.grad` refuses one of another.
    """
    try:
        leaves, structure = jax.tree.flatten(value)
    except ValueError:  # a dict whose keys have no order
        return value
    return structure.unflatten(leaves) if any(map(is_array, leaves)) else value


def is_array(leaf: Any) -> bool:
    """Whether JAX accepts this leaf as an array without conversion."""
    if isinstance(leaf, jax.Array):
        return True
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return False
    if isinstance(leaf, np.ma.MaskedArray):
        return False
    return leaf.dtype.kind not in "OSTUMm" and leaf.dtype.type is not np.void


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python scalar, which JAX treats as a weakly typed array."""
    return isinstance(leaf, (int, float, complex))


_MOST_SHOWN = 40  # characters of a value in the table of a note


def _without_rank(name: str, value: Any) -> list[tuple[str, ...]]:
    """Describe an argument that has no rank, for an error of the kernel."""
    named: list[tuple[str, Any]]
    try:
        named = leaves_with_names(value, name) or [(name, value)]
    except (TypeError, ValueError):  # a dict whose keys JAX cannot sort
        named = [(name, value)]
    rows: list[tuple[str, ...]] = []
    for path, leaf in named:
        shape = str(tuple(leaf.shape)) if hasattr(leaf, "shape") else ""
        is_shown = leaf is None or isinstance(leaf, (int, float, complex, str))
        shown = repr(leaf)[:_MOST_SHOWN] if is_shown else type(leaf).__name__
        rows.append((path, shape, "None", shape or shown))
    return rows


def arrays_of(value: Any, path: str) -> list[tuple[str, Shape]]:
    """Return path and shape of every array inside ``value`` that has axes."""
    if value is None or isinstance(value, (int, float, complex, str)):
        return []
    try:
        if not any(map(_has_axes, jax.tree.leaves(value))):  # much faster than making the paths
            return []
    except (TypeError, ValueError):  # a dict whose keys JAX cannot sort
        return []
    named = leaves_with_names(value, path)
    return [(at, tuple(leaf.shape)) for at, leaf in named if _has_axes(leaf)]


def _has_axes(leaf: Any) -> bool:
    return (is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)) and bool(leaf.shape)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What follows from the tree structure of the ranked arguments."""

    paths: tuple[str, ...]  # of each leaf, in the caller's words
    ranks: tuple[Rank | None, ...]  # of each leaf
    axes: tuple[str, ...]  # the names of batch axes
    lists: tuple[tuple[str, tuple[int, ...]], ...]  # each list under one rank: name, leaves
    keys: tuple[int, ...]  # the leaves that are typed PRNG keys
    nodes: dict[int, Any]  # by leaf, without values, those that a wrapper replaces
    plans: Kept[Plan]  # by shapes and options
    fillings: Kept[Any]  # how a batch is padded (`ext/bucket.py`), by the same


class Shell(NamedTuple):
    """A call without its values."""

    names: tuple[str, ...]  # of the arguments with a rank
    treedef: Any  # of these
    others: Any = None  # the tree of the other arguments, if `KernelCall.split` took them out

    def call(self, kernel: KernelSpec, values: list[Any]) -> KernelCall:
        """Bind a call with these values."""
        count = self.treedef.num_leaves
        shell, others = self._replace(others=None), self.others.unflatten(values[count:])
        return bind_leaves(kernel, shell, values[:count], others)


@dataclasses.dataclass(eq=False)
class KernelCall(Call):
    """A bound call of a decorated kernel; its leaves come from the arguments with a rank."""

    kernel: KernelSpec
    bound: inspect.BoundArguments  # as passed; `leaves` has what is evaluated
    shell: Shell
    structure: Structure
    masks: Mapping[str, Any] | None = None  # by dimension, if an item is filled up
    is_foreign: bool = False  # whether a leaf is an array that another package evaluates

    @property
    def others(self) -> dict[str, Any]:
        """The arguments without a rank."""
        return {k: v for k, v in self.bound.arguments.items() if k not in self.shell.names}

    def plan(self, options: Options, tiles: Tiles | None = WHOLE_CHUNKS) -> Plan:
        ranks = self.structure.ranks
        shapes = tuple(
            [
                None if rank is None else getattr(leaf, "shape", ())
                for leaf, rank in zip(self.leaves, ranks, strict=True)
            ]
        )
        batch_shape, names = options.batch_shape, self.structure.axes
        if batch_shape is not None and self.cut is not None:
            batch_shape = self.cut
        over = options.reduce_axis if options.over is None else options.over
        chunk_size, tiles = sizes_of(options, tiles)

        def make() -> Plan:
            arrays = [
                (i, self.structure.paths[i], tuple(shape), rank)
                for i, (shape, rank) in enumerate(zip(shapes, ranks, strict=True))
                if rank is not None and shape is not None
            ]
            if batch_shape is not None:
                own = Rank(0, batch=() if self.cut is None else names)
                arrays = [*arrays, (NO_ARRAY, "batch_shape", batch_shape, own)]
            reduce = "" if options.reduce is None else str(options.reduce)
            axes = () if options.reduce is None else self.reduced_axes(options)
            return plan_ranks(self.fun, arrays, wrong, reduce, axes, names)

        def wrong(leaves: Any, ranks: Any, clashes: Any, sizes: Any) -> Exception:
            untouched = self.untouched()
            error = call_error(self.fun, leaves, ranks, clashes, sizes, untouched, names)
            for sentence in self._raw_keys() if isinstance(error, BatchShapeError) else ():
                error.add_note(sentence)
            return error

        plans, key = self.structure.plans, (shapes, batch_shape, options.reduce, over)
        plan = plans.get_or_make(key, make)
        if chunk_size is not None:
            whole = plan
            plan = plans.get_or_make((key, chunk_size, tiles), lambda: whole.cut(chunk_size, tiles))
        # Of a map, copies send nothing back.
        if marked := self.lengths.keys() & (plan.reduced or self.lengths.keys()):
            strides = np.eye(len(plan.batch_shape), dtype=int).tolist()
            marks = [Split(NO_ARRAY, tuple(strides[axis])) for axis in sorted(marked)]
            plan = dataclasses.replace(plan, splits=(*plan.splits, *marks))
        return plan

    def reduced_axes(self, options: Options) -> int | tuple[int, ...] | None:
        """Return which axes are reduced, as ``reduce_axis`` says it."""
        if options.over is None:
            return options.reduce_axis
        names = self.structure.axes
        if absent := [name for name in options.over if name not in names]:
            raise ValueError(
                f"{self.site}: over={absent[0]!r} has nothing to reduce: no argument of this call "
                f"has the batch axis {absent[0]!r} (they have {listed(names) or 'none'})"
            )
        return tuple(names.index(name) - len(names) for name in options.over)

    @property
    def ranked(self) -> list[int]:
        return [i for i, rank in enumerate(self.structure.ranks) if rank is not None]

    def call(self, leaves: Sequence[Any], plan: Plan) -> Any:
        values = zip(self.shell.names, self.shell.treedef.unflatten(leaves), strict=True)
        again = self.others if plan.levels else {}
        others = {name: _made_again(x) for name, x in again.items()}
        arguments = {**self.bound.arguments, **dict(values), **others, **self._masks(plan)}
        bound = self.kernel.in_order(arguments, written=True)
        with noted_errors(self.fun, functools.partial(self._described, plan.leaves)):
            return self.fun(*bound.args, **bound.kwargs)

    def _masks(self, plan: Plan) -> dict[str, Any]:
        """Return the arguments that callers do not pass: all rows are real, if none says more."""
        masks = self.masks or {}
        arrays: dict[str, Any] = {}
        for name, dim in self.kernel.declaration.masks.items():
            if dim not in masks and dim not in plan.sizes:
                raise ValueError(
                    f"{self.site}: {name} is the mask of {dim!r}, but no argument of this call "
                    "has that dimension"
                )
            arrays[name] = masks[dim] if dim in masks else jnp.ones(plan.sizes[dim], bool)
        return arrays

    def evaluate(self, leaves: Sequence[Any], plan: Plan) -> Any:
        pairs = zip(leaves, self.structure.ranks, strict=True)
        # The kernel must not change an array of the caller in place.
        arrays = [jnp.asarray(x) if rank and isinstance(x, np.ndarray) else x for x, rank in pairs]
        out = super().evaluate(arrays, plan)
        check = check_outputs if plan.levels else check_returned
        check(self.fun, out)
        if self.kernel.declaration.outputs is not None:
            self._check_declared(out, plan)
        return out

    def untouched(self) -> tuple[tuple[str, Shape], ...]:
        """Return path and shape of every array that has axes, but no rank."""
        return tuple(
            [
                array
                for name, value in self.bound.arguments.items()
                for path, subtree, rank in _with_ranks(self.kernel, name, value)
                if rank is None
                for array in arrays_of(subtree, path)
            ]
        )

    def _described(self, leaves: Sequence[LeafPlan]) -> tuple[Any, ...]:
        """Describe the arguments of one item, for an error of the kernel."""
        rows = [
            (leaf.path, str(leaf.shape), leaf.declared, str(leaf.core_shape))
            for leaf in leaves
            if leaf.path in self.paths
        ]
        rows += [row for pair in self.others.items() for row in _without_rank(*pair)]
        nones = [name for name in self.shell.names if self.bound.arguments[name] is None]
        sentences = [f"{name} is None, which passes through whatever its rank." for name in nones]
        sentences += [
            f"{name} is a list, so the kernel gets a list; jnp.stack({name}) is one array."
            for name, _ in self.structure.lists
        ]
        sentences += [*self._raw_keys(), *self.form.in_front]
        return ("argument", "shape", "rank", "one item"), rows, sentences

    def _raw_keys(self) -> list[str]:
        """Return a hint for each array of rank 0 that looks like a raw key."""
        return [
            f"If {path} is a raw key (jax.random.PRNGKey), its rank is 1; a key made with "
            "jax.random.key has rank 0."
            for path, leaf, rank in zip(self.paths, self.leaves, self.structure.ranks, strict=True)
            if rank is not None and rank.rank == 0
            if getattr(leaf, "dtype", None) == np.uint32 and leaf.shape[-1:] in ((2,), (4,))
        ]

    def _check_declared(self, out: Any, plan: Plan) -> None:
        """Check one item's output against its declaration."""
        try:
            ranks = ranks_of_output(self.kernel.declaration.outputs, out)
        except ValueError as error:
            raise ValueError(f"{function_location(self.fun)}: {error}") from None
        named = zip(leaves_with_names(out, "output"), ranks, strict=True)
        pairs = [
            (leaf_plan(path, jnp.shape(leaf), rank), rank)
            for (path, leaf), rank in named
            if rank is not None
        ]
        if error := output_error(self.fun, pairs, plan.sizes):
            raise error

    def split(self) -> tuple[list[Any], Shell]:
        """Return the values of a call, for arguments with a rank first, and the rest of it."""
        (names, treedef, _), others = self.shell, self.others
        try:
            values, tree = jax.tree.flatten(others)
        except (TypeError, ValueError):  # a dict whose keys JAX cannot sort
            values, tree = jax.tree.flatten(others, is_leaf=lambda node: node is not others)
        return [*self.leaves, *values], Shell(names, treedef, tree)


def bind(
    kernel: KernelSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    shapes_only: bool = False,
    takes_foreign: bool = False,
) -> KernelCall:
    """Bind arguments and flatten those that have a rank.

    With ``takes_foreign``, a call with an array that another package evaluates is returned as soon
    as one is found, and marked; the wrapper checks its leaves. Otherwise such an array is refused.
    """
    call = bind_unchecked(kernel, args, kwargs)
    leaves, structure, is_traced = call.leaves, call.structure, False
    for i, rank in enumerate(structure.ranks):
        if rank is None:
            continue
        if not (is_array(leaves[i]) or is_number(leaves[i])):
            if takes_foreign and blocks_of(leaves[i]):
                call.is_foreign = True
                return refuse_nodes(call)
            path = structure.paths[i]
            leaves[i] = kernel.converted(leaves[i], path, shapes_only=shapes_only)
        elif isinstance(leaves[i], jax.core.Tracer):  # a traced Ref passes for an array
            is_traced = True
            check_no_ref(leaves[i], f"{kernel.name}()", structure.paths[i])
    for i in structure.keys:
        kernel.check_key(leaves[i], structure.paths[i], structure.ranks[i])
    if kernel.warns_of_pairs and not shapes_only:
        arrays = _primals(leaves) if is_traced else leaves
        if len({*map(id, arrays)}) < len(arrays):
            _warn_of_pairs(call, arrays)
    return call


def _primals(leaves: list[Any]) -> list[Any]:
    """Return the arrays that leaves stand for, outside a program that is being traced.

    ``jax.grad(kernel)(x, x)`` passes two tracers of one array, or a tracer and the array.
    """
    if is_staged():
        return leaves
    return [jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x for x in leaves]


def _warn_of_pairs(call: KernelCall, arrays: list[Any]) -> None:
    """Warn, once per kernel, if all pairs of an array with itself may be meant."""
    first: dict[tuple[int, Rank], str] = {}
    for leaf, path, rank in zip(arrays, call.paths, call.structure.ranks, strict=True):
        shape = np.shape(leaf)
        if rank is None or math.prod(shape[: len(shape) - rank.rank]) < 2:
            continue
        other = first.setdefault((id(leaf), rank), path)
        if other.split("[")[0].split(".")[0] == path.split("[")[0].split(".")[0]:
            continue
        dims = rank.dims if rank.dims is not None else (Dim("_"),) * rank.rank
        i, j = (dataclasses.replace(rank, dims=dims, batch=(name,)) for name in "ij")
        warnings.warn(
            f"{call.site}: {other} and {path} are the same array, and each of its items meets only "
            f"itself. For all pairs, pass {other}[:, None], or name the axes: {other}={i}, "
            f"{path}={j}, over='j'. If this is meant, {other}={i}, {path}={i} says so",
            stacklevel=caller_level(),
        )
        call.kernel.warns_of_pairs = False
        return


def check_promotion(call: KernelCall) -> None:
    """Refuse, or warn of, batch axes of different numbers, if ``jax_numpy_rank_promotion`` does."""
    mode = jax.config.jax_numpy_rank_promotion  # pyright: ignore
    if mode == "allow" or len({*(counts := _numbers_of_axes(call)).values()}) < 2:
        return
    least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    text = (
        f"{call.site}: {most} has {counts[most]} batch axes and {least} has {counts[least]}, but "
        f"jax_numpy_rank_promotion={mode!r} asks for axes of length 1 in front to be written; pass "
        f"jnp.expand_dims({least.partition(' (')[0]}, 0), or name the batch axes"
    )
    if mode == "raise":
        raise BatchShapeError(text)
    warnings.warn(text, stacklevel=caller_level())


def _numbers_of_axes(call: KernelCall) -> dict[str, int]:
    """Return how many batch axes each array has that are matched by their order.

    An array without batch axes is one item, as a scalar is one number; names, ``batch_shape`` and
    ragged items say themselves which batch axes meet.
    """
    if call.structure.nodes or call.kernel.preset.batch_shape is not None:
        return {}
    leaves = zip(call.paths, map(np.shape, call.leaves), call.structure.ranks, strict=True)
    return {
        f"{path} {shape}": count
        for path, shape, rank in leaves
        if rank is not None and (count := len(shape) - rank.rank - len(rank.batch)) > 0
    }


def refuse_nodes(call: KernelCall) -> KernelCall:
    """Return the call; refuse a node that no wrapper replaces here."""
    for i in call.structure.nodes:
        raise TypeError(
            f"{call.site}: {call.structure.paths[i]} is Ragged, which goes with arrays of JAX and "
            "NumPy only; beside an array of another package, pass a padded array, and a boolean "
            "array that says which rows are real"
        )
    return call


def bind_unchecked(kernel: KernelSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelCall:
    """Do what `bind` does, without converting the leaves or checking what they are."""
    bound = kernel.arguments_of(args, kwargs)
    names = tuple([name for name in kernel.declaration.ranks if name in bound.arguments])
    leaves, treedef = jax.tree.flatten([bound.arguments[name] for name in names])
    return _call_of(kernel, bound, Shell(names, treedef), leaves)


def bind_leaves(
    kernel: KernelSpec, shell: Shell, leaves: list[Any], others: dict[str, Any]
) -> KernelCall:
    """Bind leaves that come from an earlier call of `bind`; ``others`` have no rank."""
    values = zip(shell.names, shell.treedef.unflatten(leaves), strict=True)
    return _call_of(kernel, kernel.in_order({**others, **dict(values)}), shell, leaves)


def _call_of(
    kernel: KernelSpec, bound: inspect.BoundArguments, shell: Shell, leaves: list[Any]
) -> KernelCall:
    """Give each leaf its rank, and refuse a list of numbers under one rank.

    This includes rank 0, although the list could be a pytree of scalars: such a list needs a rank
    for each entry, or the annotation of a list.
    """

    def make() -> Structure:
        return _new_structure(kernel, {name: bound.arguments[name] for name in shell.names})

    structure = kernel.structures.get_or_make(shell, make)
    for name, group in structure.lists:
        if all(is_number(leaves[i]) or isinstance(leaves[i], np.generic) for i in group):
            raise TypeError(
                f"{kernel.name}(): {name} is a list of numbers, but an array is expected; pass "
                f"jnp.asarray({name}). (For a list of separate scalars, declare a rank "
                "for each.)"
            )
    site, paths = f"{kernel.name}()", structure.paths
    form = Batched() if kernel.preset.batched else ITEM
    return KernelCall(
        kernel.fun, kernel.name, site, leaves, paths, kernel, bound, shell, structure, form=form
    )


def _new_structure(kernel: KernelSpec, values: dict[str, Any]) -> Structure:
    paths: list[str] = []
    ranks: list[Rank | None] = []
    lists: list[tuple[str, tuple[int, ...]]] = []
    nodes: dict[int, Any] = {}
    for name, value in values.items():
        for path, subtree, rank in _with_ranks(kernel, name, value):
            is_tree = rank is not None and not isinstance(subtree, (jax.Array, np.ndarray))
            if is_tree and any(map(is_sparse, jax.tree.leaves(subtree, is_leaf=is_sparse))):
                raise refusal_of_sparse(f"{kernel.name}()", path, subtree)
            if rank is not None:
                lists += _lists(subtree, path, len(ranks))
            for at, node in leaves_with_names(subtree, path, stops=lambda x: isinstance(x, Ragged)):
                if rank is not None and isinstance(node, Ragged):
                    nodes[len(paths)] = jax.tree.map(lambda _: None, node)
                paths.append(at)
            ranks += [rank] * (len(paths) - len(ranks))
    keys = [i for i, rank in enumerate(ranks) if rank is not None and rank.is_key]
    plans, fillings = Kept[Any](1024, "plans"), Kept[Any](1024, "how batches are padded")
    used = {axis for rank in ranks if rank is not None for axis in rank.batch}
    axes = tuple([axis for axis in kernel.declaration.axes if axis in used])
    return Structure(
        tuple(paths), tuple(ranks), axes, tuple(lists), tuple(keys), nodes, plans, fillings
    )


def _with_ranks(kernel: KernelSpec, name: str, value: Any) -> list[tuple[str, Any, Rank | None]]:
    try:
        return subtrees_with_ranks(kernel.declaration.ranks.get(name), value, name)
    except ValueError as error:
        raise ValueError(f"{function_location(kernel.fun)}: {error}") from None


def _lists(subtree: Any, path: str, start: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name each outermost list inside ``subtree``, with the positions of its leaves."""
    lists: list[tuple[str, tuple[int, ...]]] = []
    for name, node in leaves_with_names(subtree, path, stops=lambda n: isinstance(n, list)):
        count = jax.tree.structure(node).num_leaves
        if isinstance(node, list) and count:
            lists.append((name, tuple(range(start, start + count))))
        start += count
    return lists
