# SPDX-License-Identifier: MIT
"""Batch axes by name, ``x="i | 3"``: what `[:, None]` gives, and errors that name them."""

import pickle
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, PRNGKeyArray

from helpers import assert_same, equations, refusal, slow, weekly
from rankax import (
    BatchShapeError,
    CoreDimensionError,
    Mask,
    Ragged,
    RankError,
    SplitKey,
    auto_vmap,
    options,
)
from rankax.reductions import BottomK, Fold, Moments, Several, TopK

DRAW = np.random.default_rng(5).normal
P, S, W = (DRAW(size=shape).astype(np.float32) for shape in ((7, 3), (5, 3), (5,)))
KEY = jax.random.key(3)
NAMES = {"x": "i | 3", "y": "j | 3", "w": "j |"}


def gauss(x, y, w):
    return w * jnp.exp(-jnp.sum((x - y) ** 2))


def pair(fun=gauss, axes=None, **given):
    """Return a kernel with names, and the one whose arguments get their axes by `[:, None]`."""
    over = {} if axes is None else {"over": axes}
    places = {"i": 0, "j": 1}
    at = {} if axes is None else {"reduce_axis": tuple(places[axis] for axis in axes.split())}
    unnamed = auto_vmap(x=1, y=1, w=0, **at, **given)(fun)
    return auto_vmap(**NAMES, **over, **given)(fun), lambda x, y, w: unnamed(x[:, None], y, w)


REDUCED = [
    *("sum", "mean", "prod", "max", "min", "argmax", "argmin", "logsumexp"),
    *(Moments(), TopK(2), BottomK(3), Several("max", "argmax")),
    Fold(0.0, lambda x: x, jnp.add),
]


def named(reduce):
    """Return a name that every process of the tests agrees on."""
    return reduce if isinstance(reduce, str) else type(reduce).__name__


@pytest.mark.parametrize("axes", ["j", weekly("i"), weekly("i j")])
@pytest.mark.parametrize("reduce", REDUCED, ids=named)
@pytest.mark.parametrize("chunk_size", [4, slow(None)])
def test_reductions_are_those_of_new_axes(reduce, axes, chunk_size):
    named, other = pair(reduce=reduce, axes=axes, chunk_size=chunk_size)
    assert_same(named(P, S, W), other(P, S, W), rtol=0, atol=0)


GIVEN: dict[str, dict[str, Any]] = {
    "a map": {},
    "chunks": {"chunk_size": 4},
    "one at a time": {"chunk_size": 1},
    "jit": {"jit": True, "chunk_size": 6},
    "a bucket": {"jit": True, "bucket": (8, 16)},
    "a limit": {"memory_limit": "4 kB"},
    "lanes": {"lockstep": False, "chunk_size": 4},
    "stored": {"checkpoint": False, "chunk_size": 4},
    "a sum": {"reduce": "sum", "axes": "j"},
    "a sum in chunks": {"reduce": "sum", "axes": "j", "chunk_size": 4},
    "the smallest": {"reduce": "min", "axes": "i", "chunk_size": 3},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_gradients_are_those_of_new_axes(given):
    named, other = pair(**given)

    def slope(call):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(call(*args))), (0, 1, 2))(P, S, W)

    assert_same(slope(named), slope(other), rtol=1e-6)


def described(fun, *args):
    """Return each equation of a program, and its types."""
    found = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return [(str(e.primitive), *[str(v.aval) for v in (*e.invars, *e.outvars)]) for e in found]


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_programs_are_those_of_new_axes(given):
    named, _ = pair(**given)
    axes = given.get("axes")
    at = {} if axes is None else {"reduce_axis": {"i": 0, "j": 1}[axes]}
    plain = {name: value for name, value in given.items() if name != "axes"}
    unnamed = auto_vmap(x=1, y=1, w=0, **at, **plain)(gauss)
    args = [jnp.asarray(x) for x in (P, S, W)]
    # The axis that such a caller adds is taken out again.
    dropped = "reshape", "float32[7,1,3]", "float32[7,3]"
    want = described(unnamed, args[0][:, None], *args[1:])
    assert described(named, *args) == [each for each in want if each != dropped]
    assert dropped in want
    plans = named.plan(*args), unnamed.plan(args[0][:, None], *args[1:])
    one, other = [
        [(x.chunks, x.in_axes, x.axes, x.mapped, x.reduced, x.is_loop) for x in plan.levels]
        for plan in plans
    ]
    assert one == other


