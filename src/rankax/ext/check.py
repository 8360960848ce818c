# SPDX-License-Identifier: MIT
"""``kernel.check`` and ``kernel.nonfinite``: two tests of a call, item by item.

`check` evaluates some items by themselves, without a batch and with their own rows if they are
ragged, and compares them with those of the call. `nonfinite` maps a kernel that returns whether an
item is NaN or infinite, and reduces its outputs.
"""

import dataclasses
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from rankax._options import Options
from rankax.call.kernels import KernelCall, KernelSpec, bind, bind_leaves
from rankax.core.base.arrays import has_tangent, is_cpu, sharding_of, target_of
from rankax.core.base.messages import check_bool, checked_int, positive_int
from rankax.core.base.trees import check_outputs, leaves_with_names
from rankax.core.declare.dims import Rank
from rankax.core.declare.ranks import Declaration, ranks_of_output
from rankax.core.loop.spec import item_key
from rankax.core.plan.schedule import Shape
from rankax.core.reduce.protocol import Several
from rankax.core.reduce.run import find_mask
from rankax.core.trace.programs import subprograms
from rankax.ext.ragged.call import RaggedCall, dense_shell
from rankax.ext.ragged.type import is_ragged
from rankax.ext.reductions.read import read_reductions
from rankax.ext.reductions.winners import TopK

Index = tuple[int, ...]

_OF_ITEMS: dict[str, Any] = {
    **dict.fromkeys(("reduce", "reduce_axis", "over", "where")),
    "fused": False,
}


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
        Ragged arguments whose padding would change the items if it held NaN, not copies. The
        results are correct nonetheless.
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
        if not self.count and what == "value":
            lines = ["  a gradient may not be finite all the same; gradient=True looks for that"]
        elif more := self.count - len(lines):
            lines.append(f"  and {more} more")
        return "\n".join([title, *lines])


