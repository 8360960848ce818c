# SPDX-License-Identifier: MIT
"""Every mistake that `auto_vmap` can know of, and the text that explains it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rankax import BatchShapeError, CoreDimensionError, RankError, auto_vmap


def kernel(mass, pos, *, scale=1.0):
    return mass * jnp.sum(pos) * scale


HERE = f"kernel() at {__file__}:{kernel.__code__.co_firstlineno}"
EXPECTED = "a rank is an int >= 0, None, a dimension string, SplitKey, or a tree of those"


def text_of(kind: type[Exception], fun: Any, *args: Any, **kwargs: Any) -> str:
    """Return the text of the error, which must be of exactly this kind and never speak of axes
    that only `jax.vmap` knows.
    """
    with pytest.raises(kind) as caught:
        fun(*args, **kwargs)
    text = str(caught.value)
    assert caught.type is kind
    assert "in_axes" not in text
    assert "vmap got" not in text
    return text


# When decorating.


class Point(NamedTuple):
    x: Any
    y: Any


DECORATION = {
    "unknown name": (
        lambda: auto_vmap(0, position=1)(kernel),
        TypeError,
        "auto_vmap(kernel): the kernel has no parameter 'position'; it has mass, pos, scale",
    ),
    "misspelt name": (
        lambda: auto_vmap(mas=0)(kernel),
        TypeError,
        "auto_vmap(kernel): the kernel has no parameter 'mas'; did you mean 'mass'?",
    ),
    "no parameters": (
        lambda: auto_vmap(x=0)(lambda: 1.0),
        TypeError,
        "auto_vmap(<lambda>): the kernel has no parameter 'x'; it has no parameters",
    ),
    "two ranks": (
        lambda: auto_vmap(0, mass=1)(kernel),
        TypeError,
        "auto_vmap(kernel): parameter 'mass' has two ranks, 0 by position and 1 by name",
    ),
    "too many": (
        lambda: auto_vmap(0, 1, 0)(kernel),
        TypeError,
        "auto_vmap(kernel): too many ranks; 3 ranks for 2 positional parameters (mass, pos)",
    ),
    "too many for none": (
        lambda: auto_vmap(0)(lambda *, x: x),
        TypeError,
        "auto_vmap(<lambda>): too many ranks; 1 rank for 0 positional parameters",
    ),
    "negative": (
        lambda: auto_vmap(0, -1)(kernel),
        ValueError,
        f"auto_vmap(kernel): pos: {EXPECTED}; got -1",
    ),
    "float": (
        lambda: auto_vmap(mass=1.0)(kernel),
        TypeError,
        f"auto_vmap(kernel): mass: {EXPECTED}; got float 1.0",
    ),
    "bool": (
        lambda: auto_vmap(0, True)(kernel),
        TypeError,
        f"auto_vmap(kernel): pos: {EXPECTED}; got True",
    ),
    "bool in a tree": (
        lambda: auto_vmap({"m": [0, False]}, 1)(kernel),
        TypeError,
        f"auto_vmap(kernel): mass['m'][1]: {EXPECTED}; got False",
    ),
    "negative in a tree": (
        lambda: auto_vmap(Point(0, -2), 1)(kernel),
        ValueError,
        f"auto_vmap(kernel): mass.y: {EXPECTED}; got -2",
    ),
    "an array": (
        lambda: auto_vmap(0, np.ones(2))(kernel),
        TypeError,
        f"auto_vmap(kernel): pos: {EXPECTED}; got ndarray array([1., 1.])",
    ),
    "none at all": (
        lambda: auto_vmap()(kernel),
        TypeError,
        "auto_vmap(kernel): no rank is declared; give ranks, as in auto_vmap(0, 1), or annotate "
        "the parameters with jaxtyping",
    ),
    "none at all, bare": (
        lambda: auto_vmap(kernel),
        TypeError,
        "auto_vmap(kernel): no rank is declared; give ranks, as in auto_vmap(0, 1), or annotate "
        "the parameters with jaxtyping",
    ),
    "function among the ranks": (
        lambda: auto_vmap(0, kernel),
        TypeError,
        "auto_vmap: got the function kernel among the ranks; write auto_vmap(...)(kernel)",
    ),
    "function and names": (
        lambda: auto_vmap(kernel, mass=0),
        TypeError,
        "auto_vmap: got the function kernel among the ranks; write auto_vmap(...)(kernel)",
    ),
    "no function": (
        lambda: auto_vmap(0)(3),
        TypeError,
        "auto_vmap(...) decorates a function, got int",
    ),
    "property": (
        lambda: auto_vmap(0)(property(kernel)),
        TypeError,
        "auto_vmap(...) decorates a function, got property",
    ),
    "no signature": (
        lambda: auto_vmap(0)(type),
        TypeError,
        "auto_vmap(type): Python cannot tell the parameters of type, so ranks cannot be bound to "
        "them; wrap it in a function that names its own",
    ),
    "option of the same name": (
        lambda: auto_vmap(0, chunk_size=3)(lambda x, chunk_size: x),
        TypeError,
        "auto_vmap(<lambda>): chunk_size=3 is the option of auto_vmap, but the kernel has a "
        "parameter 'chunk_size' too; give it its rank with ranks={'chunk_size': ...}, "
        "by position, in a signature or by annotation (None leaves it untouched)",
    ),
    "options that are no option": (
        lambda: auto_vmap(0, 1, donate=True)(kernel),
        TypeError,
        "auto_vmap(kernel): the kernel has no parameter 'donate'; it has mass, pos, scale",
    ),
    "signature and names": (
        lambda: auto_vmap("(),(n)->()", scale=0)(kernel),
        TypeError,
        "auto_vmap(kernel): a gufunc signature declares every rank; drop the named ones",
    ),
}


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ({"chunksize": 10}, "did you mean the option 'chunk_size'?"),
        ({"chunks": 10}, "did you mean the option 'chunk_size'?"),
        ({"batch_size": 10}, "did you mean the option 'chunk_size'?"),
        ({"batchsize": 10}, "did you mean the option 'chunk_size'?"),
        ({"reduce_axes": 0}, "did you mean the option 'reduce_axis'?"),
        (
            {"in_axes": (0, None)},
            "auto_vmap takes ranks in place of in_axes: the number of axes of each argument for "
            "one item, as in auto_vmap(0, 1)",
        ),
        (
            {"out_axes": 1},
            "the batch axes of the outputs always come first; use jnp.moveaxis on the result",
        ),
        (
            {"signature": "(),(n)->()"},
            "pass a gufunc signature as the first argument, as in auto_vmap('(n,3),(n)->()')",
        ),
        ({"scales": 0}, "did you mean 'scale'?"),
    ],
    ids=str,
)
def test_names_that_are_options_elsewhere(option, hint):
    (name,) = option
    with pytest.raises(TypeError) as caught:
        auto_vmap(0, 1, **option)(kernel)
    assert str(caught.value) == f"auto_vmap(kernel): the kernel has no parameter {name!r}; {hint}"


def test_in_axes_is_no_rank_of_an_item():
    with pytest.raises(TypeError) as caught:
        auto_vmap(0, in_axes=0)(lambda x, **kwargs: x)
    assert str(caught.value) == (
        "auto_vmap(<lambda>): 'in_axes' would be the rank of an item of **kwargs; auto_vmap takes "
        "ranks in place of in_axes: the number of axes of each argument for one item, as in "
        "auto_vmap(0, 1) (for an item of that name, write ranks={'in_axes': ...})"
    )


@pytest.mark.parametrize("case", DECORATION)
def test_mistakes_known_when_decorating(case):
    decorate, kind, text = DECORATION[case]
    assert text_of(kind, decorate) == text


@pytest.mark.parametrize(
    ("chunk_size", "kind", "text"),
    [
        (0, ValueError, "got 0"),
        (-3, ValueError, "got -3"),
        (True, TypeError, "got True"),
        (2.0, TypeError, "got float 2.0"),
        (
            "best",
            TypeError,
            "got 'best'; memory_limit='2 GB' picks a size that fits the memory, and "
            "kernel.tune(...) the fastest one",
        ),
    ],
)
def test_chunk_sizes_that_are_none(chunk_size, kind, text):
    expected = f"auto_vmap(kernel): chunk_size must be a positive int, {text}"
    assert text_of(kind, auto_vmap(0, 1, chunk_size=chunk_size), kernel) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("jit", 1), ("jit", None), ("jit", "yes"), ("checkpoint", 1), ("checkpoint", "yes")],
)
def test_flags_that_are_none(name, value):
    expected = f"auto_vmap(kernel): {name} must be True or False, got {value!r}"
    assert text_of(TypeError, auto_vmap(0, 1, **{name: value}), kernel) == expected


def test_names_that_are_also_options_take_their_rank_by_position():
    mapped = auto_vmap(0, 1, None, chunk_size=2)(lambda x, jit, chunk_size: x * jnp.sum(jit))
    got = mapped(jnp.arange(3.0), jnp.ones((3, 2)), "anything")
    np.testing.assert_array_equal(got, [0.0, 2.0, 4.0])


def test_a_callable_rank_tree_among_the_ranks_is_a_rank_tree():
    @jax.tree_util.register_pytree_node_class
    class Model:
        def __init__(self, w, b):
            self.w, self.b = w, b

        def __call__(self, x):
            return jnp.dot(self.w, x) + self.b

        def tree_flatten(self):
            return (self.w, self.b), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    mapped = auto_vmap(Model(1, 0), 1)(lambda model, x: model(x))
    got = mapped(Model(jnp.ones((4, 3)), jnp.arange(4.0)), jnp.arange(3.0))
    np.testing.assert_array_equal(got, [3.0, 4.0, 5.0, 6.0])


# When calling. With `jit` the same texts, before the kernel is traced.


@pytest.fixture(params=[{}, {"jit": True}, {"chunk_size": 2}], ids=str)
def decorate(request):
    def with_ranks(*ranks, **named):
        def never(fun):
            mapped = auto_vmap(*ranks, **named, **request.param)(fun)

            def call(*args, **kwargs):
                return mapped(*args, **kwargs)

            return call

        return never

    return with_ranks


def untraced(mass, pos, *, scale=1.0):
    raise AssertionError("the kernel must not be traced")


UNTRACED = f"untraced() at {__file__}:{untraced.__code__.co_firstlineno}"


def about_and_hints(text: str) -> tuple[str, list[str]]:
    """Return what stands above and below the table of the arguments."""
    about, _, below = text.split("\n\n")
    return about, below.split("\n")


def test_too_few_axes(decorate):
    f = decorate(0, 2)(untraced)
    about = f"{UNTRACED}: an argument has fewer axes than its rank"
    assert about_and_hints(text_of(RankError, f, jnp.ones(4), jnp.ones(3))) == (
        about,
        ["pos has 1 axis, but its rank 2 needs 2; did you mean pos[None]?"],
    )
    assert about_and_hints(text_of(RankError, f, 1.0, 2.0)) == (
        about,
        ["pos has 0 axes, but its rank 2 needs 2."],
    )


def test_batch_axes_that_clash(decorate):
    f = decorate(0, 1, scale=0)(untraced)
    assert about_and_hints(text_of(BatchShapeError, f, jnp.ones(4), jnp.ones((5, 3)))) == (
        f"{UNTRACED}: the batch axes do not broadcast together",
        [
            "Batch axis -1 is 4 (mass) and 5 (pos).",
            "To combine every mass with every pos, pass mass[:, None].",
        ],
    )


def hints_of(f, *args, **kwargs) -> list[str]:
    """Return the sentences below the table, without those that say what clashes."""
    _, sentences = about_and_hints(text_of(BatchShapeError, f, *args, **kwargs))
    return [line for line in sentences if not line.startswith("Batch axis")]


def test_trees_that_may_be_meant_for_an_outer_product(decorate):
    f = decorate(0, 1, scale={"x": 0, "y": 1})(untraced)
    orbit = {"x": jnp.ones(5), "y": jnp.ones((5, 2))}
    assert hints_of(f, 1.0, jnp.ones((4, 3)), scale=orbit) == [
        "To combine every pos with every scale, pass pos[:, None]."
    ]
    f = decorate({"x": 0, "y": 1}, 1)(untraced)
    assert hints_of(f, orbit, jnp.ones((4, 3))) == [
        "To combine every mass with every pos, pass jax.tree.map(lambda x: x[:, None], mass)."
    ]
    shared = {"x": jnp.ones(5), "y": jnp.ones(2)}  # jax.tree.map would add a core axis to y
    assert hints_of(f, shared, jnp.ones((4, 3))) == []
    f = decorate({"x": 0, "y": None}, 1)(untraced)  # and here, to an untouched array
    assert hints_of(f, orbit, jnp.ones((4, 3))) == [
        "To combine every mass['x'] with every pos, pass mass['x'][:, None]."
    ]


def test_several_arguments_of_an_outer_product(decorate):
    f = decorate(0, 1, scale=0)(untraced)
    assert hints_of(f, jnp.ones(4), jnp.ones((5, 3)), scale=jnp.ones(4)) == [
        "To combine every pos with every mass and scale, pass pos[:, None]."
    ]
    assert hints_of(f, jnp.ones(4), jnp.ones((5, 3)), scale=jnp.ones(6)) == [
        "To combine every mass with every pos and every scale, pass mass[:, None, None] and "
        "pos[:, None]."
    ]
    mapped = auto_vmap(0, 1, scale=0)(kernel)
    mass, pos, scale = jnp.arange(4.0), jnp.arange(15.0).reshape(5, 3), jnp.arange(6.0)
    out = mapped(mass[:, None, None], pos[:, None], scale=scale)
    np.testing.assert_array_equal(out, np.einsum("a,bc,d->abd", mass, pos, scale))


def test_items_of_args_that_may_be_meant_for_an_outer_product(decorate):
    f = decorate(xs=0)(lambda *xs: untraced(*xs))
    assert hints_of(f, jnp.ones(4), jnp.ones(5)) == [
        "To combine every xs[0] with every xs[1], pass xs[0][:, None]."
    ]


def test_a_batch_axis_that_is_the_last_one(decorate):
    f = decorate(0, 1)(untraced)
    assert hints_of(f, jnp.ones(9), jnp.ones((3, 9))) == [
        "Batch axes come first; if the last axis of pos is the batch axis, pass "
        "jnp.moveaxis(pos, -1, 0).",
        "To combine every mass with every pos, pass mass[:, None].",
    ]
    assert hints_of(f, jnp.ones(3), jnp.ones((5, 3))) == [  # rather five vectors of three
        "To combine every mass with every pos, pass mass[:, None].",
        "If one item of mass is a vector, its rank is 1, not 0.",
    ]
    f = decorate({"x": 1, "m": 0}, 1)(untraced)
    body = {"x": jnp.ones((2, 9)), "m": jnp.ones(9)}
    assert hints_of(f, body, jnp.ones((9, 3))) == [
        "Batch axes come first; if the last axis of mass is the batch axis, pass "
        "jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), mass)."
    ]
    f = decorate(xs=1)(lambda *xs: untraced(*xs))
    assert hints_of(f, jnp.ones((9, 2)), jnp.ones((3, 9)))[:1] == [
        "Batch axes come first; if the last axis of xs[1] is the batch axis, pass "
        "jnp.moveaxis(xs[1], -1, 0)."
    ]
    assert hints_of(f, jnp.ones((4, 3)), jnp.ones((5, 3))) == [
        "To combine every xs[0] with every xs[1], pass xs[0][:, None]."
    ]


def test_a_core_dimension_that_is_the_batch_axis(decorate):
    f = decorate("", "3")(untraced)
    text = text_of(CoreDimensionError, f, 1.0, jnp.ones((3, 9)))
    assert text.endswith(
        "\n\nA dimension declared as 3 is 9 (pos).\n"
        "Batch axes come first; if the last axis of pos is the batch axis, pass "
        "jnp.moveaxis(pos, -1, 0)."
    )
    f = decorate("n", "n m")(untraced)
    text = text_of(CoreDimensionError, f, jnp.ones(3), jnp.ones((9, 4, 5)))
    assert text.endswith("\n\nDimension n is 3 (mass) and 4 (pos).")


def test_every_clash_is_reported_at_once(decorate):
    f = decorate({"a": 0, "b": 0}, 1, scale=2)(untraced)
    args = ({"a": jnp.ones((2, 4)), "b": jnp.ones((3, 1))}, jnp.ones((2, 5, 7)))
    text = text_of(RankError, f, *args, scale=jnp.ones(6))
    assert text == (
        f"{UNTRACED}: an argument has fewer axes than its rank and the batch axes do not "
        "broadcast together\n"
        "\n"
        "    argument   shape      rank  batch axes\n"
        "  > mass['a']  (2, 4)     0     (2, 4)\n"
        "  > mass['b']  (3, 1)     0     (3, 1)\n"
        "  > pos        (2, 5, 7)  1     (2, 5)\n"
        "  > scale      (6,)       2     too few axes\n"
        "\n"
        "scale has 1 axis, but its rank 2 needs 2; did you mean scale[None]?\n"
        "Batch axis -2 is 2 (mass['a'], pos) and 3 (mass['b']).\n"
        "Batch axis -1 is 4 (mass['a']) and 5 (pos)."
    )


def test_zero_is_a_length_like_any_other(decorate):
    f = decorate(0, 1)(untraced)
    text = text_of(BatchShapeError, f, jnp.ones(0), jnp.ones((5, 3)))
    assert "Batch axis -1 is 0 (mass) and 5 (pos)." in text


def test_paths_are_the_callers_own(decorate):
    @decorate(Point(0, 1), rest=(0, 1), others={"w": 0})
    def f(point, *rest, **others):
        raise AssertionError("the kernel must not be traced")

    point = Point(jnp.ones(2), jnp.ones((2, 3)))
    text = text_of(
        BatchShapeError, f, point, (1.0, jnp.ones((4, 3))), (1.0, jnp.ones(3)), key={"w": 1.0}
    )
    rows = [line.removeprefix("  >").split() for line in text.split("\n")[3:10]]
    assert [row[0] for row in rows] == [
        "point.x",
        "point.y",
        "rest[0][0]",
        "rest[0][1]",
        "rest[1][0]",
        "rest[1][1]",
        "others['key']['w']",
    ]
    assert "Batch axis -1 is 2 (point.x, point.y) and 4 (rest[0][1])." in text


NOT_AN_ARRAY = (
    "untraced(): mass has a rank, so it must be an array or a number, but it is {}; a parameter "
    "that takes other objects has rank None"
)
NO_NUMBERS = (
    "untraced(): mass has a rank, so it must be an array or a number, but it is ndarray (an array "
    "of dtype {}); convert it to numbers first, such as mass.astype(float)"
)


@pytest.mark.parametrize(
    ("value", "came"),
    [
        ("abc", "str ('abc')"),
        (b"abc", "bytes (b'abc')"),
        (len, "builtin_function_or_method (<built-in function len>)"),
        ({1, 2}, "set ({1, 2})"),
        (np.str_("abc"), "str_ (np.str_('abc'))"),
        (range(3), "range (range(0, 3))"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_ranked_argument_that_is_no_array(decorate, value, came):
    f = decorate(0, 1)(untraced)
    assert text_of(TypeError, f, value, jnp.ones((2, 3))) == NOT_AN_ARRAY.format(came)


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a", "b"]),
        np.array([1, None]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(2, [("a", "f4")]),
    ],
    ids=lambda value: str(value.dtype),
)
def test_an_array_without_numbers_is_to_be_converted(decorate, value):
    f = decorate(0, 1)(untraced)
    assert text_of(TypeError, f, value, jnp.ones((2, 3))) == NO_NUMBERS.format(value.dtype)


class Series:
    """Like a column of pandas: it converts to an array, and its repr is a table."""

    def __array__(self, dtype=None, copy=None):
        return np.ones(2, dtype)

    def __repr__(self):
        return "0    1.0\n1    1.0\nName: a, dtype: float64"


def test_what_converts_to_an_array_is_to_be_converted(decorate):
    f = decorate(0, 1)(untraced)
    assert text_of(TypeError, f, Series(), jnp.ones((2, 3))) == (
        "untraced(): mass has a rank, so it must be an array or a number, but it is Series; pass "
        "jnp.asarray(mass)"
    )


def test_a_leaf_that_is_no_array_is_named_by_its_path(decorate):
    f = decorate({"m": 0}, None)(untraced)
    text = text_of(TypeError, f, {"m": (1.0, ["x"])}, None)
    assert text == NOT_AN_ARRAY.replace("mass", "mass['m'][1][0]").format("str ('x')")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ([1.0, 2.0, 3.0], "pos"),
        ([[1, 2], [3, 4]], "pos"),
        ([True, 2j], "pos"),
        (list(np.arange(3)), "pos"),
        ({"a": [1.0, 2.0]}, "pos['a']"),
        ((jnp.ones(3), [1.0]), "pos[1]"),
    ],
    ids=str,
)
def test_a_list_of_numbers_where_an_array_is_meant(decorate, value, name):
    f = decorate(0, 1)(untraced)
    assert text_of(TypeError, f, jnp.ones(2), value) == (
        f"untraced(): {name} is a list of numbers, but an array is expected; pass "
        f"jnp.asarray({name}). (For a list of separate scalars, declare a rank for each.)"
    )


def test_a_list_of_numbers_with_a_rank_for_each_is_a_tree(decorate):
    f = decorate([0, 0], 0)(lambda pair, x: pair[0] * x + pair[1])
    np.testing.assert_array_equal(f([2.0, 1.0], jnp.arange(3.0)), [1.0, 3.0, 5.0])


MISFITS = {
    "missing entry": (
        ({"a": 0, "b": 1}, None),
        ({"a": jnp.ones(3)}, None),
        "the rank of mass has an entry for mass['b'], which is absent",
    ),
    "extra entry": (
        ({"a": 0}, None),
        ({"a": 1.0, "c": 1.0}, None),
        "the rank of mass has no entry for mass['c'] (None would leave it as it is)",
    ),
    "both": (
        ({"a": {"x": 0}}, None),
        ({"a": {"y": 1.0, "z": 2.0}}, None),
        "the rank of mass['a'] has an entry for mass['a']['x'], which is absent; the rank of "
        "mass['a'] has no entry for mass['a']['y'] and mass['a']['z'] (None would leave it as it "
        "is)",
    ),
    "array for a tuple": (
        ((0, 1), None),
        (jnp.ones(3), None),
        "the rank of mass is a tuple of 2 entries, but mass is an array of shape (3,)",
    ),
    "other type": (
        (Point(0, 1), None),
        ((1.0, jnp.ones(3)), None),
        "the rank of mass is a Point of 2 entries, but mass is tuple",
    ),
    "length": (
        (None, [0]),
        (None, [1.0, 2.0]),
        "the rank of pos has no entry for pos[1] (None would leave it as it is)",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_rank_trees_that_do_not_fit(decorate, case):
    ranks, args, text = MISFITS[case]
    f = decorate(*ranks)(untraced)
    assert text_of(ValueError, f, *args) == f"{UNTRACED}: {text}"


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, "untraced() missing a required argument: 'mass'"),
        ((1.0,), {}, "untraced() missing a required argument: 'pos'"),
        ((1.0, 2.0, 3.0), {}, "untraced() too many positional arguments"),
        ((1.0,), {"mass": 1.0, "pos": 2.0}, "untraced() multiple values for argument 'mass'"),
        ((1.0, 2.0), {"size": 3}, "untraced() got an unexpected keyword argument 'size'"),
    ],
)
def test_arguments_that_do_not_fit_the_kernel(decorate, args, kwargs, text):
    assert text_of(TypeError, decorate(0, 0)(untraced), *args, **kwargs) == text


def test_a_shape_in_place_of_an_array(decorate):
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    f = decorate(0, 0)(untraced)
    assert text_of(TypeError, f, shape, 1.0) == (
        "untraced(): mass is a ShapeDtypeStruct, which has no values; pass it through "
        "jax.eval_shape(untraced, ...), or to untraced.plan(...)"
    )


def test_the_plan_raises_what_the_call_raises():
    mapped = auto_vmap(0, 1)(untraced)
    for args in [(jnp.ones(4), jnp.ones((5, 3))), (jnp.ones(4), 1.0)]:
        kind = BatchShapeError if jnp.ndim(args[1]) else RankError
        assert text_of(kind, mapped.plan, *args) == text_of(kind, mapped, *args)


def test_errors_name_what_the_user_wrote():
    class Model:
        def __call__(self, x):
            return x

        @auto_vmap(x=1)
        def method(self, x):
            return x

    line = Model.method.__wrapped__.__code__.co_firstlineno
    text = text_of(RankError, Model().method, 1.0)
    assert text.startswith(f"method() at {__file__}:{line}: an argument has fewer axes")
    mapped = auto_vmap(1)(Model())
    line = Model.__call__.__code__.co_firstlineno
    assert text_of(RankError, mapped, 1.0).startswith(f"Model() at {__file__}:{line}: ")


def test_the_errors_are_value_errors_of_rankax():
    for error in (RankError, BatchShapeError):
        assert issubclass(error, ValueError)
        assert error.__module__ == "rankax"


def test_an_error_of_the_kernel_itself_is_left_alone():
    class OwnError(Exception):
        pass

    def fails(x):
        raise OwnError("from inside")

    for options in ({}, {"chunk_size": 2}, {"jit": True}):
        assert text_of(OwnError, auto_vmap(0, **options)(fails), jnp.ones(3)) == "from inside"