def test_nothing_is_copied_or_reshaped():
    named, _ = pair()
    program = jax.make_jaxpr(named)(P, S, W)
    assert "reshape" not in {str(e.primitive) for e in equations(program.jaxpr)}


def test_results_have_unnamed_axes_then_names_in_order():
    add = auto_vmap(a="i |", b="j |", c="k |")(lambda a, b, c: a + b + c)
    assert add(jnp.ones(2), jnp.ones(3), jnp.ones(4)).shape == (2, 3, 4)
    assert add(jnp.ones((6, 1, 2)), jnp.ones((5, 3)), jnp.ones(4)).shape == (6, 5, 2, 3, 4)
    # Each argument keeps the order of its own names.
    kept = auto_vmap(a="i t |", b="j t |")(lambda a, b: a * b)
    a, b = jnp.arange(8.0).reshape(2, 4), jnp.arange(12.0).reshape(3, 4)
    assert_same(kept(a, b), a[:, None] * b[None])
    later = auto_vmap(a="i |", b="j |", c="j i |")(lambda a, b, c: a + b + c)
    assert_same(
        later(jnp.arange(2.0), jnp.arange(3.0), b[:, :2]),
        jnp.arange(2.0)[None] + jnp.arange(3.0)[:, None] + b[:, :2],
    )


def test_one_name_is_one_axis_also_of_length_one_or_none():
    both = auto_vmap(x="i | 3", y="i | 3")(lambda x, y: x @ y)
    assert_same(both(P, P), jnp.sum(jnp.asarray(P) ** 2, 1))
    assert both(P[:1], P[:1]).shape == (1,)
    assert both(P[:0], P[:0]).shape == (0,)
    every, _ = pair(reduce="sum", axes="j")
    assert_same(every(P[:1], S[:1], W[:1]), gauss(P[:1, None], S[:1], W[:1])[0] * jnp.ones(1))
    assert_same(every(P, S[:0], W[:0]), jnp.zeros(7))


def test_an_argument_without_a_name_has_axes_in_front():
    scaled = auto_vmap(x="i | 3", y="j | 3", w=0, reduce="sum", over="j")(gauss)
    got = scaled(P, S, jnp.arange(1.0, 3.0))
    want = jnp.stack([pair()[0](P, S, jnp.full(5, w)).sum(1) for w in (1.0, 2.0)])
    assert_same(got, want)
    assert_same(scaled(P, S, 2.0), want[1])


def test_names_in_trees_lists_and_ranks():
    def pull(a, b):
        return a["m"] * b[0] / (1 + jnp.sum((a["at"] - b[1]) ** 2))

    tree, other = {"at": P, "m": P[:, 0]}, (W, S)
    ranks = {"a": {"at": "i | 3", "m": "i |"}, "b": ("j |", "j | 3")}
    got = auto_vmap(ranks=ranks, reduce="sum", over="j", chunk_size=4)(pull)(tree, other)
    plain = auto_vmap({"at": 1, "m": 0}, (0, 1), reduce="sum", reduce_axis=-1)(pull)
    assert_same(got, plain(jax.tree.map(lambda x: x[:, None], tree), other))
    by_position = auto_vmap("i | 3", "j | 3", "j |")(gauss)
    assert_same(by_position(P, S, W), pair()[0](P, S, W))
    every = auto_vmap("i |")(lambda *args: sum(args))
    assert_same(every(W, W, W), 3 * jnp.asarray(W))