class _SingleItems:
    """The items of a bound call, by themselves."""

    def __init__(self, call: KernelCall) -> None:
        self.shell = dense_shell(call)
        self.ragged = RaggedCall.of(call) if call.structure.nodes else None
        self.call = call = self.ragged.call if self.ragged else call
        self.dim_of = self.ragged.dim_of if self.ragged else {}
        self.plan = self.ragged.dense if self.ragged else call.plan_whole(call.kernel.options())
        self.shape = self.plan.batch_shape
        leaves, ranked = enumerate(call.leaves), {*call.ranked}
        self.arrays = {i: jnp.asarray(x) for i, x in leaves if i in ranked or has_tangent(x)}
        self.taken = jax.jit(self.take, static_argnums=2)

    def lengths(self, index: Index) -> Shape:
        """Return the number of rows of an item in each ragged dimension."""
        return tuple(self.ragged.lengths[self._number(index)].tolist()) if self.ragged else ()

    def _number(self, index: Index) -> Any:
        return index[-1] if self.ragged and self.ragged.count > 1 else 0

    def take(self, arrays: Mapping[int, Any], index: Index, lengths: Shape) -> dict[int, Any]:
        """Return the arrays of one item."""
        plan, item = self.plan, dict(arrays)
        for i, axes, core in zip(plan.mapped, plan.batch_axes, plan.cores, strict=True):
            if self.ragged and i in self.dim_of:
                dim = self.dim_of[i]
                start = jnp.asarray(self.ragged.starts)[self._number(index), dim]
                item[i] = jax.lax.dynamic_slice_in_dim(arrays[i], start, lengths[dim])
                continue
            at = dict(zip(axes, index, strict=True))
            window = [at.get(axis, slice(None)) for axis in range(arrays[i].ndim)]
            item[i] = jnp.reshape(arrays[i][tuple(window)], core)
        for split in plan.splits:
            number = sum(map(operator.mul, split.strides, index))
            item[split.position] = item_key(item[split.position], number)
        return item

    def evaluate(self, item: Mapping[int, Any], lengths: Sequence[Any] | None = None) -> list[Any]:
        """Evaluate one item; if its rows were filled up, ``lengths`` says how many are real."""
        leaves = [item.get(i, x) for i, x in enumerate(self.call.leaves)]
        call = bind_leaves(self.call.kernel.unnamed, self.shell, leaves, self.call.others)
        if self.ragged and lengths is not None:
            names, most = self.ragged.dims, {d: len(item[i]) for i, d in self.dim_of.items()}
            call.masks = {names[d]: jnp.arange(n) < lengths[d] for d, n in most.items()}
        return list(map(jnp.asarray, jax.tree.leaves(call.evaluate(leaves, call.plan(Options())))))

    def gathered(self, outs: Any, chosen: Sequence[Index]) -> list[Sequence[Any]]:
        """Return the outputs of each chosen item, of those of a call."""
        places, columns = tuple(np.array(chosen).T) if self.shape else None, list[Sequence[Any]]()
        for leaf in jax.tree.leaves(outs, is_leaf=is_ragged):
            if is_ragged(leaf):
                items = leaf.to_list()
                columns.append([items[self._number(index)] for index in chosen])
            else:
                columns.append(jnp.unstack(_at(leaf, places)))
        return [[column[n] for column in columns] for n in range(len(chosen))]

    def shown(self, index: Index) -> dict[str, Any]:
        """Return what an item is evaluated from, by path."""
        item, paths = self.taken(self.arrays, index, self.lengths(index)), self.call.structure.paths
        return {path: item.get(i, self.call.leaves[i]) for i, path in enumerate(paths)}

    def leaks(self, chosen: Sequence[Index]) -> tuple[bool, tuple[str, ...]]:
        """Say whether items change if copies fill them up, and which arguments matter if NaN do."""
        most = np.max([self.lengths(index) for index in chosen], 0, initial=1) + 3
        evaluate, changed = jax.jit(self.evaluate), set[int]()
        for index in chosen if self.ragged else ():
            lengths = self.lengths(index)
            item = self.taken(self.arrays, index, lengths)
            wanted = alone = evaluate(item)
            for place in (-1, *(i for i in self.dim_of if has_tangent(item[i]))):
                rows = {
                    i: _filled(item[i], most[dim], with_nan=i == place)
                    for i, dim in self.dim_of.items()
                }
                outs = zip(evaluate({**item, **rows}, lengths), alone, strict=True)
                real = [x[tuple(map(slice, one.shape))] for x, one in outs]
                changed |= set() if _agree(wanted, real) else {place}
                wanted = real if place < 0 else wanted  # NaN are compared with copies
        paths = self.call.structure.paths
        lines = [
            f"the items depend on the rows that fill {paths[i]} up" for i in sorted(changed - {-1})
        ]
        return -1 in changed, tuple(lines)


def _filled(x: Any, most: int, *, with_nan: bool) -> Any:
    """Fill rows up by copies of the last one, or by NaN; by NumPy, which compiles nothing."""
    x = np.asarray(x)
    last = np.full_like(x[-1:], np.nan) if with_nan else x[-1:]
    return np.concatenate([x, np.repeat(last, most - len(x), axis=0)])


@jax.jit
def _at(out: Any, places: tuple[Any, ...] | None) -> Any:
    return jnp.asarray(out)[places]


