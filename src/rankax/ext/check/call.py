# SPDX-License-Identifier: MIT
"""``kernel.check`` and ``kernel.nonfinite``: two tests of a call, item by item.

`check` evaluates some items by themselves and compares them with those of the call. `nonfinite`
maps a kernel that returns whether an item is NaN or infinite, and reduces its outputs.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from rankax._options import Options
from rankax.call.kernels import KernelCall, KernelSpec, bind
from rankax.core.base.arrays import has_tangent, sharding_of, target_of
from rankax.core.base.messages import check_bool, checked_int, positive_int
from rankax.core.base.trees import check_outputs, leaves_with_names
from rankax.core.declare.dims import Rank
from rankax.core.declare.ranks import ranks_of_leaves
from rankax.core.loop.spec import PLACE
from rankax.core.plan.schedule import Shape
from rankax.core.reduce.protocol import Several
from rankax.core.reduce.run import find_mask
from rankax.core.trace.programs import subprograms
from rankax.ext.check.ulps import difference, is_rounding, most_ulps, numbers_of
from rankax.ext.ragged.type import Ragged
from rankax.ext.reductions.read import read_reductions
from rankax.ext.reductions.winners import TopK
from rankax.pipeline import evaluate

Index = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The result of ``kernel.check(...)``; ``print`` shows it.

    Attributes
    ----------
    kernel : str
        The name of the kernel.
    batch_shape : tuple of int
        The batch of the call.
    items : tuple of tuple of int
        The batch indices of the items that were evaluated by themselves.
    differences : tuple of (str, float, tuple of int)
        For each output, and each gradient: its path, the largest difference in units of the last
        place of its largest number, and the item that has it; for a gradient, the position in the
        argument.
    padding : tuple of str
        Ragged arguments whose padding would change the items if it held other numbers than copies,
        and these numbers. The results are correct nonetheless.
    """

    kernel: str
    batch_shape: tuple[int, ...]
    items: tuple[tuple[int, ...], ...]
    differences: tuple[tuple[str, float, tuple[int, ...]], ...]
    padding: tuple[str, ...] = ()

    def __str__(self) -> str:
        total = math.prod(self.batch_shape)
        title = f"{self.kernel}: {len(self.items)} of {total} items agree with the kernel by itself"
        lines = [f"  {path}: {ulps:.3g} ulps, at {list(at)}" for path, ulps, at in self.differences]
        return "\n".join([title, *lines, *(f"  {line}" for line in self.padding)])


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The result of ``kernel.nonfinite(...)``; ``print`` shows it.

    Attributes
    ----------
    kernel : str
        The name of the kernel.
    what : str
        ``"value"`` or ``"gradient"``.
    batch_shape : tuple of int
        The batch of the call.
    count : int
        How many items have a value (a gradient) that is not finite.
    indices : numpy.ndarray
        The batch indices of the first of them, one row per item.
    arguments : tuple of dict
        What each of these items was evaluated from, by path.
    """

    kernel: str
    what: str
    batch_shape: tuple[int, ...]
    count: int
    indices: np.ndarray
    arguments: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        total, what = math.prod(self.batch_shape), self.what
        title = f"{self.kernel}: a {what} that is not finite in {self.count} of {total} items"
        rows = zip(self.indices.tolist(), self.arguments, strict=True)
        lines = [f"  {index}: {_shown(arguments)}" for index, arguments in rows]
        more = self.count - len(lines)
        return "\n".join([title, *lines, *([f"  and {more} more"] if more else [])])


class CallItems:
    """The items of a bound call."""

    def __init__(self, call: KernelCall, options: Options) -> None:
        self.call, self.plan = call, call.plan_whole(options)
        self.shape = self.plan.batch_shape

    def lengths(self, index: Index) -> Shape:  # noqa: ARG002
        """Return the numbers of rows of a ragged item, on which its shapes depend."""
        return ()

    def inputs(self, index: Index, leaves: Sequence[Any], lengths: Shape) -> list[Any]:  # noqa: ARG002
        """Return the item of each mapped leaf, then its numbers for keys that are split.

        The index and the leaves may be traced.
        """
        plan, items = self.plan, list[Any]()
        for i, axes, core in zip(plan.mapped, plan.batch_axes, plan.cores, strict=True):
            window: list[Any] = [slice(None)] * np.ndim(leaves[i])
            for axis, place in zip(axes, index, strict=True):
                if axis is not None:
                    window[axis] = place
            items.append(jnp.reshape(jnp.asarray(leaves[i])[tuple(window)], core))
        numbers = [sum(map(operator.mul, split.strides, index)) for split in plan.splits]
        return [*items, *(jnp.asarray(number, PLACE.dtype) for number in numbers)]

    def arguments(self, index: Index) -> dict[str, Any]:
        """Return what an item is evaluated from, by path."""
        leaves = self.call.leaves
        own = dict(zip(self.plan.mapped, self.inputs(index, leaves, ()), strict=False))
        return {path: own.get(i, leaves[i]) for i, path in enumerate(self.call.structure.paths)}

    def evaluate(self, inputs: Sequence[Any], leaves: list[Any]) -> list[Any]:
        """Evaluate one item."""
        return jax.tree.leaves(self.output(inputs, leaves))

    @functools.cached_property
    def alone(self) -> Callable[[Sequence[Any]], list[Any]]:
        """The compiled function that evaluates one item of the call, from its inputs."""
        return jax.jit(lambda inputs: self.evaluate(inputs, self.call.leaves))

    def output(self, inputs: Sequence[Any], leaves: list[Any]) -> Any:
        return dataclasses.replace(self.call, leaves=leaves).on_item(self.plan)(*inputs)

    def gathered(self, outs: Any, chosen: Sequence[Index]) -> list[Any]:
        """Return the chosen items of the outputs of a call, on axis 0."""
        places = tuple(np.array(chosen).T) if self.shape else None
        return _items(jax.tree.leaves(outs), places)

    # `RaggedItems` overrides these.

    def reduced(self, fun: Callable[[KernelCall], Any], explicit: dict[str, Any]) -> Any:
        """Reduce what a function returns for each item, which it gets as a call."""
        call, spec = self.call, self.call.kernel

        @functools.wraps(spec.fun)
        def of_item(*args: Any, **kwargs: Any) -> Any:
            return fun(bind(spec, args, kwargs))

        seen = {"outputs": None, "masks": {}, "written": None}  # `of_item` takes no mask
        declaration = dataclasses.replace(spec.declaration, **seen)
        items = KernelSpec(of_item, declaration, {}, spec.members)
        args = call.arguments
        return evaluate(bind(items, args.args, args.kwargs), Options(**explicit))

    def has_rows(self, index: Index) -> bool:  # noqa: ARG002
        """Whether the kernel can be evaluated for this item by itself."""
        return True

    def described(self, index: Index) -> str:
        """Say what helps to find out why an item differs."""
        return f"; the item has {_shown(self.arguments(index))}"

    def padding(self, chosen: Sequence[Index]) -> tuple[str, ...]:  # noqa: ARG002
        """Return on which padding some items depend."""
        return ()


def check(
    kernel: Any,
    args: Any,
    kwargs: Any,
    items: int,
    seed: int,
    *,
    gradient: bool,
    ragged: type[CallItems],
) -> CheckReport:
    """Compare some items of a call with single evaluations; see ``kernel.check``.

    ``ragged`` is what the items of a call with `Ragged` arguments are.
    """
    site = f"{kernel.spec.name}.check"
    positive_int(items, site, "items")
    checked_int(seed, f"{site}: seed must be an int, got")
    check_bool(gradient, site, "gradient")
    # Compare items: the reduction of a sample says nothing about the reduction of all.
    kernel = kernel.with_options(reduce=None, reduce_axis=None, where=None)
    call = bind(kernel.spec, args, kwargs, takes_nodes=True)
    meshes = [getattr(sharding_of(leaf), "mesh", None) for leaf in call.leaves]
    if any(AxisType.Explicit in getattr(mesh, "axis_types", ()) for mesh in meshes):
        raise TypeError(
            f"{site}: an array is on a mesh with explicit axes, where items cannot be picked; "
            "pass jax.device_get(...) of the arguments"
        )
    target = target_of(call.leaves)
    them = (ragged if call.structure.nodes else CallItems)(call, kernel.spec.options())
    random = np.random.default_rng(seed)
    chosen = [i for i in _chosen(them.shape, items, random) if them.has_rows(i)]
    differences: list[tuple[str, float, Index]] = []
    if chosen:
        by_item = [
            them.alone(them.inputs(index, call.leaves, them.lengths(index))) for index in chosen
        ]
        wanted = [
            np.stack([numbers_of(jnp.asarray(out)) for out in outs])
            for outs in zip(*by_item, strict=True)
        ]
        whole = kernel.run_bound(call)
        named = leaves_with_names(whole, "output", stops=lambda node: isinstance(node, Ragged))
        names = [path for path, _ in named]
        values = zip(names, wanted, them.gathered(whole, chosen), strict=True)
        draws = [random.normal(size=want.shape) for want in wanted]
        gradients = _gradients(kernel, them, chosen, draws) if gradient else ()
        for path, want, got in itertools.chain(values, gradients):
            ulps, worst = difference(want, got, target)
            is_value = len(differences) < len(names)
            at, one = (chosen[worst[0]], worst[:1]) if is_value else (worst, worst)
            differences.append((path, ulps, at))
            if ulps > most_ulps(want.dtype, target) and not is_rounding(
                ulps, want.dtype, _dtypes_inside(kernel, call), target
            ):
                item = them.described(at) if is_value else ""
                raise ValueError(
                    f"{site}: {path} at {list(at)} is {_text(got[one])}, but the kernel by itself "
                    f"gives {_text(want[one])} ({ulps:.3g} ulps of the largest number){item}"
                )
    padding = them.padding(chosen)
    return CheckReport(kernel.spec.name, them.shape, tuple(chosen), tuple(differences), padding)


def _dtypes_inside(kernel: Any, call: KernelCall) -> set[Any]:
    """Return the dtypes of all that a call computes."""
    floats = {i: jnp.asarray(x) for i, x in enumerate(call.leaves) if has_tangent(x)}

    def outputs(floats: Mapping[int, Any]) -> list[Any]:
        leaves = [floats.get(i, leaf) for i, leaf in enumerate(call.leaves)]
        return jax.tree.leaves(kernel.run_bound(dataclasses.replace(call, leaves=leaves)))

    def dtypes(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            yield from (v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype"))
            for program in subprograms(eqn):
                yield from dtypes(program)

    return {*dtypes(jax.make_jaxpr(outputs)(floats).jaxpr)}


def _chosen(shape: Sequence[int], items: int, random: np.random.Generator) -> list[Index]:
    """Choose items at random, and the first and the last, which a chunk may treat differently."""
    total = math.prod(shape)
    flat = list(range(min(total, items)))
    if items < total:
        drawn = random.choice(total - 2, max(0, items - 2), replace=False)
        flat = [0, *sorted(drawn + 1), total - 1][:items]
    return [tuple(map(int, np.unravel_index(i, shape))) if shape else () for i in flat]


@jax.jit
def _items(outs: list[Any], places: tuple[Any, ...] | None) -> list[Any]:
    return [jnp.asarray(out)[places] for out in outs]


def _gradients(
    kernel: Any, them: CallItems, chosen: Sequence[Index], draws: Sequence[Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the gradient of a random sum of the chosen items: of themselves, and of the call."""
    call = them.call
    leaves, ranked = enumerate(call.leaves), {*call.ranked}
    arrays = {i: jnp.asarray(x) for i, x in leaves if i in ranked or has_tangent(x)}
    floats = {i: x for i, x in arrays.items() if has_tangent(x)}
    others = {i: x for i, x in arrays.items() if i not in floats}

    def merged(values: Mapping[int, Any]) -> list[Any]:
        return [values.get(i, leaf) for i, leaf in enumerate(call.leaves)]

    @jax.jit
    def weighed(outs: Sequence[Any], weights: Sequence[Any]) -> Any:
        pairs = zip(outs, weights, strict=True)
        terms = [jnp.real(out * w.astype(out.dtype)) for out, w in pairs if has_tangent(out)]
        dtype = jnp.result_type(float)  # some narrow floats are not promoted
        return sum((jnp.sum(term).astype(dtype) for term in terms), jnp.zeros((), dtype))

    def of_call(values: Mapping[int, Any]) -> Any:
        outs = kernel.run_bound(dataclasses.replace(call, leaves=merged(values)))
        return weighed(them.gathered(outs, chosen), draws)

    @jax.grad
    def of_item(
        values: Mapping[int, Any], others: Any, index: Index, weights: Any, lengths: Shape
    ) -> Any:
        leaves = merged({**others, **values})
        return weighed(them.evaluate(them.inputs(index, leaves, lengths), leaves), weights)

    compiled = jax.jit(of_item, static_argnums=4)

    def gradient(number: int) -> Any:
        index, weights = chosen[number], [draw[number] for draw in draws]
        arguments = floats, others, index, weights, them.lengths(index)
        # Each eager operation would be a program of its own, and round what a program need not.
        try:
            return compiled(*arguments)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            return of_item(*arguments)  # the kernel looks at the values of what items share

    got = jax.grad(of_call)(floats)
    by_item = map(gradient, range(len(chosen)))
    wanted = functools.reduce(functools.partial(jax.tree.map, jnp.add), by_item)
    got, wanted = ({i: np.asarray(x) for i, x in tree.items()} for tree in (got, wanted))
    lost = {i: np.isnan(got[i]) & ~np.isnan(wanted[i]) for i in floats}
    if any(map(np.any, lost.values())) and not call.structure.nodes:
        args, kwargs = call.arguments.args, call.arguments.kwargs
        odd = functools.partial(nonfinite, kernel, args, kwargs, 1, ragged=type(them))
        if any(odd(gradient=g).count for g in (False, True)):
            # A cotangent of 0 times a derivative that is not finite is NaN, as in plain JAX.
            got = {i: np.where(lost[i], wanted[i], got[i]) for i in floats}
    for i in floats:
        yield f"gradient of {call.structure.paths[i]}", wanted[i], got[i]


