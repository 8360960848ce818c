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

from rankax._base.checks import check_bool, checked_int, positive_int
from rankax._base.trees import check_outputs, leaves_with_names
from rankax._call.arguments import KernelSpec, rebind_arguments
from rankax._call.bind import BoundKernel, bind
from rankax._call.run import run
from rankax._declare.ranks import Declaration
from rankax._loop.keys import PLACE
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
    them = _CallItems(bind(mapped.spec, args, kwargs), mapped.spec.options())
    random = np.random.default_rng(seed)
    chosen = choose_items(them.shape, items, random)
    if not chosen:
        return CheckReport(spec.name, them.shape, (), ())
    one = jax.jit(them.evaluate)
    by_item = [one(them.inputs(index)) for index in chosen]
    wanted = [jnp.stack(outs) for outs in zip(*by_item, strict=True)]
    whole = mapped(*args, **kwargs)
    names = [path for path, _ in leaves_with_names(whole, "output")]
    differences: list[tuple[str, float, Index]] = []
    for path, want, got in zip(names, wanted, them.gathered(whole, chosen), strict=True):
        ulps, (number, *_) = difference(want, got)
        index = chosen[number]
        differences.append((path, ulps, index))
        if ulps > most_ulps(want.dtype):
            item = f"; the item has {_shown(them.arguments(index))}"
            raise disagreement(site, path, index, ulps, want[number], got[number], item)
    if gradient:
        draws = [random.normal(size=want.shape) for want in wanted]
        differences += _gradients(mapped, them, chosen, draws, site)
    return CheckReport(spec.name, them.shape, tuple(chosen), tuple(differences))


def choose_items(shape: Sequence[int], items: int, random: np.random.Generator) -> list[Index]:
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
    floats = [i for i, leaf in enumerate(call.leaves) if has_gradient(leaf)]

    def weighed(outs: Sequence[Any], weights: Sequence[Any]) -> Any:
        pairs = zip(outs, weights, strict=True)
        terms = [jnp.real(out * w.astype(out.dtype)) for out, w in pairs if has_gradient(out)]
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
        ulps, place = difference(want, got[i])
        yield path, ulps, place
        if ulps > most_ulps(want.dtype):
            raise disagreement(site, path, place, ulps, want[place], got[i][place])


def _others_are_odd(kernel: Any, call: BoundKernel) -> bool:
    given = call.arguments
    return any(
        nonfinite(kernel, given.args, given.kwargs, 1, gradient=gradient).count
        for gradient in (False, True)
    )


def has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact)


def _eps(dtype: Any) -> float:
    eps = float(jnp.finfo(dtype).eps)
    # Elsewhere, products of float32 may have the precision of a shorter format.
    return eps if jax.default_backend() == "cpu" else max(eps, 2**-10)


def most_ulps(dtype: Any) -> float:
    """Return what may be rounding: a chunk adds in another order, and fuses other operations."""
    return _eps(dtype) ** -0.5 if jnp.issubdtype(dtype, jnp.inexact) else 0


def difference(want: Any, got: Any) -> tuple[float, Index]:
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


def disagreement(
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
        leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if has_gradient(x)]
        return functools.reduce(jnp.logical_and, leaves, jnp.bool_(True))

    @functools.wraps(spec.fun)
    def is_odd(*args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        arguments = declaration.signature.bind(*args, **kwargs)
        ranked = {n: v for n, v in arguments.arguments.items() if n in declaration.ranks}
        leaves, tree = jax.tree.flatten(ranked)
        places = [i for i, leaf in enumerate(leaves) if gradient and has_gradient(leaf)]

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
            return [x for x in jax.tree.leaves(out) if has_gradient(x)], out

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