def test_an_optional_argument_may_bring_an_axis():
    def scaled(x, y, w=None):
        return gauss(x, y, 1.0 if w is None else w)

    named = auto_vmap(x="i | 3", y="j | 3", w="k |")(scaled)
    assert named(P, S).shape == (7, 5)
    assert named(P, S, jnp.ones(2)).shape == (7, 5, 2)
    over = named.with_options(reduce="sum", over=("k", "j"))
    assert over(P, S, jnp.ones(2)).shape == (7,)
    assert "scaled(): over='k' has nothing to reduce" in refusal(ValueError, over, P, S)


def test_keys_masks_and_ragged_items():
    def noisy(x, key):
        return x + jax.random.normal(key)

    keys = jax.random.split(KEY, 4)
    own = auto_vmap(x="j |", key=SplitKey("i |"), chunk_size=3)(noisy)
    plain = auto_vmap(x=0, key=SplitKey)(noisy)
    assert_same(own(W, keys), plain(W[:, None], keys))
    assert str(own).startswith('<rankax kernel noisy(x: "j |", key: SplitKey("i |"))')
    drawn = auto_vmap(x="j |", key=SplitKey, batch_shape=4)(noisy)
    assert_same(drawn(W, KEY), plain.with_options(batch_shape=(4, 1))(W, KEY))
    items = Ragged.from_list([P[:2], P[:5], P[:1]])

    def moved(y, x, mask):
        return jnp.sum(jnp.where(mask[:, None], x, 0.0) @ y)

    ragged = auto_vmap(y="j | 3", x="i | n 3", mask=Mask("n"))(moved)
    dense = auto_vmap(y=1, x="n 3", mask=Mask("n"))(moved)
    assert_same(ragged(S, items), dense(S[:, None], items))
    given = {"reduce": "sum", "jit": True}
    got = ragged.with_options(over="i", **given)(S, items)
    assert_same(got, dense.with_options(reduce_axis=-1, **given)(S[:, None], items))
    assert "axis j: vmap over 5" in str(ragged.plan(S, items))
    ragged.check(S, items)


def test_annotated_keys_have_names():
    def noisy(x: Any, key: Annotated[PRNGKeyArray, SplitKey("i |")]):
        return x + jax.random.normal(key)

    own = auto_vmap(x="j |")(noisy)
    assert own(W, jax.random.split(KEY, 4)).shape == (5, 4)


def test_a_name_goes_with_the_annotation_of_others():
    def scaled(x: Float[Array, "3"], y: Any):
        return x * y

    assert auto_vmap(y="i |")(scaled)(jnp.ones((2, 3)), W).shape == (2, 5, 3)


def test_tools_know_names():
    named, other = pair(reduce="sum", axes="j", chunk_size=6)
    named.check(P, S, W, gradient=True)
    assert named.nonfinite(P, S * np.nan, W).count == 35
    copy = pickle.loads(pickle.dumps(of_module))
    assert_same(copy(P, S, W), other(P, S, W))
    assert of_module.signature is None
    with options(chunk_size=2):
        assert of_module.plan(P, S, W).in_flight <= 2


@auto_vmap(**NAMES, reduce="sum", over="j")
def of_module(x, y, w):
    return gauss(x, y, w)


def test_the_plan_speaks_of_names():
    named, _ = pair(reduce="sum", axes="j", chunk_size=5)
    text = """\
gauss: batch shape (i=7, j=5), 35 evaluations, 5 in flight, 7 steps
  leaf   shape   rank     core  i j
  x      (7, 3)  "i | 3"  (3,)  7 -
  y      (5, 3)  "j | 3"  (3,)  - 5
  w      (5,)    "j |"    ()    - 5
  batch  (7, 5)                 7 5
  axis i: 7 chunks of 1 over 7, mapping x
  axis j: vmap over 5, mapping y, w, reduced
  (- absent: used again for each item, never copied)
  reduced by sum over j, to (i=7)"""
    assert str(named.plan(P, S, W)) == text
    first = str(named.plan(P[None], S, W)).split("\n")
    assert first[0].startswith("gauss: batch shape (1, i=7, j=5)")
    assert first[1].endswith("0 i j")
    assert named.plan(P, S, W).names == ("i", "j")