def _text(value: Any) -> str:
    formatter: Any = dict.fromkeys(("float_kind", "complex_kind"), "{:.6g}".format)
    array = np.asarray(numbers_of(value))
    text = np.array2string(array, threshold=8, separator=", ", formatter=formatter)
    return " ".join(text.split())


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {_text(value)}" for path, value in arguments.items())


def nonfinite(
    kernel: Any, args: Any, kwargs: Any, most: int, *, gradient: bool, ragged: type[CallItems]
) -> NonFinite:
    """Count the items that are not finite, and name the first ones; see ``kernel.nonfinite``.

    ``ragged`` is what the items of a call with `Ragged` arguments are.
    """
    spec: KernelSpec = kernel.spec
    site = f"{spec.name}.nonfinite"
    positive_int(most, site, "most")
    check_bool(gradient, site, "gradient")
    given = spec.options()
    unreduced: dict[str, Any] = {"reduce": None, "reduce_axis": None, "where": None}
    unbatched: dict[str, Any] = {"batched": False, "jit": False, "compiler_options": None}
    explicit = {**given.values(), **unreduced, **unbatched}
    options = Options(**explicit)
    call = bind(spec, args, kwargs, takes_nodes=True)
    them = (ragged if call.structure.nodes else CallItems)(call, options)
    total, count, flat = math.prod(them.shape), 0, np.zeros(0, int)
    if total:
        reduce = read_reductions(Several("sum", TopK(min(most, total))), site)
        is_odd = _is_odd(spec, given.where, gradient)
        found, first = them.reduced(is_odd, {**explicit, "reduce": reduce})
        count = int(found)
        flat = np.asarray(first.indices)[:count]
    indices = np.stack(np.unravel_index(flat, them.shape or (1,)), -1)[:, : len(them.shape)]
    arguments = tuple(them.arguments(tuple(index)) for index in indices.tolist())
    what = "gradient" if gradient else "value"
    return NonFinite(spec.name, what, them.shape, count, indices, arguments)