def check(
    kernel: Any, args: Any, kwargs: Any, items: int, seed: int, *, gradient: bool
) -> CheckReport:
    """Compare some items of a call with single evaluations; see ``kernel.check``."""
    site = f"{kernel.spec.name}.check"
    positive_int(items, site, "items")
    checked_int(seed, f"{site}: seed must be an int, got")
    check_bool(gradient, site, "gradient")
    # Compare items: the reduction of a sample says nothing about the reduction of all.
    kernel = kernel.with_options(**_OF_ITEMS)
    call = bind(kernel.spec, args, kwargs)
    meshes = [getattr(sharding_of(leaf), "mesh", None) for leaf in call.leaves]
    if any(AxisType.Explicit in getattr(mesh, "axis_types", ()) for mesh in meshes):
        raise TypeError(
            f"{site}: an array is on a mesh with explicit axes, where items cannot be picked; "
            "pass jax.device_get(...) of the arguments"
        )
    them = _SingleItems(call)
    chosen = _chosen(them.shape, items, np.random.default_rng(seed))
    chosen = [index for index in chosen if all(them.lengths(index))]
    differences = list[tuple[str, float, Index]]()
    for path, wants, gots in _pairs(kernel, them, chosen, seed, gradient) if chosen else ():
        want, got = (np.concatenate([np.ravel(_numbers(x)) for x in xs]) for xs in (wants, gots))
        eps = _eps(want.dtype, call.leaves)
        apart, worst = _difference(want, got)
        ends = np.cumsum([np.size(_numbers(x)) for x in wants])
        item = min(int(np.searchsorted(ends, worst, "right")), len(wants) - 1)
        at, want, got, notes = chosen[item], wants[item], gots[item], list[str]()
        if not path.startswith("output"):
            at = tuple(map(int, np.unravel_index(worst, [max(1, n) for n in want.shape])))
            want, got = want[at], got[at]
        ulps = apart / eps if eps else apart
        differences.append((path, ulps, at))
        # A chunk adds in another order, and fuses other operations.
        if apart > eps**0.5 and not (eps and apart <= _precision(kernel, call) ** 0.5):
            if path.startswith("output"):
                notes = ["the item has " + _shown(them.shown(at)), *them.leaks([at])[1]]
            raise ValueError(
                f"{site}: {path} at {list(at)} is {_text(got)}, but the kernel by itself gives "
                f"{'; '.join([f'{_text(want)} ({ulps:.3g} ulps of the largest number)', *notes])}"
            )
    differs, lines = them.leaks(chosen)
    if differs:  # also where these lengths need no padding
        first = "the items differ if they are filled up with copies of their last rows"
        advice = "leave these rows out, by a parameter of rank Mask"
        raise ValueError(f"{site}: {'; '.join([first, *lines, advice])}")
    shape, name = them.shape, kernel.spec.name
    return CheckReport(name, shape, tuple(chosen), tuple(differences), lines)


def _chosen(shape: Sequence[int], items: int, random: np.random.Generator) -> list[Index]:
    """Choose items at random, and the first and the last, which a chunk may treat differently."""
    total = math.prod(shape)
    flat = list(range(min(total, items)))
    if items < total:
        drawn = random.choice(total - 2, max(0, items - 2), replace=False)
        flat = [0, *sorted(drawn + 1), total - 1][:items]
    return [tuple(map(int, np.unravel_index(i, shape))) if shape else () for i in flat]


def _pairs(
    kernel: Any, them: _SingleItems, chosen: Sequence[Index], seed: int, gradient: bool
) -> list[tuple[str, list[Any], list[Any]]]:
    """Return each output, and the gradient of a random sum: of the items, and of the call."""
    call, random = them.call, np.random.default_rng(seed)
    floats = {i: x for i, x in them.arrays.items() if has_tangent(x)}
    others = {i: x for i, x in them.arrays.items() if i not in floats}
    whole = functools.partial(_evaluated, kernel, call)

    def item(floats: Any, others: Any, index: Index, weights: Any, lengths: Shape) -> Any:
        def total(floats: Any) -> Any:
            outs = them.evaluate(them.take({**others, **floats}, index, lengths))
            return _weighed(outs, weights), outs

        return jax.grad(total, has_aux=True)(floats) if gradient else ({}, total(floats)[1])

    # Each eager operation would be a program of its own, and round what a program need not.
    compiled = jax.jit(item, static_argnums=4)
    outs = whole(floats)
    got = them.gathered(outs, chosen)
    weights = [[random.normal(size=np.shape(x)) for x in outs] for outs in got]
    want, grads = list[Sequence[Any]](), list[dict[int, Any]]()
    for index, weight in zip(chosen, weights, strict=True):
        arguments = floats, others, index, weight, them.lengths(index)
        try:
            grad, out = compiled(*arguments)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            grad, out = item(*arguments)  # the kernel looks at the values of what items share
        want.append(out)
        grads.append(grad)
    named = leaves_with_names(outs, "output", stops=is_ragged)
    pairs = [
        (path, [outs[n] for outs in want], [outs[n] for outs in got])
        for n, (path, _) in enumerate(named)
    ]
    if gradient:
        of_call = jax.grad(lambda floats: _weighed(them.gathered(whole(floats), chosen), weights))(
            floats
        )
        alone = functools.reduce(functools.partial(jax.tree.map, jnp.add), grads)
        for i, path in enumerate(call.structure.paths):
            if i in floats:
                x, y = np.asarray(alone[i]), np.asarray(of_call[i])
                pairs.append((f"gradient of {path}", [x], [_without_lost(x, y, kernel, call)]))
    return pairs