# Calls that are wrong.

TWO = {"x": "i | 3", "y": "j | 3", "w": "j |"}
GRID = {"x": "i j | 3", "y": "j | 3", "w": "i |"}
OPEN = {"x": "i | 3", "y": "i | 3", "w": 0}
SIZED = {"x": "i | n 3", "y": "j | n", "w": "i j |"}

# Ranks, shapes, the error, the arguments that are marked, and a sentence.
CALLS: list[tuple[Any, ...]] = [
    (TWO, [(7, 3), (5, 3), (4,)], BatchShapeError, "yw", "Batch axis j is 5 (y) and 4 (w)."),
    (TWO, [(7, 3), (5, 3), (7,)], BatchShapeError, "yw", "Batch axis j is 5 (y) and 7 (w)."),
    (TWO, [(7, 3), (5, 3), (1,)], BatchShapeError, "yw", "Batch axis j is 5 (y) and 1 (w)."),
    (TWO, [(7, 3), (1, 3), (5,)], BatchShapeError, "yw", "Batch axis j is 1 (y) and 5 (w)."),
    (
        TWO,
        [(7, 3), (1, 3), (5,)],
        BatchShapeError,
        "yw",
        "if all j have the same y, leave j out",
    ),
    (TWO, [(7, 3), (0, 3), (5,)], BatchShapeError, "yw", "Batch axis j is 0 (y) and 5 (w)."),
    (TWO, [(7, 1, 3), (5, 3), (5,)], None, "", ""),  # the new axis is one without a name
    (TWO, [(2, 7, 3), (3, 5, 3), (5,)], BatchShapeError, "xy", "Batch axis -3 is 2 (x) and 3 (y)."),
    (TWO, [(2, 7, 3), (5, 3), (3, 5)], BatchShapeError, "xw", "Batch axis -3 is 2 (x) and 3 (w)."),
    (TWO, [(2, 7, 3), (3, 5, 3), (4, 5)], BatchShapeError, "xyw", "is 2 (x), 3 (y) and 4 (w)."),
    (TWO, [(2, 7, 3), (3, 5, 3), (4,)], BatchShapeError, "xyw", "Batch axis j is 5 (y) and 4 (w)."),
    (TWO, [(3,), (5, 3), (5,)], RankError, "x", 'x has 1 axis, but its rank "i | 3" needs 2'),
    (TWO, [(7, 3), (3,), (5,)], RankError, "y", 'if it has no axis j, declare it as "3".'),
    (TWO, [(7, 3), (5, 3), ()], RankError, "w", 'if it has no axis j, declare it as "".'),
    (TWO, [(3,), (3,), ()], RankError, "xyw", 'w has 0 axes, but its rank "j |" needs 1'),
    (TWO, [(), (5, 3), (5,)], RankError, "x", 'x has 0 axes, but its rank "i | 3" needs 2'),
    (TWO, [(7, 4), (5, 3), (5,)], CoreDimensionError, "x", "A dimension declared as 3 is 4 (x)."),
    (TWO, [(3, 7), (5, 3), (5,)], CoreDimensionError, "x", "A dimension declared as 3 is 7 (x)."),
    (TWO, [(7, 3), (3, 5), (5,)], CoreDimensionError, "yw", "pass jnp.moveaxis(y, -1, 0)."),
    (TWO, [(7, 3), (5, 2), (4,)], CoreDimensionError, "yw", "Batch axis j is 5 (y) and 4 (w)."),
    (TWO, [(7, 2), (5, 2), (5,)], CoreDimensionError, "xy", "A dimension declared as 3 is 2"),
    (GRID, [(5, 7, 3), (5, 3), (7,)], BatchShapeError, "xyw", "Batch axis i is 5 (x) and 7 (w)."),
    (GRID, [(7, 5, 3), (7, 3), (7,)], BatchShapeError, "xy", "Batch axis j is 5 (x) and 7 (y)."),
    (GRID, [(7, 5, 3), (5, 3), (5,)], BatchShapeError, "xw", "Batch axis i is 7 (x) and 5 (w)."),
    (GRID, [(7, 3), (5, 3), (7,)], RankError, "x", 'its rank "i j | 3" needs 3'),
    (GRID, [(7, 3), (5, 3), (7,)], RankError, "x", 'no axis i or j, declare it as "3".'),
    (GRID, [(7, 5, 3), (4, 3), (6,)], BatchShapeError, "xyw", "Batch axis j is 5 (x) and 4 (y)."),
    (GRID, [(7, 5, 3), (2, 5, 3), (3, 7)], BatchShapeError, "yw", "Batch axis -3 is 2 (y) and 3"),
    (GRID, [(7, 1, 3), (5, 3), (7,)], BatchShapeError, "xy", "Batch axis j is 1 (x) and 5 (y)."),
    (GRID, [(1, 5, 3), (5, 3), (7,)], BatchShapeError, "xw", "Batch axis i is 1 (x) and 7 (w)."),
    (OPEN, [(7, 3), (5, 3), ()], BatchShapeError, "xy", "Batch axis i is 7 (x) and 5 (y)."),
    (OPEN, [(7, 3), (1, 3), ()], BatchShapeError, "xy", "Batch axis i is 7 (x) and 1 (y)."),
    (OPEN, [(2, 7, 3), (7, 3), (3,)], BatchShapeError, "xw", "Batch axis -2 is 2 (x) and 3 (w)."),
    (OPEN, [(7, 3), (3,), ()], RankError, "y", 'declare it as "3".'),
    (
        SIZED,
        [(7, 4, 3), (5, 2), (7, 5)],
        CoreDimensionError,
        "xy",
        "Dimension n is 4 (x) and 2 (y)",
    ),
    (
        SIZED,
        [(7, 4, 3), (5, 4), (5, 7)],
        BatchShapeError,
        "xyw",
        "Batch axis i is 7 (x) and 5 (w).",
    ),
    (SIZED, [(7, 4, 3), (5, 4), (7,)], RankError, "w", 'its rank "i j |" needs 2'),
    (
        SIZED,
        [(4, 3), (5, 4), (7, 5)],
        RankError,
        "x",
        'x has 2 axes, but its rank "i | n 3" needs 3',
    ),
    (SIZED, [(7, 4, 3), (5, 4), (7, 6)], BatchShapeError, "yw", "Batch axis j is 5 (y) and 6 (w)."),
]