def _is_odd(
    spec: KernelSpec, mask: str | int | None, gradient: bool
) -> Callable[[KernelCall], jax.Array]:
    """Return a function that says whether an item is not finite: a number, to be ranked."""

    def is_finite(tree: Any) -> jax.Array:
        leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if has_tangent(x)]
        return functools.reduce(jnp.logical_and, leaves, jnp.bool_(True))

    def is_odd(call: KernelCall) -> jax.Array:
        masks, ranks = call.masks or {}, call.structure.ranks
        places = [i for i, leaf in enumerate(call.leaves) if gradient and has_tangent(leaf)]

        def of(values: list[Any]) -> tuple[list[Any], Any]:
            leaves = list(call.leaves)
            for i, value in zip(places, values, strict=True):
                leaves[i] = value
            out = call.evaluate(leaves, call.plan(Options()))
            check_outputs(spec.fun, out)
            outs = jax.tree.leaves(out)
            if masks and spec.declaration.outputs is not None:
                declared = ranks_of_leaves(spec.declaration.outputs, out, "output")
                outs = [_real(x, rank, masks) for x, rank in zip(outs, declared, strict=True)]
            return [x for x in outs if has_tangent(x)], out

        outs, pull, out = jax.vjp(of, [jnp.asarray(call.leaves[i]) for i in places], has_aux=True)
        is_bad = ~is_finite(outs)
        if gradient:
            (grads,) = pull([jnp.ones_like(x) for x in outs])
            # Nothing flows back to an item without rows.
            has_rows = {name: jnp.any(mask) for name, mask in masks.items()}
            grads = [_real(x, ranks[i], has_rows) for i, x in zip(places, grads, strict=True)]
            is_bad = ~is_bad & ~is_finite(grads)
        if mask is not None:
            is_bad &= find_mask(out, mask)[1]
        return is_bad.astype(jnp.int32)

    return is_odd


def _real(x: Any, rank: Rank | None, masks: Mapping[str, Any]) -> Any:
    """Return zeros in place of rows that fill a ragged item up."""
    name = rank.dims[0].name if rank is not None and rank.dims else None
    if name is None or (mask := masks.get(name)) is None:
        return x
    return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
