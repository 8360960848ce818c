# SPDX-License-Identifier: MIT
"""Random programs: a kernel drawn from `STEPS`, called by rankax under a drawn transformation.

`draw` makes a `Program` of a seed, and `Program.check` compares it with plain JAX. A program prints
itself as the Python that makes it, so that what fails can be pasted. `README.md` says how to run
many, and what they found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax import (
    Mask,
    Ragged,
    SplitKey,
    auto_vmap,
    checkpoint_chunked_scan,
    chunked_vmap,
    options,
    sliced_scan,
)

Item = dict[str, Any]

# The leaves that an item may have, and their ranks: a real scalar and vector, always; a complex
# vector; a narrow vector; an int8; an int32; a key; rows, and a vector of another length, both of
# ragged items only. `w`, (3, k), is closed over.
RANKS = {"s": 0, "v": 1, "c": 1, "h": 1, "b": 0, "i": 0, "key": 0, "r": 2, "e": 1}
# The dimensions of ragged items, each with its mask.
ROWS = {"v": "n", "c": "n", "h": "n", "r": "n k", "e": "m"}
MASKS = {"mask": "n", "others": "m"}


# The kernel: a chain of steps. Each takes those leaves of the item that its parameters name, and
# `w`, and returns what it changes. All are smooth but on sets that no draw meets, and keep the
# values near 1, so that a difference is not one of rounding.


def solved(v, w):
    matrix = jnp.eye(v.size, dtype=w.dtype) + 0.1 * w.T @ w
    return {"v": jnp.linalg.solve(matrix, v)}


def turned(v, c):
    c = c * lax.complex(jnp.cos(v), jnp.sin(v))
    return {"c": c / 2, "s": jnp.tanh(jnp.sum(jnp.real(c * c)))}


def noise(s, v, key):
    key, use = jax.random.split(key)
    return {"key": key, "v": v + jax.random.normal(use, v.shape, v.dtype) * s}


def folded_noise(s, key, i):
    use = jax.random.fold_in(key, i)
    return {"s": s * jax.random.uniform(use, (), s.dtype, minval=0.5)}


def scanned(s, v):
    s, v = lax.scan(lambda a, b: (jnp.sin(a) * b + 0.1, a * b), s, v)
    return {"s": s, "v": v}


def scanned_back(s, v, w):
    v, means = lax.scan(
        lambda a, b: (jnp.tanh(a * jnp.sum(b)), jnp.mean(a)), v, w, reverse=True, unroll=2
    )
    return {"v": v, "s": s * means[0]}


def one_of(s, v, i):
    branches = [lambda v, s: v * s, lambda v, s: jnp.cumsum(v) / 2, lambda v, s: jnp.cos(v + s)]
    return {"v": lax.switch(i % 3, branches, v, s)}


def scanned_choice(s, v):
    def body(a, b):
        return lax.cond(a > 0.3, lambda a: jnp.sin(a) * b, lambda a: a * a + 0.2, a), a

    s, v = lax.scan(body, s, v)
    return {"s": s, "v": v}


# Custom rules. They say what the derivative is, or, in `RULES`, a quarter more, to be seen.


def _with_jvp(factor: float) -> Callable[[jax.Array], jax.Array]:
    fun = jax.custom_jvp(lambda x: jnp.sin(x) * x)

    @fun.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return fun(x), t * (jnp.cos(x) * x + jnp.sin(x)) * factor

    return fun


def _with_vjp(factor: float) -> Callable[[jax.Array], jax.Array]:
    fun = jax.custom_vjp(lambda x: jnp.sin(x) * x)
    fun.defvjp(lambda x: (fun(x), x), lambda x, t: (t * (jnp.cos(x) * x + jnp.sin(x)) * factor,))
    return fun


Step = Callable[..., Item]
USUAL: dict[str, Step] = {
    "sine": lambda s, v: {"v": jnp.sin(v) * s + v},
    "product": lambda s, v: {"v": jnp.tanh(v * v * s), "s": jnp.cos(s)},
    "choice": lambda s, v: {"v": jnp.where(v > s, v * s, jnp.maximum(v, 0.1))},
    "logsumexp": lambda s, v: {"s": jax.nn.logsumexp(v * s)},
    "softmax": lambda s, v: {"v": jax.nn.softmax(v + s) + v},
    "maximum": lambda v: {"s": jnp.max(v) * 0.5, "v": v - jnp.mean(v)},
    "norm": lambda v: {"s": jnp.sqrt(jnp.sum(v**2) + 0.5)},
    "prefix_sums": lambda s, v: {"v": jnp.tanh(jnp.cumsum(v) * s)},
    "prefix_products": lambda v: {"v": jnp.cumprod(jnp.cos(v)) + v},
    "ordered": lambda v: {"v": jnp.sort(v) * jnp.arange(1, 1 + v.size, dtype=v.dtype) / 3},
    "stopped": lambda s, v: {
        "v": v * lax.stop_gradient(jnp.cos(v)),
        "s": s + lax.stop_gradient(v[0]),
    },
    "rolled": lambda s, v: {"v": jnp.concatenate([v[1:], s[None]])},
    "contracted": lambda v, w: {"v": jnp.tanh(w.T @ (w @ v))},
    "solved": solved,
    "looked_up": lambda v, i, w: {"v": v * w[i % 3], "i": i + 1},
    "gathered": lambda s, v, i: {"s": s * 0.5 + v[i % v.size]},
    "scattered": lambda s, v, i: {"v": v.at[i % v.size].add(jnp.sin(s))},
    "largest": lambda v, i: {"i": jnp.argmax(v).astype(jnp.int32) + i},
    "narrow_integer": lambda s, b: {"s": s + b.astype(s.dtype) / 7, "b": b * 3 % 5},
    "narrow_float": lambda v, h: {"v": v * jnp.cos(h.astype(v.dtype)), "h": v.astype(h.dtype)},
    "turned": turned,
    "noise": noise,
    "folded_noise": folded_noise,
    "scanned": scanned,
    "scanned_back": scanned_back,
    "looped": lambda s, v, w: {"v": lax.fori_loop(0, 3, lambda n, v: jnp.sin(v) * w[n] + s, v)},
    "either": lambda s, v, w: {"v": lax.cond(s > 0.2, jnp.sin, lambda v: v * w[0], v)},
    "one_of": one_of,
    "scanned_choice": scanned_choice,
    "remembered": jax.checkpoint(lambda s, v: {"s": jnp.tanh(s * v[0]), "v": jnp.sin(v) * s}),
    "compiled": lambda v, w: {"v": jax.jit(lambda v, w: jnp.tanh(v * w[1]))(v, w)},
    "jvp_rule": lambda v: {"v": _with_jvp(1.0)(v)},
    "vjp_rule": lambda v: {"v": _with_vjp(1.0)(v)},
}
RULES: dict[str, Step] = {
    "other_jvp_rule": lambda v: {"v": _with_jvp(1.25)(v)},
    "other_vjp_rule": lambda s: {"s": _with_vjp(1.25)(s)},
}


# Loops that each item ends by itself. Plain JAX has no reverse mode of them; where it is asked for
# one, it makes as many steps as any item may need, and keeps what the last one of each item left.

IS_BOUNDED = False


def loop(cond: Any, body: Any, init: Any, most: int) -> Any:
    """Run a `lax.while_loop` of at most so many steps."""
    if not IS_BOUNDED:
        return lax.while_loop(cond, body, init)

    def turn(state: Any, _: None) -> tuple[Any, None]:
        goes_on = cond(state)
        return jax.tree.map(functools.partial(jnp.where, goes_on), body(state), state), None

    return lax.scan(turn, init, None, most)[0]


def times(n: jax.Array, body: Any, init: Any, most: int) -> Any:
    """Run a `lax.fori_loop` from 0 to n."""
    if not IS_BOUNDED:
        return lax.fori_loop(0, n, body, init)
    state = jnp.zeros_like(n), init
    return loop(lambda s: s[0] < n, lambda s: (s[0] + 1, body(*s)), state, most)[1]


def until_small(v, w):
    turned = jnp.tanh(w[0])  # else some would never end
    return {"v": loop(lambda v: v @ v > 0.5, lambda v: jnp.sin(v * turned) * 0.9, v, 12) + v}


def some_times(s, v, i):
    def body(n, state):
        s, v = state
        return lax.cond(s > n.astype(s.dtype) / 9, jnp.cos, lambda s: s * v[0], s), v * s

    s, v = times(i % 5, body, (s, v), 4)
    return {"s": jnp.tanh(s), "v": jnp.tanh(v / 16)}  # not 1, which rounding makes of some only


def many_times(s, i, w):  # more than the 32 carries that a reverse pass stores
    drift = jnp.tanh(w[0, 0]) / 50
    return {"s": times(i % 7 * 9, lambda n, s: jnp.sin(s) * 0.98 + drift, s, 54)}


def nested_times(s, i, w):
    def outer(n, s):
        s = loop(lambda s: s * s > 0.1, lambda s: s * (0.7 + 0.1 * jnp.cos(s)), s, 24)
        return s + jnp.tanh(w[0, 0]) + n.astype(s.dtype) / 3

    return {"s": times(i % 4, outer, jnp.tanh(s) * 2, 3)}


def times_in_a_scan(s, v, i):
    def body(s, a):
        return times(i % 4, lambda n, s: jnp.sin(s * a) + 0.1, s, 3), s * a

    s, v = lax.scan(body, s, v)
    return {"s": s, "v": v}


def named(*steps: Step) -> dict[str, Step]:
    return {step.__name__: step for step in steps}


ENDS = named(until_small, some_times, many_times, nested_times, times_in_a_scan)


# Items of unlike length: no step depends on how many rows `mask` leaves out, or on what they hold.


def row_mean(s, v, mask):
    count = jnp.maximum(jnp.sum(mask), 1).astype(v.dtype)
    mean = jnp.sum(v, where=mask) / count
    return {"v": v - mean, "s": s / 2 + mean}


def row_maximum(s, v, mask):
    # Of no rows, the derivative of `jnp.max` is 0 / 0.
    rows = jnp.where(mask, v, jnp.full_like(v, -1))
    return {"s": s / 2 + jnp.max(jnp.concatenate([rows, jnp.full((1,), -1, v.dtype)])) / 2}


def row_pairs(v, mask):
    pairs = jnp.sin(v[:, None] - v[None])
    return {"v": v + jnp.sum(pairs, 1, where=mask[None]) / 4}


def row_scan(s, v, mask):
    def body(a, row):
        v, is_real = row
        return jnp.where(is_real, jnp.sin(a) * v + 0.1, a), a * v

    s, v = lax.scan(body, s, (v, mask))
    return {"s": s, "v": v}


def row_turns(v, c, mask):
    c = c * lax.complex(jnp.cos(v), jnp.sin(v))
    return {"c": c / 2, "s": jnp.tanh(jnp.sum(jnp.real(c * c), where=mask))}


def until_rows_end(s, v, mask):
    count, places = jnp.sum(mask, dtype=jnp.int32), jnp.arange(v.size, dtype=jnp.int32)

    def body(state):
        n, s = state
        return n + 1, jnp.sin(s) + jnp.sum(v, where=places == n) / 2

    start = jnp.zeros_like(count), s
    return {"s": loop(lambda state: state[0] < count, body, start, v.size)[1]}


ROW_STEPS: dict[str, Step] = {
    "row_sum": lambda s, v, mask: {"s": jnp.tanh(jnp.sum(jnp.sin(v), where=mask) + s)},
    **named(row_mean, row_maximum, row_pairs, row_scan),
    "row_products": lambda v, r, w: {"v": jnp.tanh(r @ w[0]) + v, "r": r * v[:, None]},
    "row_matrix": lambda s, r, w, mask: {"s": jnp.tanh(jnp.sum(r @ w.T, where=mask[:, None]) + s)},
    "row_count": lambda i, mask: {"i": i + jnp.sum(mask, dtype=jnp.int32)},
    "other_rows": lambda s, e, others: {
        "s": jnp.tanh(jnp.sum(jnp.cos(e) * s, where=others)),
        "e": e * s,
    },
    "row_turns": row_turns,
}
STEPS = USUAL | RULES | ENDS | ROW_STEPS | named(until_rows_end)

# Drawn more often, for most that ever went wrong is here.
CONTROL = ("scanned", "either", "one_of", "scanned_choice", "remembered", "jvp_rule", "vjp_rule")
ONLY_REVERSE = ("vjp_rule", "other_vjp_rule")
# Of the other steps, those that items of any length may take, without looking at the mask.
OF_ANY_LENGTH = (
    *("sine", "product", "choice", "prefix_sums", "prefix_products", "narrow_integer"),
    *("narrow_float", "folded_noise", "jvp_rule", "vjp_rule", *RULES),
)
ROW_ENDS = ("many_times", "nested_times", "until_rows_end")


def read_by(*steps: str) -> list[str]:
    """Return the leaves of an item that any of these steps takes, and those that each item has."""
    names = [name for step in steps for name in inspect.signature(STEPS[step]).parameters]
    return [*dict.fromkeys(["s", "v", *(name for name in names if name in RANKS)])]


def apply(steps: tuple[str, ...], w: jax.Array, item: Item) -> Item:
    """Run the kernel on one item; the result has the leaves of the item, with their dtypes."""
    item = dict(item)
    for name in steps:
        step, known = STEPS[name], item | {"w": w}
        item |= step(*(known[parameter] for parameter in inspect.signature(step).parameters))
    return item


# What rankax makes of it, and what plain JAX does. Each takes the program, its arrays and `w`.


def by_chunked_vmap(program: Program, arrays: Item, w: jax.Array, *, plain: bool) -> Any:
    in_axes = ({name: program.layout[name] for name in arrays},)
    options = dict(program.options)
    out_axes, chunk_size = options.pop("out_axes"), options.pop("chunk_size")
    kernel = functools.partial(apply, program.steps, w)
    out = {name: 0 if RANKS[name] == 0 else out_axes for name in arrays}
    if plain:
        return jax.vmap(kernel, in_axes, out)(arrays)
    if options.get("batched"):
        each = {name: None if axis is None else 0 for name, axis in in_axes[0].items()}
        kernel = jax.vmap(kernel, (each,))
    return chunked_vmap(kernel, chunk_size, in_axes, out, **options)(arrays)


def by_auto_vmap(program: Program, arrays: Item, w: jax.Array, *, plain: bool) -> Any:
    kernel = functools.partial(_outputs, program, w)
    if not plain:
        ranks = {name: SplitKey if program.splits(name) else RANKS[name] for name in arrays}
        kernel = jax.vmap(kernel) if program.options.get("batched") else kernel
        return auto_vmap(ranks, **program.given_options())(kernel)(arrays)
    batch, core = program.batch(), {name: program.core_shape(name) for name in arrays}
    for _ in batch:
        kernel = jax.vmap(kernel)
    if program.splits("key") and batch:  # one item alone gets the key itself
        arrays = arrays | {"key": jax.random.split(arrays["key"], batch)}
    out = kernel({name: jnp.broadcast_to(x, batch + core[name]) for name, x in arrays.items()})
    return _reduced(program, out)


def _outputs(program: Program, w: jax.Array, item: Item) -> Item:
    """Return what one item is, and whether it counts, if that is asked for."""
    out = apply(program.steps, w, item)
    return out | {"ok": out["s"] > -0.2} if "where" in program.options else out


def _reduced(program: Program, out: Item) -> Item:
    """Reduce the outputs of all items as the options say."""
    options, ndim = program.options, len(program.batch())
    if "reduce" not in options:
        return out
    axis, how = options.get("reduce_axis"), options["reduce"]
    axes = tuple(range(ndim)) if axis is None else axis % ndim
    how = dict.fromkeys(out, how) if isinstance(how, str) else how

    def reduced(name: str, x: jax.Array) -> jax.Array:
        if how[name] is None:
            return x
        counts = {}
        if "where" in options:
            counts["where"] = out["ok"].reshape(*out["ok"].shape, *(1,) * (x.ndim - ndim))
        return getattr(jnp, how[name])(x, axes, **counts)

    return {name: reduced(name, x) for name, x in out.items()}


def by_ragged(program: Program, arrays: Item, w: jax.Array, *, plain: bool) -> Any:
    """Map items of unlike length, or take them one by one with their own rows."""
    is_flat = "reduce" not in program.options and program.batch() == (len(program.rows),)
    has_rows = is_flat and not program.splits("key")  # which no signature can say

    def kernel(item: Item) -> Item:
        out = _outputs(program, w, item)
        if has_rows:
            return {name: out[name] for name in arrays}
        # What has a row for each row cannot be reduced, or come with other axes in front.
        sums = {"v": jnp.sum(out["v"], where=item["mask"])}
        return {n: x for n, x in out.items() if n not in ROWS and n not in MASKS} | sums

    if plain:
        return _one_by_one(program, kernel, arrays, has_rows=has_rows)
    masks = {name: Mask(dim) for name, dim in MASKS.items() if name == "mask" or "e" in arrays}
    options = program.given_options()
    if not has_rows:
        ranks = {name: ROWS.get(name, RANKS[name]) for name in arrays}
        ranks |= {"key": SplitKey} if program.splits("key") else {}
        nested = _with_masks(masks, lambda items, masks: kernel(items[0] | masks))
        return auto_vmap(ranks, **masks, **options)(nested)(arrays)
    # Only a signature, or annotations, declare what has rows.
    dims = ",".join(f"({ROWS.get(name, '').replace(' ', ',')})" for name in arrays)
    flat = _with_masks(
        masks,
        lambda leaves, masks: tuple(
            kernel(dict(zip(arrays, leaves, strict=True)) | masks).values()
        ),
    )
    outs = auto_vmap(f"{dims}->{dims}", **masks, **options)(flat)(*arrays.values())
    return dict(zip(arrays, outs, strict=True))


def _with_masks(masks: Item, fun: Any) -> Any:
    """Give a function parameters of its own for the masks."""
    if len(masks) == 1:
        return lambda *args, mask: fun(args, {"mask": mask})
    return lambda *args, mask, others: fun(args, {"mask": mask, "others": others})


def _one_by_one(program: Program, kernel: Any, arrays: Item, *, has_rows: bool) -> Item:
    batch = program.batch()
    if program.splits("key"):
        arrays = arrays | {"key": jax.random.split(arrays["key"], batch)}
    own = {name: x.to_list() for name, x in arrays.items() if name in ROWS}
    core = {name: program.core_shape(name) for name in arrays if name not in ROWS}
    wide = {name: jnp.broadcast_to(arrays[name], batch + shape) for name, shape in core.items()}
    axis, outs = len(batch) - 1, list[Item]()
    for number in range(batch[-1]):
        rows = {name: jnp.asarray(xs[min(number, len(xs) - 1)]) for name, xs in own.items()}
        pairs = {"mask": "v", "others": "e"}.items()
        masks = {mask: jnp.ones(len(rows[name]), bool) for mask, name in pairs if name in rows}
        one = functools.partial(lambda own, item: kernel(own | item), rows | masks)
        for _ in range(axis):
            one = jax.vmap(one)
        outs.append(one({n: x[(slice(None),) * axis + (number,)] for n, x in wide.items()}))

    def together(name: str) -> Any:
        parts = [out[name] for out in outs]
        if has_rows and name in ROWS:
            return Ragged(jnp.concatenate(parts), arrays[name].lengths)
        return jnp.stack(parts, axis)

    return _reduced(program, {name: together(name) for name in outs[0]})


def by_stream(program: Program, arrays: Item, w: jax.Array, *, plain: bool) -> Any:
    if plain:
        return by_auto_vmap(program, arrays, w, plain=True)
    kernel = functools.partial(apply, program.steps, w)
    mapped = auto_vmap({name: RANKS[name] for name in arrays}, **program.given_options())(kernel)
    with tempfile.TemporaryDirectory() as out:
        bounds = {"memory_limit": "5 MB", "progress": False}
        run = importlib.import_module("rankax.stream").run  # needs packages that others do not
        stored = run(mapped, arrays, out=out, **bounds)
        return {name: jnp.asarray(x[...]) for name, x in stored.items()}


def by_scan(program: Program, arrays: Item, w: jax.Array, *, plain: bool) -> Any:
    parts: dict[str, Item] = {"init": {}, "xs": {}, "shared": {}}
    for name, x in arrays.items():
        parts[program.layout[name]][name] = x

    def body(carry: Item, x: Item) -> tuple[Item, Item]:
        new = apply(program.steps, w, parts["shared"] | x | carry)
        y = {name: leaf for name, leaf in new.items() if name not in parts["shared"]}
        # Bounded, because rounding errors grow in a chaotic loop, and an overflow gives NaN.
        return {name: jnp.tanh(new[name]) if name in "sv" else new[name] for name in carry}, y

    options = program.options | {"length": program.length}
    if not plain and program.caller == "sliced_scan":
        return sliced_scan(body, parts["init"], parts["xs"], **options)
    window = slice(*(options.pop(name) for name in ("start", "stop", "step")))
    if plain:
        scan = _unrolled if program.has_rules else lax.scan
        options = {name: options[name] for name in ("length", "reverse")}
    else:
        scan = checkpoint_chunked_scan
    carry, ys = scan(body, parts["init"], parts["xs"], **options)
    return carry, jax.tree.map(lambda y: y[window], ys)


def _unrolled(body: Any, carry: Any, xs: Any, length: int, reverse: bool) -> tuple[Any, Any]:
    """Loop in Python: JAX forgets custom rules in the half of a scan that it linearised."""
    ys: list[Any] = [None] * length
    for n in reversed(range(length)) if reverse else range(length):
        carry, ys[n] = body(carry, jax.tree.map(lambda x, n=n: x[n], xs))
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


CALLERS: dict[str, Any] = {
    "chunked_vmap": by_chunked_vmap,
    "auto_vmap": by_auto_vmap,
    "sliced_scan": by_scan,
    "checkpoint_chunked_scan": by_scan,
    "stream": by_stream,
    "ragged": by_ragged,
}

OF_ANY_SHAPE = ("auto_vmap", "stream", "ragged")


# The transformations: of `f`, which maps the arrays that have a derivative to those that have one
# (and, for `value`, to all), at `p` along `t`.


def total(tree: Any) -> jax.Array:
    """Weigh every number differently, so that no gradient is constant and none is forgotten."""
    result = jnp.zeros((), jnp.result_type(float))
    for leaf in jax.tree.leaves(tree):
        real = jnp.real(leaf) + jnp.imag(leaf) / 2 if jnp.iscomplexobj(leaf) else leaf
        real = real.astype(result.dtype)
        weights = jnp.cos(jnp.arange(real.size, dtype=real.dtype)).reshape(real.shape)
        result += jnp.sum(weights * jnp.sin(real))
    return result


def _grad(f: Any) -> Any:
    return jax.grad(lambda p: total(f(p)))


def _jacobian(jacobian: Any) -> Any:
    def transformed(f: Any, p: Item, t: Item) -> Any:
        # There is none of a complex number.
        reals = {n: x for n, x in p.items() if not jnp.iscomplexobj(*jax.tree.leaves(x))}
        return jacobian(lambda reals: total(f(p | reals)))(reals)

    return transformed


def _two(p: Item, t: Item) -> Item:
    return jax.tree.map(lambda x, d: jnp.stack([x, x + d / 4]), p, t)


def _derivative(f: Any, p: Item, t: Item) -> Any:
    return jax.jvp(f, (p,), (t,))[1]


TRANSFORMATIONS: dict[str, Callable[[Any, Item, Item], Any]] = {
    "value": lambda f, p, t: f(p),
    "jvp": lambda f, p, t: jax.jvp(f, (p,), (t,)),
    "linearize": lambda f, p, t: jax.linearize(f, p)[1](t),
    "vmap": lambda f, p, t: jax.vmap(f)(_two(p, t)),
    "vmap of jvp": lambda f, p, t: jax.vmap(lambda t: _derivative(f, p, t))(_two(t, p)),
    "grad": lambda f, p, t: _grad(f)(p),
    "value_and_grad": lambda f, p, t: jax.value_and_grad(lambda p: total(f(p)))(p),
    "vjp": lambda f, p, t: (lambda out, pull: pull(jax.tree.map(jnp.cos, out)))(*jax.vjp(f, p)),
    "grad of checkpoint": lambda f, p, t: _grad(jax.checkpoint(f))(p),
    "grad of jit": lambda f, p, t: _grad(jax.jit(f))(p),
    "vmap of grad": lambda f, p, t: jax.vmap(_grad(f))(_two(p, t)),
    "grad of vmap": lambda f, p, t: _grad(jax.vmap(f))(_two(p, t)),
    "grad of scan": lambda f, p, t: _grad(
        lambda p: lax.scan(lambda _, q: (None, f(q)), None, _two(p, t))[1]
    )(p),
    "jacrev": _jacobian(jax.jacrev),
    "jacfwd": _jacobian(jax.jacfwd),
    "hessian": lambda f, p, t: jax.hessian(lambda s: total(f(p | {"s": s})))(p["s"]),
    "jvp of grad": lambda f, p, t: jax.jvp(_grad(f), (p,), (t,)),
    "jvp of jvp": lambda f, p, t: _derivative(lambda p: _derivative(f, p, t), p, t),
    "grad of grad": lambda f, p, t: _grad(_grad(f))(p),
    "grad of jvp": lambda f, p, t: _grad(lambda p: _derivative(f, p, t))(p),
    "jvp of grad of checkpoint": lambda f, p, t: _derivative(_grad(jax.checkpoint(f)), p, t),
    "jvp of grad of vmap": lambda f, p, t: _derivative(_grad(jax.vmap(f)), _two(p, t), _two(t, p)),
}
# A custom_vjp has no forward derivative, of which most second ones are made.
REVERSE = (
    "value", "vmap", "grad", "value_and_grad", "vjp", "grad of checkpoint", "grad of jit",
    "vmap of grad", "grad of vmap", "jacrev", "grad of grad",
)  # fmt: skip
# A loop that ends by itself has only a forward derivative.
FORWARD = ("value", "jvp", "linearize", "vmap", "vmap of jvp", "jvp of jvp")
# rankax has no reverse mode of the reverse mode of one.
ONCE_REVERSE = tuple(name for name in TRANSFORMATIONS if name not in (*FORWARD, "grad of grad"))
# Few operations, for what runs them one by one.
EAGER = ("value", "vmap", "jvp", "grad", "vjp", "vmap of grad")
# Of these JAX itself forgets the rules.
FORGETFUL = ("grad of scan", "grad of checkpoint", "jvp of grad of checkpoint")


# Simpler values to shrink a failing program with, the simplest first.
SIMPLE = ("value", "jvp", "grad", "jvp of jvp", "jvp of grad")
PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("start", "stop", "step"), (None,)),
    "reverse": (False,),
    "unroll": (1,),
    "checkpoint": (True,),
    "out_axes": (0,),
    "reduce_axis": (None,),
    "lockstep": (True,),
}


# One program.

# There are many to compile, and each runs once.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that was drawn."""

    caller: str
    steps: tuple[str, ...]
    # Of each leaf: its axis, its batch shape (-1: as many as ragged items) or its part of the scan;
    # "split" of a key that the items share, "rows" of ragged items.
    layout: dict[str, Any]
    options: dict[str, Any]
    transformation: str
    length: int = 0  # of the mapped axis or the scan
    rows: tuple[int, ...] = ()  # how many each ragged item has
    core: int = 3  # the length of a vector
    jit: bool = True
    x64: bool = True
    optimize: bool = False  # compile as XLA does by default, which takes twice as long
    narrow: str = "bfloat16"
    data: int = 0  # seeds the values

    @property
    def has_rules(self) -> bool:
        return any(name in RULES for name in self.steps)

    @property
    def is_bounded(self) -> bool:
        """Whether plain JAX needs a bound on the steps of a loop."""
        has_ends = any(name in (*ENDS, *ROW_ENDS) for name in self.steps)
        return has_ends and self.transformation not in FORWARD

    def splits(self, name: str) -> bool:
        """Whether a leaf is one key, of which each item gets its own."""
        return self.layout.get(name) == "split"

    def batch(self) -> tuple[int, ...]:
        """Return the batch shape of what `auto_vmap` maps."""
        more = self.options.get("batch_shape") or ()
        return np.broadcast_shapes(more, *map(self._sides, self.layout))

    def _sides(self, name: str) -> tuple[int, ...]:
        where = self.layout[name]
        if where in ("split", "rows"):
            return (len(self.rows),) if where == "rows" else ()
        return tuple(len(self.rows) if side == -1 else side for side in where)

    def core_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a leaf of one item, whose length is known."""
        return (self.core,) * RANKS[name]

    def given_options(self) -> dict[str, Any]:
        """Return the options as rankax takes them: not all can be printed."""
        progress = {"progress": max} if self.options.get("progress") else {}
        return self.options | progress

    @property
    def tolerance(self) -> float:
        """Relative to the largest number of a leaf."""
        if "h" in self.layout:
            return 5e-2
        return 1e-7 if self.x64 else 5e-3

    def simpler(self) -> Iterator[Program]:
        """Yield programs with less in them, those with much less first."""
        count = len(self.steps)
        halves = [self.steps[: count // 2], self.steps[count // 2 :]] if count > 1 else []
        each = [self.steps[:n] + self.steps[n + 1 :] for n in range(count) if count > 1]
        changes: list[dict[str, Any]] = [{"steps": steps} for steps in (*halves, *each)]
        needed = read_by(*self.steps)
        if not {*needed} >= self.layout.keys():
            changes.append({"layout": {n: x for n, x in self.layout.items() if n in needed}})
        is_simple = self.transformation in SIMPLE
        simple = SIMPLE[: SIMPLE.index(self.transformation)] if is_simple else SIMPLE
        changes += [{"transformation": name} for name in simple]
        changes += [{"length": n} for n in range(1, self.length)]
        changes += [{"core": n} for n in range(1, self.core)]
        changes += [{"jit": True}, {"x64": True}, {"optimize": False}]
        for name in self.options:
            if name in MORE and name not in ("chunk_size", "checkpoint"):
                rest = {other: x for other, x in self.options.items() if other != name}
                changes.append({"options": rest})
        for name, value in self.options.items():
            changes += [{"options": self.options | {name: x}} for x in PLAIN.get(name, ())]
            if type(value) is int and value > 1:
                changes.append({"options": self.options | {name: value - 1}})
        for name, place in self.layout.items():
            if self.caller == "chunked_vmap":
                changes.append({"layout": self.layout | {name: 0}})
            elif self.caller in OF_ANY_SHAPE and type(place) is tuple and place:
                changes.append({"layout": self.layout | {name: place[1:]}})
        count = len(self.rows)
        changes += [{"rows": self.rows[:n] + self.rows[n + 1 :]} for n in range(count) if count > 1]
        for n, length in enumerate(self.rows):
            changes += [{"rows": (*self.rows[:n], k, *self.rows[n + 1 :])} for k in range(length)]
        for change in changes:
            if any(getattr(self, name) != value for name, value in change.items()):
                yield dataclasses.replace(self, **change)

    def arrays(self) -> Item:
        """Draw the values, each leaf from its own generator, so that smaller programs keep them."""
        return {name: self._array(name) for name in self.layout} | {"w": self._array("w")}

    def _array(self, name: str, *, along: bool = False) -> Any:
        rng = np.random.default_rng([self.data, zlib.crc32(name.encode()), along])
        if name in ROWS and name in self.layout and self.layout[name] == "rows":
            rows = self.rows[::-1] if name == "e" else self.rows
            shape = (sum(rows), *self.core_shape(name)[1:])
            return Ragged(self._values(name, shape, rng), rows)
        return self._values(name, (3, self.core) if name == "w" else self._shape(name), rng)

    def _values(self, name: str, shape: tuple[int, ...], rng: Any) -> Any:
        if name == "key":
            return jax.random.wrap_key_data(rng.integers(0, 2**32, (*shape, 2), np.uint32))
        if name in "bi":
            return jnp.asarray(rng.integers(0, 6, shape), {"b": jnp.int8, "i": jnp.int32}[name])
        values = rng.normal(size=shape)
        if name == "c":
            return jnp.asarray(values + 1j * rng.normal(size=shape), jnp.result_type(complex))
        return jnp.asarray(values, self.narrow if name == "h" else jnp.result_type(float))

    def _shape(self, name: str) -> tuple[int, ...]:
        core, where = self.core_shape(name), self.layout[name]
        if self.caller in OF_ANY_SHAPE:
            return (*self._sides(name), *core)
        if self.caller != "chunked_vmap":
            return (self.length, *core) if where == "xs" else core
        if where is None:
            return core
        at = where % (len(core) + 1)
        return (*core[:at], self.length, *core[at:])

    def _call(self, *, plain: bool) -> tuple[Any, tuple[Item, Item, Item]]:
        """Return the transformed program, by rankax or by plain JAX, and its arguments."""
        arrays = self.arrays()
        moving = {n: x for n, x in arrays.items() if is_moving(x)}
        fixed = {n: x for n, x in arrays.items() if n not in moving}
        along = {name: self._array(name, along=True) for name in moving}

        def transformed(moving: Item, fixed: Item, along: Item) -> Any:
            def f(p: Item) -> Any:
                everything = fixed | p
                w = everything.pop("w")
                with mock.patch(f"{__name__}.IS_BOUNDED", plain and self.is_bounded):
                    out = CALLERS[self.caller](self, everything, w, plain=plain)
                if self.transformation in ("value", "vmap"):
                    return out
                return [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]

            return TRANSFORMATIONS[self.transformation](f, moving, along)

        return transformed, (moving, fixed, along)

    def run(self, *, plain: bool) -> Any:
        """Compile, where the program is compiled at all, and run."""
        fun, arguments = self._call(plain=plain)
        options = None if self.optimize else QUICK_COMPILE
        jit = plain or (self.jit and self.caller != "stream")
        return (jax.jit(fun, compiler_options=options) if jit else fun)(*arguments)

    def check_types(self) -> None:
        """Trace only, at a tenth of the cost: assert equal structure, shapes and dtypes."""
        with jax.enable_x64(self.x64):
            want, got = (
                jax.eval_shape(fun, *arguments)
                for fun, arguments in (self._call(plain=True), self._call(plain=False))
            )
            _check_types(got, want)

    def check(self) -> None:
        """Assert that rankax and plain JAX agree in structure, shapes, dtypes and values."""
        with jax.enable_x64(self.x64):
            want, got = self.run(plain=True), self.run(plain=False)
            _check_types(got, want)
            named = jax.tree_util.tree_leaves_with_path(got)
            for (path, a), b in zip(named, jax.tree.leaves(want), strict=True):
                self._check_values(jax.tree_util.keystr(path), a, b)

    def check_reuse(self) -> None:
        """Assert that eager calls find a program of earlier calls if it is theirs, and no other.

        After this program come the same with other values, and two that differ in something else.
        """
        first = dataclasses.replace(self, transformation="value", jit=False)
        near = [other for other in first.simpler() if other.x64 is self.x64]
        near = random.Random(self.data).sample(near, min(2, len(near)))
        with jax.enable_x64(self.x64), options(check=True):
            first.check()
            dataclasses.replace(first, data=self.data + 1).run(plain=False)
            for other in near:
                with contextlib.suppress(TypeError, ValueError):  # some are no programs
                    other.run(plain=False)

    def _check_values(self, name: str, a: jax.Array, b: jax.Array) -> None:
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, name)
            return
        wide = np.complex128 if jnp.iscomplexobj(a) else np.float64
        a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        assert np.isfinite(b).all(), f"{name}: plain JAX is not finite, by rankax: {a}"
        scale = max(1.0, np.max(np.abs(b), initial=0.0))
        np.testing.assert_allclose(a, b, self.tolerance, self.tolerance * scale, err_msg=name)


def is_moving(x: Any) -> bool:
    """Whether something, of one array, has a derivative."""
    (leaf,) = jax.tree.leaves(x)
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _check_types(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    named = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(named, jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), jax.tree_util.keystr(path)


def draw(seed: int, kind: str = "calls") -> Program:
    """Draw a program.

    Of the kind ``"rules"``, it has a rule that differs from the derivative. Of ``"lanes"`` and
    ``"reverse"``, items end by themselves, as they may do in ``"streams"``, ``"ragged"`` and
    ``"pairs"``; ``"reverse"`` differentiates that in reverse mode. Of ``"batches"``, the function
    takes a batch itself. Of ``"pairs"``, a call has two options, whichever they are.
    """
    rng = random.Random(seed)
    in_rows = kind == "ragged" or (kind == "pairs" and rng.random() < 0.3)
    more = _draw_names(rng, kind, in_rows=in_rows)
    steps = _draw_steps(rng, kind, in_rows=in_rows, has_ends="lockstep" in more)
    caller = "ragged" if in_rows else rng.choice(KINDS[kind])
    leaves = read_by(*steps)
    length = rng.choice([1, 3, 5, 6, 7, 7, 11, 12, 13])
    layout, options = _DRAWS[caller](rng, leaves, length)
    options = {} if kind == "pairs" else options
    if any(name in (*ENDS, *ROW_ENDS) for name in steps):
        options["lockstep"] = False
    if kind in ("lanes", "streams", "reverse") and caller != "chunked_vmap" and "key" not in leaves:
        batch = np.broadcast_shapes(*layout.values())
        if batch and rng.random() < 0.5:
            axis = rng.choice([None, *range(-len(batch), len(batch))])
            options |= {"reduce": "sum", "reduce_axis": axis}
    names = [
        *{"lanes": FORWARD, "reverse": ONCE_REVERSE, "streams": ("value",)}.get(
            kind, TRANSFORMATIONS
        )
    ]
    if kind in ("ragged", "pairs") and "lockstep" in options:
        names = [*FORWARD, *ONCE_REVERSE]
    if any(name in ONLY_REVERSE for name in steps):
        names = [name for name in names if name in REVERSE]
    if any(name in RULES for name in steps):
        names = [name for name in names if name not in FORGETFUL]
    program = Program(
        caller=caller,
        steps=steps,
        layout=layout,
        options=options,
        transformation=rng.choice(names),
        length=length,
        core=rng.choice([1, 2, 3, 4]),
        jit=rng.random() < 0.97,
        x64=rng.random() < 0.7,
        optimize=rng.random() < 0.2,
        narrow=rng.choice(["float16"] if kind == "streams" else ["bfloat16", "float16"]),
        data=seed,
    )
    if kind in ("batches", "ragged", "pairs"):
        program = _with_more(rng, program, kind, more)
    # It means nothing in another jit.
    if "jit" in program.options and (rng.random() < 0.8 or not program.jit):
        names = ["value"] if "compiler_options" in program.options else {*names} & {*EAGER}
        program = dataclasses.replace(program, jit=False, transformation=rng.choice(sorted(names)))
    if program.is_bounded and caller != "chunked_vmap" and not program.batch():
        # One item alone is evaluated as it is, by loops that have no reverse mode.
        return dataclasses.replace(program, layout=layout | {"v": (2,)})
    return program


def _draw_names(rng: random.Random, kind: str, *, in_rows: bool) -> list[str]:
    """Draw names of options."""
    count = {"pairs": 2, "ragged": 1, "batches": 1}.get(kind, 0)
    # Neither lanes nor ragged items go with functions that take a batch.
    excluded = {"batches": ("batched", "lockstep")}.get(kind, ("batched",) if in_rows else ())
    names = [name for name in MORE if name not in excluded]
    drawn = rng.sample(names, count) if count else []
    return drawn if {*drawn} != {"batched", "lockstep"} else ["batched"]


def _draw_steps(rng: random.Random, kind: str, *, in_rows: bool, has_ends: bool) -> tuple[str, ...]:
    left_out = [*RULES, *ENDS, *ROW_STEPS, *ROW_ENDS]
    if kind == "streams":  # zarr stores no keys
        left_out += [name for name in STEPS if "key" in read_by(name)]
    names = [name for name in STEPS if name not in left_out]
    if in_rows:
        names = [*ROW_STEPS, *OF_ANY_LENGTH]
    weights = [3 if name in CONTROL else 1 for name in names]
    steps = tuple(rng.choices(names, weights, k=rng.choice([1, 1, 2, 2, 3])))
    some = {"streams": 0.5, "ragged": 0.25}
    has_ends |= kind in ("lanes", "reverse") or (kind in some and rng.random() < some[kind])
    if kind == "rules" or has_ends:
        at = rng.randint(0, len(steps))
        ends = ROW_ENDS if in_rows else ENDS
        steps = (*steps[:at], rng.choice([*(ends if has_ends else RULES)]), *steps[at:])
    return steps


# Options that a call may have besides, each with what it is set to.
MORE: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "chunk_size": lambda rng: {"chunk_size": rng.choice([1, 2, 3, 4, 7, 100])},
    "memory_limit": lambda rng: {"memory_limit": "1 MB"},
    "checkpoint": lambda rng: {"checkpoint": rng.random() < 0.5, "chunk_size": rng.choice([2, 3])},
    "jit": lambda rng: {"jit": True},
    "bucket": lambda rng: {"jit": True, "bucket": rng.choice([True, (4, 16, 64)])},
    # Only of values: JAX 0.10 refuses them in a program that is differentiated.
    "compiler_options": lambda rng: {
        "jit": True,
        "compiler_options": {"xla_embed_ir_in_executable": True},
    },
    "devices": lambda rng: {"devices": rng.choice([1, False])},
    "progress": lambda rng: {"progress": True, "chunk_size": rng.choice([2, 3])},
    "reduce": lambda rng: {"reduce": {}},
    "reduce_axis": lambda rng: {"reduce": {}, "reduce_axis": None},
    "where": lambda rng: {"reduce": {}, "where": "ok"},
    "batch_shape": lambda rng: {"batch_shape": ()},
    "split key": lambda rng: {},
    "batched": lambda rng: {"batched": True},
    "lockstep": lambda rng: {"lockstep": False},
}


def _with_more(rng: random.Random, program: Program, kind: str, names: list[str]) -> Program:
    """Set more options, to what the shapes of a program admit."""
    options, layout = dict(program.options), dict(program.layout)
    if kind == "batches":
        options["batched"] = True
    if program.caller == "chunked_vmap":
        return dataclasses.replace(program, options=options)
    for name in names:
        options |= MORE[name](rng)
    if "key" in layout and ("split key" in names or rng.random() < 0.3):
        layout["key"] = "split"
    rows = _draw_rows(rng) if program.caller == "ragged" else ()
    program = dataclasses.replace(program, options=options, layout=layout, rows=rows)
    if "batch_shape" in options:
        shape = [rng.choice([1, side]) for side in program.batch()]
        options["batch_shape"] = (*rng.choice([(), (2,), (2, 1)]), *shape)
    ndim = len(program.batch())
    if "reduce" in options:
        options["reduce"] = _draw_reduce(rng, program)
        if "reduce_axis" in options and ndim:
            options["reduce_axis"] = rng.choice([None, *range(-ndim, ndim)])
    return program


def _draw_reduce(rng: random.Random, program: Program) -> dict[str, Any]:
    of_reals = ["sum", "prod"] if "where" in program.options else ["sum", "mean", "max", "min"]
    how = {"s": of_reals, "v": [*of_reals, None], "key": [None]}
    of_integers = ["sum", None] if "where" in program.options else ["sum", "max", "min", None]
    how |= {"c": ["sum", None], "h": ["sum", None], "b": of_integers, "i": of_integers}
    is_ragged = program.caller == "ragged"
    names = [n for n in program.layout if not (is_ragged and n in ROWS and n != "v")]
    if "where" in program.options:
        how["ok"] = ["any"]
        names.append("ok")
    return {name: rng.choice(how[name]) for name in names}


def _draw_chunked_vmap(rng: random.Random, leaves: list[str], length: int) -> Any:
    layout = {
        name: rng.choice([0, 0, 0, None, *range(-RANKS[name] - 1, RANKS[name] + 1)])
        for name in leaves
    }
    layout[rng.choice(leaves)] = 0
    options = {
        "chunk_size": rng.choice(_uneven(length)),
        "out_axes": rng.choice([0, 0, 1, -1]),
        "checkpoint": rng.random() < 0.5,
    }
    return layout, options


def _uneven(length: int) -> list[int]:
    """Return sizes of chunks of less than a whole axis, those that do not divide it three times."""
    sizes = range(1, max(2, length))
    return [size for size in sizes for _ in range(3 if length % size else 1)]


def _draw_auto_vmap(rng: random.Random, leaves: list[str], length: int) -> Any:
    batch = [rng.choice([1, 2, 3, 5, 7]) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
    layout = {}
    for name in leaves:
        sides = [side if rng.random() < 0.6 else 1 for side in batch]
        layout[name] = tuple(sides[rng.randint(0, len(sides)) if rng.random() < 0.3 else 0 :])
    return layout, {"chunk_size": rng.choice([1, 2, 3, 4, 4, 6]), "checkpoint": rng.random() < 0.5}


def _draw_ragged(rng: random.Random, leaves: list[str], length: int) -> Any:
    front = [rng.choice([1, 2, 3]) for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    layout: dict[str, Any] = {}
    for name in leaves:
        sides = (*(side if rng.random() < 0.6 else 1 for side in front), rng.choice([-1, -1, 1]))
        at = rng.randint(0, len(sides)) if rng.random() < 0.3 else 0
        layout[name] = "rows" if name in ROWS else sides[at:]
    return layout, {"chunk_size": rng.choice([None, 1, 2, 3, 4]), "checkpoint": rng.random() < 0.5}


def _draw_rows(rng: random.Random) -> tuple[int, ...]:
    lengths = [rng.choice([0, 1, 1, 2, 3, 4, 5]) for _ in range(rng.choice([1, 2, 3, 4, 6, 8]))]
    kind = rng.random()
    if kind < 0.15:
        lengths[rng.randrange(len(lengths))] = 11
    return tuple(lengths[:1] * len(lengths) if kind > 0.85 else lengths)


def _draw_scan(rng: random.Random, leaves: list[str], length: int) -> tuple[Any, dict[str, Any]]:
    layout = {name: rng.choice(["init", "xs", "shared"]) for name in leaves}
    layout["v"] = "init"
    layout[rng.choice(["s", rng.choice(leaves)])] = "xs"
    bounds = [None, None, *range(-length, length + 1)]
    return layout, {
        "reverse": rng.random() < 0.5,
        "unroll": rng.choice([1, 1, 2, 3]),
        "start": rng.choice(bounds),
        "stop": rng.choice(bounds),
        "step": rng.choice([None, 1, 2, 3, 4, -1, -2]),
    }


def _draw_sliced_scan(rng: random.Random, leaves: list[str], length: int) -> Any:
    layout, options = _draw_scan(rng, leaves, length)
    return layout, options | {"checkpoint": rng.random() < 0.5}


def _draw_checkpoint_chunked_scan(rng: random.Random, leaves: list[str], length: int) -> Any:
    layout, options = _draw_scan(rng, leaves, length)
    sizes = [None, rng.randint(1, length), (rng.randint(1, length), rng.randint(1, 3))]
    return layout, options | {"chunk_size": rng.choice(sizes)}


_DRAWS: dict[str, Any] = {
    "chunked_vmap": _draw_chunked_vmap,
    "auto_vmap": _draw_auto_vmap,
    "sliced_scan": _draw_sliced_scan,
    "checkpoint_chunked_scan": _draw_checkpoint_chunked_scan,
    "stream": _draw_auto_vmap,
    "ragged": _draw_ragged,
}

_CALLS = ("chunked_vmap", "auto_vmap", "sliced_scan", "checkpoint_chunked_scan")
# What a program of each kind may be called by.
KINDS: dict[str, tuple[str, ...]] = {
    "calls": _CALLS,
    "rules": _CALLS,
    "lanes": ("chunked_vmap", "auto_vmap"),
    "streams": ("stream",),
    "reverse": ("chunked_vmap", "auto_vmap"),
    "batches": ("chunked_vmap", "auto_vmap"),
    "ragged": ("ragged",),
    "pairs": ("auto_vmap",),
}