@pytest.mark.parametrize(("ranks", "shapes", "error", "marked", "sentence"), CALLS)
def test_wrong_calls_have_a_table(ranks, shapes, error, marked, sentence):
    kernel = auto_vmap(**ranks)(lambda x, y, w: jnp.sum(x) * jnp.sum(y) * w)
    arrays = [jnp.ones(shape) for shape in shapes]
    if error is None:
        assert kernel(*arrays).shape == (7, 1, 5)
        return
    text = refusal(error, kernel, *arrays)
    assert refusal(error, kernel.plan, *arrays) == text
    assert sentence in text
    rows = [line for line in text.split("\n") if line[4:6] in ("x ", "y ", "w ")]
    assert "".join(row[4] for row in rows if row[2] == ">") == marked
    for row, name, shape in zip(rows, "xyw", shapes, strict=True):
        front, _, core = str(ranks[name]).rpartition(" |")
        count = len(core.split()) if isinstance(ranks[name], str) else 0
        own = dict(
            zip(reversed(front.split()), reversed(shape[: len(shape) - count]), strict=False)
        )
        too_few = len(shape) < len(front.split()) + count
        assert str(shape) in row
        assert "too few axes" in row or not too_few
        assert too_few or all(f"{axis}={size}" in row for axis, size in own.items())