def _evaluated(kernel: Any, call: KernelCall, floats: Mapping[int, Any]) -> Any:
    leaves = [floats.get(i, x) for i, x in enumerate(call.leaves)]
    return kernel.run(dataclasses.replace(call, leaves=leaves))


def _without_lost(want: Any, got: Any, kernel: Any, call: KernelCall) -> Any:
    """Return a gradient of a call without what other items make NaN, as in plain JAX.

    A cotangent of 0 times a derivative that is not finite is NaN.
    """
    args, kwargs = call.bound.args, call.bound.kwargs
    lost = np.isnan(got) & ~np.isnan(want)
    if lost.any() and any(
        nonfinite(kernel, args, kwargs, 1, gradient=g).count for g in (False, True)
    ):
        return np.where(lost, want, got)
    return got


@jax.jit
def _weighed(outs: Any, weights: Any) -> Any:
    """Return a weighted sum of the outputs that have derivatives."""
    pairs = zip(jax.tree.leaves(outs), jax.tree.leaves(weights), strict=True)
    terms = [jnp.real(out * w.astype(out.dtype)) for out, w in pairs if has_tangent(out)]
    dtype = jnp.result_type(float)  # some narrow floats are not promoted
    return sum((jnp.sum(term).astype(dtype) for term in terms), jnp.zeros((), dtype))


# How far results are apart, and how far rounding may put them.


