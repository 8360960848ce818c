# SPDX-License-Identifier: MIT
"""``kernel.check`` and ``kernel.nonfinite``: two tests of a call, item by item.

`check` evaluates some items by themselves and compares them with those of the call. `nonfinite`
maps a kernel that returns whether an item is NaN or infinite, and reduces its outputs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax._base.checks import check_bool, checked_int, positive_int
from rankax._base.trees import check_outputs, leaves_with_names
from rankax._base.words import listed
from rankax._call.arguments import KernelSpec, rebind_arguments
from rankax._call.bind import BoundKernel, bind, rebind
from rankax._call.ragged import RaggedCall
from rankax._call.run import run
from rankax._declare.ragged import Ragged
from rankax._declare.ranks import Declaration
from rankax._loop.keys import PLACE, item_key
from rankax._options import Options
from rankax._reduce.run import find_mask, read_reductions
from rankax._reduce.winners import TopK

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
        Which ragged arguments the items would depend on if they were filled up with other numbers
        than copies, and with which. The results are right all the same.
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
        The batch indices of the first of them, one row an item.
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


class _CallItems:
    """The items of a bound call."""

    def __init__(self, call: BoundKernel, options: Options) -> None:
        self.call, self.plan = call, call.plan(options.unchunked)
        self.shape = self.plan.plan.batch_shape

    def window(self, leaf: int, index: Index) -> tuple[Any, ...]:
        """Return where a leaf has what an item takes of it."""
        window: list[Any] = [slice(None)] * len(np.shape(self.call.leaves[leaf]))
        if leaf in self.plan.mapped:
            axes = self.plan.batch_axes[self.plan.mapped.index(leaf)]
            for axis, place in zip(axes, index, strict=True):
                if axis is not None:
                    window[axis] = place
        return tuple(window)

    def inputs(self, index: Index) -> list[Any]:
        """Return the item of each mapped leaf, then its numbers for keys that are split."""
        pairs = zip(self.plan.mapped, self.plan.cores, strict=True)
        items = [
            jnp.reshape(jnp.asarray(self.call.leaves[i])[self.window(i, index)], core)
            for i, core in pairs
        ]
        numbers = [sum(map(int.__mul__, s.strides, index)) for s in self.plan.splits]
        return [*items, *(jnp.asarray(number, PLACE.dtype) for number in numbers)]

    def arguments(self, index: Index) -> dict[str, Any]:
        """Return what an item is evaluated from, by path."""
        own = dict(zip(self.plan.mapped, self.inputs(index), strict=False))
        paths = self.call.structure.paths
        return {path: own.get(i, self.call.leaves[i]) for i, path in enumerate(paths)}

    def evaluate(self, inputs: Sequence[Any], others: Mapping[int, Any] | None = None) -> list[Any]:
        """Evaluate one item; ``others`` take the places of leaves that are not mapped."""
        leaves = [(others or {}).get(i, leaf) for i, leaf in enumerate(self.call.leaves)]
        item = dataclasses.replace(self.call, leaves=leaves).on_item(self.plan)
        return jax.tree.leaves(item(*inputs))

    def gathered(self, outs: Any, chosen: Sequence[Index]) -> list[Any]:
        """Return the chosen items of the outputs of a call, on axis 0."""
        places = tuple(np.array(chosen).T) if self.shape else None
        return [out[places] for out in jax.tree.leaves(outs)]


def check(
    kernel: Any, args: Any, kwargs: Any, items: int, seed: int, *, gradient: bool
) -> CheckReport:
    """Compare some items of a call with the kernel by itself; see ``kernel.check``."""
    spec: KernelSpec = kernel.spec
    site = f"{spec.name}.check"
    positive_int(items, site, "items")
    checked_int(seed, f"{site}: seed must be an int, got")
    check_bool(gradient, site, "gradient")
    # The items themselves, since a reduction of some of them says nothing about that of all.
    mapped = kernel.with_options(reduce=None, reduce_axis=None, where=None)
    call = bind(mapped.spec, args, kwargs, takes_ragged=True)
    random = np.random.default_rng(seed)
    if call.structure.ragged:
        ragged = _RaggedItems(RaggedCall.of(call, None), mapped, site)
        return _check_ragged(ragged, items, random, gradient=gradient)
    them = _CallItems(call, mapped.spec.options())
    chosen = _chosen(them.shape, items, random)
    if not chosen:
        return CheckReport(spec.name, them.shape, (), ())
    one = jax.jit(them.evaluate)
    by_item = [one(them.inputs(index)) for index in chosen]
    wanted = [jnp.stack(outs) for outs in zip(*by_item, strict=True)]
    whole = mapped(*args, **kwargs)
    names = [path for path, _ in leaves_with_names(whole, "output")]
    differences: list[tuple[str, float, Index]] = []
    for path, want, got in zip(names, wanted, them.gathered(whole, chosen), strict=True):
        ulps, (number, *_) = _difference(want, got)
        index = chosen[number]
        differences.append((path, ulps, index))
        if ulps > _most_ulps(want.dtype):
            item = f"; the item has {_shown(them.arguments(index))}"
            raise _disagreement(site, path, index, ulps, want[number], got[number], item)
    if gradient:
        draws = [random.normal(size=want.shape) for want in wanted]
        differences += _gradients(mapped, them, chosen, draws, site)
    return CheckReport(spec.name, them.shape, tuple(chosen), tuple(differences))


def _chosen(shape: Sequence[int], items: int, random: np.random.Generator) -> list[Index]:
    """Choose items at random, and the first and the last, which a chunk may treat differently."""
    total = math.prod(shape)
    flat = list(range(min(total, items)))
    if items < total:
        drawn = random.choice(total - 2, max(0, items - 2), replace=False)
        flat = [0, *sorted(drawn + 1), total - 1][:items]
    return [tuple(map(int, np.unravel_index(i, shape))) if shape else () for i in flat]


def _gradients(
    kernel: Any, them: _CallItems, chosen: Sequence[Index], draws: Sequence[Any], site: str
) -> Iterator[tuple[str, float, Index]]:
    """Compare the gradient of a random sum of the chosen items with the sum of their own."""
    call, mapped = them.call, them.plan.mapped
    floats = [i for i, leaf in enumerate(call.leaves) if _has_gradient(leaf)]

    def weighed(outs: Sequence[Any], weights: Sequence[Any]) -> Any:
        pairs = zip(outs, weights, strict=True)
        terms = [jnp.real(out * w.astype(out.dtype)) for out, w in pairs if _has_gradient(out)]
        return sum(map(jnp.sum, terms), jnp.zeros(()))

    def of_call(values: Mapping[int, Any]) -> Any:
        leaves = [values.get(i, leaf) for i, leaf in enumerate(call.leaves)]
        named = dict(zip(call.names, call.treedef.unflatten(leaves), strict=True))
        given = rebind_arguments(kernel.spec, {**call.arguments.arguments, **named})
        return weighed(them.gathered(kernel(*given.args, **given.kwargs), chosen), draws)

    got = jax.grad(of_call)({i: jnp.asarray(call.leaves[i]) for i in floats})
    wanted = {i: np.zeros(grad.shape, grad.dtype) for i, grad in got.items()}
    for number, index in enumerate(chosen):
        inputs = them.inputs(index)

        def of_item(values: Mapping[int, Any], inputs: Any = inputs, number: int = number) -> Any:
            own = [values.get(i, item) for i, item in zip(mapped, inputs, strict=False)]
            outs = them.evaluate([*own, *inputs[len(mapped) :]], values)
            return weighed(outs, [draw[number] for draw in draws])

        items = dict(zip(mapped, inputs, strict=False))
        own = jax.grad(of_item)({i: items.get(i, jnp.asarray(call.leaves[i])) for i in floats})
        for i in floats:
            window = them.window(i, index)
            wanted[i][window] += np.reshape(own[i], wanted[i][window].shape)
    lost = {i: jnp.isnan(got[i]) & ~jnp.isnan(wanted[i]) for i in floats}
    if any(map(jnp.any, lost.values())) and _others_are_odd(kernel, call):
        # A cotangent of 0 times a derivative that is not finite is NaN, as in plain JAX.
        got = {i: jnp.where(lost[i], wanted[i], got[i]) for i in floats}
    for i in floats:
        path, want = f"gradient of {call.structure.paths[i]}", jnp.asarray(wanted[i])
        ulps, place = _difference(want, got[i])
        yield path, ulps, place
        if ulps > _most_ulps(want.dtype):
            raise _disagreement(site, path, place, ulps, want[place], got[i][place])


def _others_are_odd(kernel: Any, call: BoundKernel) -> bool:
    given = call.arguments
    return any(
        nonfinite(kernel, given.args, given.kwargs, 1, gradient=gradient).count
        for gradient in (False, True)
    )


def _has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact)


def _eps(dtype: Any) -> float:
    eps = float(jnp.finfo(dtype).eps)
    # Elsewhere, products of float32 may have the precision of a shorter format.
    return eps if jax.default_backend() == "cpu" else max(eps, 2**-10)


def _most_ulps(dtype: Any) -> float:
    """Return what may be rounding: a chunk adds in another order, and fuses other operations."""
    return _eps(dtype) ** -0.5 if jnp.issubdtype(dtype, jnp.inexact) else 0


def _difference(want: Any, got: Any) -> tuple[float, Index]:
    """Return the largest difference, in ulps of the largest number, and where it is."""
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        want, got = jax.random.key_data(want), jax.random.key_data(got)
    if not want.size:
        return 0.0, (0,) * max(1, want.ndim)
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        apart = jnp.where(want == got, 0, jnp.inf)
    else:
        largest = jnp.max(jnp.abs(jnp.where(jnp.isfinite(want), want, 0)))
        ulp = _eps(want.dtype) * jnp.maximum(largest, jnp.finfo(want.dtype).tiny)
        same = (want == got) | (jnp.isnan(want) & jnp.isnan(got))
        apart = jnp.where(same, 0, jnp.abs(want - got) / ulp)
        apart = jnp.where(jnp.isnan(apart), jnp.inf, apart)
    where = jnp.unravel_index(jnp.argmax(apart), want.shape)
    return float(jnp.max(apart)), tuple(map(int, where))


def _disagreement(
    site: str, path: str, at: Index, ulps: float, want: Any, got: Any, item: str = ""
) -> ValueError:
    return ValueError(
        f"{site}: {path} at {list(at)} is {_text(got)}, but the kernel by itself gives "
        f"{_text(want)} ({ulps:.3g} ulps of the largest number){item}"
    )


def _text(value: Any) -> str:
    if jnp.issubdtype(getattr(value, "dtype", type(value)), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    formatter: Any = dict.fromkeys(("float_kind", "complex_kind"), "{:.6g}".format)
    text = np.array2string(np.asarray(value), threshold=8, separator=", ", formatter=formatter)
    return " ".join(text.split())


def _shown(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{path} = {_text(value)}" for path, value in arguments.items())


def nonfinite(kernel: Any, args: Any, kwargs: Any, most: int, *, gradient: bool) -> NonFinite:
    """Count the items that are not finite, and name the first ones; see ``kernel.nonfinite``."""
    spec: KernelSpec = kernel.spec
    site = f"{spec.name}.nonfinite"
    positive_int(most, site, "most")
    check_bool(gradient, site, "gradient")
    own = {"reduce", "reduce_axis", "where", "bucket", "jit", "compiler_options", "batched"}
    explicit = {name: value for name, value in spec.explicit.items() if name not in own}
    call = bind(spec, args, kwargs)
    them = _CallItems(call, dataclasses.replace(spec.preset, reduce=None, where=None))
    what, total = "gradient" if gradient else "value", math.prod(them.shape)
    if not total:
        none = np.zeros((0, len(them.shape)), int)
        return NonFinite(spec.name, what, them.shape, 0, none, ())
    reduce = read_reductions({"count": "sum", "first": TopK(min(most, total))}, site)
    declaration = dataclasses.replace(spec.declaration, outputs=None)
    explicit["reduce"] = reduce
    odd = KernelSpec(_is_odd(spec, gradient), declaration, explicit, spec.members)
    found = run(bind(odd, args, kwargs), odd.options())
    count = int(found["count"])
    flat = np.asarray(found["first"].indices)[:count]
    indices = np.stack(np.unravel_index(flat, them.shape or (1,)), -1)[:, : len(them.shape)]
    arguments = tuple(them.arguments(tuple(index)) for index in indices.tolist())
    return NonFinite(spec.name, what, them.shape, count, indices, arguments)


def _is_odd(spec: KernelSpec, gradient: bool) -> Callable[..., dict[str, jax.Array]]:
    """Return a kernel that says whether an item is not finite: as a number, and to be ranked."""
    declaration: Declaration = spec.declaration
    mask = spec.options().where

    def is_finite(tree: Any) -> jax.Array:
        leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if _has_gradient(x)]
        return functools.reduce(jnp.logical_and, leaves, jnp.bool_(True))

    @functools.wraps(spec.fun)
    def is_odd(*args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        arguments = declaration.signature.bind(*args, **kwargs)
        ranked = {n: v for n, v in arguments.arguments.items() if n in declaration.ranks}
        leaves, tree = jax.tree.flatten(ranked)
        places = [i for i, leaf in enumerate(leaves) if gradient and _has_gradient(leaf)]

        def of(values: list[Any]) -> tuple[list[Any], Any]:
            whole = list(leaves)
            for i, value in zip(places, values, strict=True):
                whole[i] = value
            given = rebind_arguments(spec, {**arguments.arguments, **tree.unflatten(whole)})
            if spec.preset.batched:
                out = run(bind(spec, given.args, given.kwargs), Options())
            else:
                out = spec.fun(*given.args, **given.kwargs)
            check_outputs(spec.fun, out)
            return [x for x in jax.tree.leaves(out) if _has_gradient(x)], out

        values = [jnp.asarray(leaves[i]) for i in places]
        if gradient:
            outs, pull, out = jax.vjp(of, values, has_aux=True)
            is_bad = is_finite(outs) & ~is_finite(pull([jnp.ones_like(x) for x in outs]))
        else:
            out = of(values)[1]
            is_bad = ~is_finite(out)
        if mask is not None:
            is_bad &= find_mask(out, mask)[1]
        return {"count": is_bad.astype(jnp.int32), "first": is_bad.astype(jnp.int32)}

    return is_odd


# Ragged items: each is evaluated with its own rows only, and filled up in other ways.

_FILLS = {"large numbers": 1e6, "NaN": np.nan}


@dataclasses.dataclass(frozen=True, eq=False)
class _RaggedItems:
    """The items of a call with ragged arguments."""

    ragged: RaggedCall
    mapped: Any
    site: str

    @property
    def shape(self) -> Index:
        return self.ragged.dense.plan.batch_shape

    def number(self, index: Index) -> int:
        return index[-1] if self.ragged.count > 1 else 0

    def lengths(self, index: Index) -> list[int]:
        return self.ragged.lengths[self.number(index)].tolist()

    def leaves(self, index: Index, values: Mapping[int, Any]) -> list[Any]:
        """Return the leaves of one item, with its own rows; ``values`` take the place of leaves."""
        call, plan, number = self.ragged.call, self.ragged.dense, self.number(index)
        axes = dict(zip(plan.mapped, plan.batch_axes, strict=True))
        leaves: list[Any] = []
        for i, leaf in enumerate(call.leaves):
            leaf = values.get(i, leaf)
            if (ragged := call.structure.ragged.get(i)) is not None:
                begin = int(ragged.starts[number])
                leaf = jnp.asarray(leaf)[begin : begin + int(ragged.lengths[number])]
            elif call.structure.ranks[i] is not None:
                leaf = jnp.asarray(leaf)
                for axis, place in zip(axes.get(i, ()), index, strict=False):
                    if axis is not None:
                        leaf = lax.slice_in_dim(leaf, place, place + 1, axis=axis)
                rank = call.structure.ranks[i].rank
                leaf = jnp.reshape(leaf, leaf.shape[leaf.ndim - rank :])
            leaves.append(leaf)
        for split in plan.splits:
            number = sum(map(int.__mul__, split.strides, index))
            leaves[split.position] = item_key(leaves[split.position], np.uint32(number))
        return leaves

    def filled(self, leaves: Sequence[Any], most: Sequence[int], fills: Mapping[int, Any]) -> Any:
        """Return leaves filled up to these lengths: by copies, or by a number."""
        filled = list(leaves)
        for i in self.ragged.call.structure.ragged:
            rows, more = leaves[i], most[self.ragged.dims.index(self._dim(i))] - len(leaves[i])
            last = rows[-1:] if len(rows) else jnp.zeros((1, *rows.shape[1:]), rows.dtype)
            if fills.get(i) is not None and _has_gradient(rows):
                last = jnp.full_like(last, fills[i])
            filled[i] = jnp.concatenate([rows, jnp.repeat(last, more, axis=0)])
        return filled

    def _dim(self, i: int) -> str:
        rank: Any = self.ragged.call.structure.ranks[i]
        return rank.dims[0].name

    def evaluate(self, leaves: Sequence[Any], lengths: Any) -> list[Any]:
        """Evaluate one item of which as many rows are real."""
        call = self.ragged.call
        values = [
            jax.tree.map(lambda x: x.values if isinstance(x, Ragged) else x, value, is_leaf=_is)
            for value in call.treedef.unflatten(leaves)
        ]
        flat, treedef = jax.tree.flatten(values)
        one = rebind(call.kernel, call.names, flat, treedef, call.others)
        most = {self._dim(i): len(leaves[i]) for i in call.structure.ragged}
        masks = {
            name: jnp.arange(most[name]) < length
            for name, length in zip(self.ragged.dims, lengths, strict=True)
        }
        one = dataclasses.replace(one, masks=masks)
        return jax.tree.leaves(one.evaluate(flat, one.plan(Options())))

    def gathered(self, out: Any, index: Index) -> list[Any]:
        """Return one item of the outputs of the call."""
        outs: list[Any] = []
        for leaf in jax.tree.leaves(out, is_leaf=_is):
            if _is(leaf):
                begin = int(leaf.starts[index[-1]])
                outs.append(leaf.values[begin : begin + int(leaf.lengths[index[-1]])])
            else:
                outs.append(leaf[index])
        return outs


def _is(node: Any) -> bool:
    return isinstance(node, Ragged)


def _check_ragged(
    them: _RaggedItems, items: int, random: np.random.Generator, *, gradient: bool
) -> CheckReport:
    call, given = them.ragged.call, them.ragged.call.arguments
    chosen = [i for i in _chosen(them.shape, items, random) if min(them.lengths(i), default=1)]
    name = call.kernel.name
    if not chosen:
        return CheckReport(name, them.shape, (), ())
    out = them.mapped(*given.args, **given.kwargs)
    names = [path for path, _ in leaves_with_names(out, "output", stops=_is)]
    exact = jax.jit(them.evaluate)
    most = np.max([them.lengths(index) for index in chosen], 0) + 3
    worst: dict[str, tuple[float, Index]] = {}
    leaks: dict[tuple[int | None, str], None] = {}
    for index in chosen:
        leaves = them.leaves(index, {})
        wanted = exact(leaves, them.lengths(index))
        lengths = them.lengths(index)
        copies = _cut(wanted, exact(them.filled(leaves, most, {}), lengths))
        if not _agree(wanted, copies):
            leaks[None, "copies"] = None
        for i in call.structure.ragged:
            for fill, number in _FILLS.items():
                padded = exact(them.filled(leaves, most, {i: number}), lengths)
                if not _agree(copies, _cut(wanted, padded)):
                    leaks[i, fill] = None
        for path, want, got in zip(names, wanted, them.gathered(out, index), strict=True):
            ulps, _ = _difference(want, got)
            worst[path] = max(worst.get(path, (-1.0, index)), (ulps, index))
            if ulps > _most_ulps(want.dtype):
                raise _disagreement(them.site, path, index, ulps, want, got, _hint(call, leaks))
    if (None, "copies") in leaks:  # also where these lengths need no padding
        raise ValueError(
            f"{them.site}: the items differ if they are filled up with copies of their last rows"
            f"{_hint(call, leaks)}; leave these rows out, by a parameter of rank Mask"
        )
    differences = [(path, *found) for path, found in worst.items()]
    if gradient:
        differences += _gradients_ragged(them, chosen)
    lines = tuple(_leak_lines(call, leaks))
    return CheckReport(name, them.shape, tuple(chosen), tuple(differences), lines)


def _cut(wanted: Sequence[Any], padded: Sequence[Any]) -> list[Any]:
    """Return outputs without the rows that fill them up."""
    pairs = zip(wanted, padded, strict=True)
    return [y if x.shape == y.shape else y[: len(x)] for x, y in pairs]


def _agree(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    """Whether outputs are equal up to rounding."""
    pairs = zip(wanted, found, strict=True)
    return all(_difference(x, y)[0] <= _most_ulps(x.dtype) for x, y in pairs)


def _hint(call: BoundKernel, leaks: Mapping[tuple[int | None, str], None]) -> str:
    lines = _leak_lines(call, leaks)
    return f"; {'; '.join(lines)}" if lines else ""


def _leak_lines(call: BoundKernel, leaks: Mapping[tuple[int | None, str], None]) -> list[str]:
    return [
        f"the items depend on the rows that fill {path} up: by {listed(fills)}"
        for i, path in enumerate(call.structure.paths)
        if (fills := [fill for fill in _FILLS if (i, fill) in leaks])
    ]


def _gradients_ragged(
    them: _RaggedItems, chosen: Sequence[Index]
) -> Iterator[tuple[str, float, Index]]:
    """Compare the gradient of a random sum of the chosen items with that of them by themselves."""
    call = them.ragged.call
    floats = [i for i, leaf in enumerate(call.leaves) if _has_gradient(leaf)]

    def weighed(outs: Sequence[Any], number: int) -> Any:
        draw = np.random.default_rng(number)
        floating = [out for out in outs if _has_gradient(out)]
        terms = [jnp.sum(jnp.real(x * draw.normal(size=x.shape).astype(x.dtype))) for x in floating]
        return sum(terms, jnp.zeros(()))

    def of_call(values: Mapping[int, Any]) -> Any:
        leaves = [values.get(i, leaf) for i, leaf in enumerate(call.leaves)]
        named = dict(zip(call.names, call.treedef.unflatten(leaves), strict=True))
        given = rebind_arguments(call.kernel, {**call.arguments.arguments, **named})
        out = them.mapped(*given.args, **given.kwargs)
        return sum(weighed(them.gathered(out, index), n) for n, index in enumerate(chosen))

    def of_items(values: Mapping[int, Any]) -> Any:
        outs = [them.evaluate(them.leaves(index, values), them.lengths(index)) for index in chosen]
        return sum(weighed(out, n) for n, out in enumerate(outs))

    at = {i: jnp.asarray(call.leaves[i]) for i in floats}
    got, wanted = jax.grad(of_call)(at), jax.grad(of_items)(at)
    for i in floats:
        path = f"gradient of {call.structure.paths[i]}"
        ulps, place = _difference(wanted[i], got[i])
        yield path, ulps, place
        if ulps > _most_ulps(wanted[i].dtype):
            raise _disagreement(them.site, path, place, ulps, wanted[i][place], got[i][place])