ORDERS = 'auto_vmap(gauss): the batch axes have no common order in x="i j |" and y="j i |"; '
BAR = "left of the bar are the names of batch axes, right of it the core dimensions"
DECLARED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"x": "i i | 3"},
        ValueError,
        f"x: the rank 'i i | 3' cannot be read: 'i' is there twice; {BAR}",
    ),
    (
        {"x": "i | j | 3"},
        ValueError,
        f"'i | j | 3' cannot be read: there is more than one bar; {BAR}",
    ),
    ({"x": "2 | 3"}, ValueError, "'2 | 3' cannot be read: '2' is not a name"),
    ({"x": "#i | 3"}, ValueError, "'#i | 3' cannot be read: '#i' is not a name"),
    ({"x": "_ | 3"}, ValueError, "'_ | 3' cannot be read: '_' is not a name"),
    ({"x": "i+1 | 3"}, ValueError, "'i+1 | 3' cannot be read: 'i+1' is not a name"),
    ({"x": "i, j | 3"}, ValueError, "'i, j | 3' cannot be read: 'i,' is not a name"),
    ({"x": "i | ... 3"}, ValueError, "batch axes without a name need no '...'"),
    ({"x": "i | *n"}, ValueError, "batch axes without a name need no '...'"),
    ({"x": "i | 3,4"}, ValueError, "x: the dimensions ' 3,4' cannot be read at '3,4'"),
    ({"x": "i | i"}, ValueError, "'i' is a batch axis of x and a core dimension of x"),
    ({"x": "i | 3", "y": "i"}, ValueError, "'i' is a batch axis of x and a core dimension of y"),
    ({"x": "n", "y": "n |"}, ValueError, "'n' is a batch axis of y and a core dimension of x"),
    ({"x": "i |", "y": "i i+1"}, ValueError, "'i' is a batch axis of x and a core dimension of y"),
    ({"x": "i j |", "y": "j i |"}, ValueError, ORDERS),
    ({"x": "i j |", "y": "j k |", "w": "k i |"}, ValueError, "the batch axes have no common order"),
    ({"x": SplitKey}, None, ""),
    ({**TWO, "over": "j"}, TypeError, "over=('j',) has no effect without reduce="),
    ({**TWO, "reduce": "sum", "over": "k"}, ValueError, "over names 'k', but no batch axis"),
    ({**TWO, "reduce": "sum", "over": ("j", "jj")}, ValueError, "did you mean 'j'?"),
    ({**TWO, "reduce": "sum", "over": "j j"}, ValueError, "over must name different batch axes"),
    ({**TWO, "reduce": "sum", "reduce_axis": "j"}, TypeError, "got 'j'; over='j' reduces the"),
    ({**TWO, "reduce": "sum", "over": ()}, ValueError, "over must name at least one batch axis"),
    ({**TWO, "reduce": "sum", "over": -1}, TypeError, "over must be the name of a batch axis"),
    ({**TWO, "reduce": "sum", "over": "j", "reduce_axis": -1}, TypeError, "both say which axes"),
    (
        {"x": 1, "y": 1, "w": 0, "reduce": "sum", "over": "j"},
        ValueError,
        'as in x="i | 3", y="j | 3"',
    ),
]


@pytest.mark.parametrize(("given", "error", "text"), DECLARED)
def test_wrong_declarations_are_refused_at_once(given, error, text):
    if error is None:
        auto_vmap(**given)(gauss)
    else:
        assert text in refusal(error, lambda: auto_vmap(**given)(gauss))


@pytest.mark.parametrize("given", [(), (3,), ("3",), ("i | 3",), ("i+1 |",)])
def test_split_key_takes_names_only(given):
    text = "SplitKey is the rank itself, without parentheses"
    assert text in refusal(TypeError, SplitKey, *given)


def test_ragged_items_have_the_last_name():
    items = Ragged.from_list([P[:2], P[:5]])
    first = auto_vmap(x="i | n 3", y="j | 3")(lambda x, y: jnp.sum(x) * jnp.sum(y))
    text = refusal(TypeError, first, items, S)
    assert "x is Ragged, so its batch axis must be the last one of i and j, but it is 'i'." in text
    unnamed = auto_vmap(x="n 3", y="j | 3")(lambda x, y: jnp.sum(x) * jnp.sum(y))
    assert "but it has no name." in refusal(TypeError, unnamed, items, S)