def _eps(dtype: Any, leaves: Iterable[Any]) -> float:
    """Return the precision of a dtype where a call with these leaves runs; 0 of integers."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    eps = float(jnp.finfo(dtype).eps)
    # Elsewhere, products of float32 may have the precision of a shorter format.
    return eps if is_cpu(target_of(leaves)) else max(eps, 2**-10)


def _precision(kernel: Any, call: KernelCall) -> float:
    """Return the least precision of the floats that a call computes: the largest eps."""

    def dtypes(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            yield from (v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype"))
            yield from itertools.chain(*map(dtypes, subprograms(eqn)))

    floats = {i: jnp.asarray(x) for i, x in enumerate(call.leaves) if has_tangent(x)}
    jaxpr = jax.make_jaxpr(functools.partial(_evaluated, kernel, call))(floats).jaxpr
    return max((_eps(dtype, call.leaves) for dtype in dtypes(jaxpr)), default=0.0)


def _difference(want: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> tuple[float, int]:
    """Return the largest difference, as a share of the largest number, and where it is."""
    apart = np.where((want == got) | ((want != want) & (got != got)), 0, np.inf)
    if jnp.issubdtype(want.dtype, jnp.inexact):
        least = float(jnp.finfo(want.dtype).tiny)
        want, got = want.astype(complex), got.astype(complex)
        with np.errstate(invalid="ignore", over="ignore"):
            largest = np.max(np.abs(want), where=np.isfinite(want), initial=least)
            shares = np.abs(want - got) / largest
        apart = np.minimum(apart, np.nan_to_num(shares, nan=np.inf, posinf=np.inf))
    worst = int(np.argmax(apart)) if apart.size else 0
    return float(np.max(apart, initial=0)), worst


def _agree(wanted: Sequence[Any], got: Sequence[Any]) -> bool:
    """Whether outputs are equal up to rounding."""
    pairs = [(np.ravel(_numbers(x)), _numbers(y).ravel()) for x, y in zip(wanted, got, strict=True)]
    return all(_difference(x, y)[0] <= _eps(x.dtype, got) ** 0.5 for x, y in pairs)


def _numbers(value: Any) -> np.ndarray[Any, Any]:
    is_key = jnp.issubdtype(getattr(value, "dtype", type(value)), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def _text(value: Any) -> str:
    formatter: Any = dict.fromkeys(("float_kind", "complex_kind"), "{:.6g}".format)
    text = np.array2string(_numbers(value), threshold=8, separator=", ", formatter=formatter)
    return " ".join(text.split())


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {_text(value)}" for path, value in arguments.items())


def nonfinite(kernel: Any, args: Any, kwargs: Any, most: int, *, gradient: bool) -> NonFinite:
    """Count the items that are not finite, and name the first ones; see ``kernel.nonfinite``."""
    spec: KernelSpec = kernel.spec
    site = f"{spec.name}.nonfinite"
    positive_int(most, site, "most")
    check_bool(gradient, site, "gradient")
    options = spec.options()
    them = _SingleItems(bind(kernel.with_options(**_OF_ITEMS).spec, args, kwargs))
    total, count, flat = math.prod(them.shape), 0, np.zeros(0, int)
    if total:
        reduce = read_reductions(Several("sum", TopK(min(most, total))), site)
        dims = them.ragged.dims if them.ragged else ()
        odd = _is_odd(spec, dims, options.where, gradient)
        others = {"batched": False, "jit": False, "compiler_options": None, "reduce": reduce}
        odd = KernelSpec(*odd, {**options.values(), **_OF_ITEMS, **others}, spec.members)
        odd.warns_of_pairs = False
        number, first = kernel.run(bind(odd, args, kwargs))
        count = int(number)
        flat = np.asarray(first.indices)[:count]
    indices = np.stack(np.unravel_index(flat, them.shape or (1,)), -1)[:, : len(them.shape)]
    arguments = tuple(them.shown(tuple(index)) for index in indices.tolist())
    what = "gradient" if gradient else "value"
    return NonFinite(spec.name, what, them.shape, count, indices, arguments)


def _is_odd(
    spec: KernelSpec, dims: Sequence[str], where: str | int | None, gradient: bool
) -> tuple[Callable[..., jax.Array], Declaration]:
    """Return a kernel that says whether an item is not finite: a number, to be ranked.

    Its last arguments are the masks of ragged dimensions.
    """
    signature = spec.declaration.signature
    names = {f"rankax_{dim}": dim for dim in dims}
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    first = [*signature.parameters.values()]
    last = first[-1:] if any(p.kind is p.VAR_KEYWORD for p in first) else []
    first = first[: len(first) - len(last)]
    written = signature.replace(parameters=[*first, *parameters, *last])

    @functools.wraps(spec.fun)
    def is_odd(*args: Any, **kwargs: Any) -> jax.Array:
        masks = {dim: kwargs.pop(name) for name, dim in names.items()}
        call = bind(spec.unnamed, args, kwargs)
        call.masks = masks
        places = [i for i, leaf in enumerate(call.leaves) if gradient and has_tangent(leaf)]

        def of(values: list[Any]) -> tuple[list[Any], Any]:
            new = dict(zip(places, values, strict=True))
            leaves = [new.get(i, x) for i, x in enumerate(call.leaves)]
            out = call.evaluate(leaves, call.plan(Options()))
            check_outputs(spec.fun, out)
            outs = jax.tree.leaves(out)
            if masks and spec.declaration.outputs is not None:
                declared = ranks_of_output(spec.declaration.outputs, out)
                outs = [_real(x, rank, masks) for x, rank in zip(outs, declared, strict=True)]
            return [x for x in outs if has_tangent(x)], out

        outs, pull, out = jax.vjp(of, [jnp.asarray(call.leaves[i]) for i in places], has_aux=True)
        is_bad = ~_is_finite(outs)
        if gradient:
            (grads,) = pull([jnp.ones_like(x) for x in outs])
            # Nothing flows back to an item without rows.
            has_rows = {name: jnp.any(mask) for name, mask in masks.items()}
            pairs = zip(grads, (call.structure.ranks[i] for i in places), strict=True)
            is_bad = ~is_bad & ~_is_finite([_real(x, rank, has_rows) for x, rank in pairs])
        if where is not None:
            is_bad &= find_mask(out, where, dict(zip(call.paths, call.leaves, strict=True)))[1]
        return is_bad.astype(jnp.int32)

    seen = {"outputs": None, "masks": names, "written": written}
    return is_odd, dataclasses.replace(spec.declaration, **seen)


def _is_finite(leaves: Sequence[Any]) -> jax.Array:
    each = [jnp.all(jnp.isfinite(x)) for x in leaves if has_tangent(x)]
    return functools.reduce(jnp.logical_and, each, jnp.bool_(True))


def _real(x: Any, rank: Rank | None, masks: Mapping[str, Any]) -> Any:
    """Return zeros in place of rows that fill a ragged item up."""
    name = rank.dims[0].name if rank is not None and rank.dims else None
    if name is None or (mask := masks.get(name)) is None:
        return x
    return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
