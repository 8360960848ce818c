# SPDX-License-Identifier: MIT
"""Every mistake that `auto_vmap` can know of, and the text that explains it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import refusal
from rankax import BatchShapeError, CoreDimensionError, RankError, auto_vmap


def kernel(mass, pos, *, scale=1.0):
    return mass * jnp.sum(pos) * scale


EXPECTED = "a rank is an int >= 0, None, a dimension string, SplitKey, or a tree of those"


def text_of(kind: type[Exception], fun: Any, *args: Any, **kwargs: Any) -> str:
    """Return the text of an error of exactly this kind, in which `jax.vmap` is not heard."""
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


LACKS = "the kernel has no parameter"
NO_RANK = (
    "no rank is declared; give ranks, as in auto_vmap(0, 1), or annotate the parameters with "
    "jaxtyping"
)
AMONG_RANKS = "auto_vmap: got the function kernel among the ranks; write auto_vmap(...)(kernel)"
NO_SIZE = "chunk_size must be a positive int, got"

# What says so, and how the kernel above is decorated.
OF_A_WRONG_TYPE = {
    f"{LACKS} 'position'; it has mass, pos, scale": auto_vmap(0, position=1),
    f"{LACKS} 'mas'; did you mean 'mass'?": auto_vmap(mas=0),
    f"{LACKS} 'chunksize'; did you mean the option 'chunk_size'?": auto_vmap(0, chunksize=10),
    f"{LACKS} 'batch_size'; did you mean the option 'chunk_size'?": auto_vmap(0, batch_size=10),
    f"{LACKS} 'reduce_axes'; did you mean the option 'reduce_axis'?": auto_vmap(0, reduce_axes=0),
    f"{LACKS} 'in_axes'; auto_vmap takes ranks in place of in_axes: the number of axes of each "
    "argument for one item, as in auto_vmap(0, 1)": auto_vmap(0, in_axes=(0, None)),
    f"{LACKS} 'out_axes'; the batch axes of the outputs always come first; use jnp.moveaxis on the "
    "result": auto_vmap(0, 1, out_axes=1),
    f"{LACKS} 'signature'; pass a gufunc signature as the first argument, as in "
    "auto_vmap('(n,3),(n)->()')": auto_vmap(signature="(),(n)->()"),
    "parameter 'mass' has two ranks, 0 by position and 1 by name": auto_vmap(0, mass=1),
    "too many ranks; 3 ranks for 2 positional parameters (mass, pos)": auto_vmap(0, 1, 0),
    f"mass: {EXPECTED}; got float 1.0": auto_vmap(mass=1.0),
    f"pos: {EXPECTED}; got True": auto_vmap(0, True),
    f"mass['m'][1]: {EXPECTED}; got False": auto_vmap({"m": [0, False]}, 1),
    f"pos: {EXPECTED}; got ndarray array([1., 1.])": auto_vmap(0, np.ones(2)),
    "a gufunc signature declares every rank; drop the named ones": auto_vmap("(),(n)->()", scale=0),
    NO_RANK: auto_vmap(),
    f"{NO_SIZE} True": auto_vmap(0, 1, chunk_size=True),
    f"{NO_SIZE} 'best'; memory_limit='2 GB' picks a size that fits the memory, and "
    "kernel.tune(...) the fastest one": auto_vmap(0, 1, chunk_size="best"),
    "jit must be True or False, got None": auto_vmap(0, 1, jit=None),
}
OF_A_WRONG_VALUE = {
    f"pos: {EXPECTED}; got -1": auto_vmap(0, -1),
    f"mass.y: {EXPECTED}; got -2": auto_vmap(Point(0, -2), 1),
    f"{NO_SIZE} 0": auto_vmap(0, 1, chunk_size=0),
}
# The whole text, where another kernel is decorated, or none.
OF_OTHER_KERNELS = {
    f"auto_vmap(kernel): {NO_RANK}": lambda: auto_vmap(kernel),
    AMONG_RANKS: lambda: auto_vmap(kernel, mass=0),
    f"auto_vmap(<lambda>): {LACKS} 'x'; it has no parameters": lambda: auto_vmap(x=0)(lambda: 1.0),
    "auto_vmap(<lambda>): too many ranks; 1 rank for 0 positional parameters": (
        lambda: auto_vmap(0)(lambda *, x: x)
    ),
    "auto_vmap(...) decorates a function, got int": lambda: auto_vmap(0)(3),
    "auto_vmap(...) decorates a function, got property": lambda: auto_vmap(0)(property(kernel)),
    "auto_vmap(type): Python cannot tell the parameters of type, so ranks cannot be bound to them; "
    "wrap it in a function that names its own": lambda: auto_vmap(0)(type),
    "auto_vmap(<lambda>): chunk_size: a rank is an int >= 0, None, a dimension string, SplitKey, "
    "or a tree of those; as an option, pass it to with_options; got float 2.5": (
        lambda: auto_vmap(0, chunk_size=2.5)(lambda x, chunk_size: x)
    ),
    "auto_vmap(<lambda>): 'in_axes' would be the rank of an item of **kwargs; auto_vmap takes "
    "ranks in place of in_axes: the number of axes of each argument for one item, as in "
    "auto_vmap(0, 1) (for an item of that name, write ranks={'in_axes': ...})": (
        lambda: auto_vmap(0, in_axes=0)(lambda x, **kwargs: x)
    ),
}


@pytest.mark.parametrize(
    ("text", "decorate", "kind"),
    [
        *((*row, TypeError) for row in OF_A_WRONG_TYPE.items()),
        *((*row, ValueError) for row in OF_A_WRONG_VALUE.items()),
    ],
)
def test_mistakes_known_when_decorating(text, decorate, kind):
    assert refusal(kind, decorate, kernel) == f"auto_vmap(kernel): {text}"


@pytest.mark.parametrize(
    ("text", "decorate"),
    [*OF_OTHER_KERNELS.items(), (AMONG_RANKS, lambda: auto_vmap(0, kernel))],
)
def test_kernels_that_cannot_be_decorated(text, decorate):
    assert refusal(TypeError, decorate) == text


# When calling. With `jit` the same texts, before the kernel is traced.


@pytest.fixture(params=[{}, {"chunk_size": 2, "jit": True}], ids=str)
def decorate(request):
    return functools.partial(auto_vmap, **request.param)


def untraced(mass, pos, scale=1.0):
    raise AssertionError("the kernel must not be traced")


UNTRACED = f"untraced() at {__file__}:{untraced.__code__.co_firstlineno}"


def ones(*shape):
    return np.ones(shape, np.float32)


def pairs(first, second, passed):
    return f"To combine every {first} with every {second}, pass {passed}."


def leading(argument, passed):
    return (
        f"Batch axes come first; if the last axis of {argument} is the batch axis, pass {passed}."
    )


ORBIT, TREE = {"x": ones(5), "y": ones(5, 2)}, {"x": 0, "y": 1}
BY_TREE = pairs("mass", "pos", "jax.tree.map(lambda x: x[:, None], mass)")

# The ranks, the arguments, and the advice below the table.
HINTS = {
    "a tree": ((TREE, 1), (ORBIT, ones(4, 3)), [BY_TREE]),
    # `jax.tree.map` would add an axis to what is shared, and to what is left alone.
    "a shared leaf": ((TREE, 1), ({"x": ones(5), "y": ones(2)}, ones(4, 3)), []),
    "an untouched leaf": (
        ({"x": 0, "y": None}, 1),
        (ORBIT, ones(4, 3)),
        [pairs("mass['x']", "pos", "mass['x'][:, None]")],
    ),
    "three": (
        (0, 1, 0),
        (ones(4), ones(5, 3), ones(6)),
        [pairs("mass", "pos and every scale", "mass[:, None, None] and pos[:, None]")],
    ),
    "the last axis": (
        (0, 1),
        (ones(9), ones(3, 9)),
        [leading("pos", "jnp.moveaxis(pos, -1, 0)"), pairs("mass", "pos", "mass[:, None]")],
    ),
    "rather five vectors of three": (
        (0, 1),
        (ones(3), ones(5, 3)),
        [
            pairs("mass", "pos", "mass[:, None]"),
            "If one item of mass is a vector, its rank is 1, not 0.",
        ],
    ),
    "the last axis of a tree": (
        ({"x": 1, "m": 0}, 1),
        ({"x": ones(2, 9), "m": ones(9)}, ones(9, 3)),
        [leading("mass", "jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), mass)")],
    ),
}


@pytest.mark.parametrize(("ranks", "args", "hints"), HINTS.values(), ids=HINTS)
def test_batch_axes_that_clash(decorate, ranks, args, hints):
    about, _, below = text_of(BatchShapeError, decorate(*ranks)(untraced), *args).split("\n\n")
    assert about == f"{UNTRACED}: the batch axes do not broadcast together"
    clashes, *advice = below.split("\n")
    assert clashes.startswith("Batch axis")
    assert advice == hints


def test_items_of_args_are_named_in_advice(decorate):
    f = decorate(xs=1)(lambda *xs: untraced(*xs))
    text = text_of(BatchShapeError, f, ones(9, 2), ones(3, 9))
    assert f"\n{leading('xs[1]', 'jnp.moveaxis(xs[1], -1, 0)')}\n" in text
    text = text_of(BatchShapeError, f, ones(4, 3), ones(5, 3))
    assert text.endswith(f"\n{pairs('xs[0]', 'xs[1]', 'xs[0][:, None]')}")


def test_a_core_dimension_that_is_the_batch_axis(decorate):
    f = decorate("", "3")(untraced)
    text = text_of(CoreDimensionError, f, 1.0, ones(3, 9))
    assert text.endswith(
        "\n\nA dimension declared as 3 is 9 (pos).\n"
        "Batch axes come first; if the last axis of pos is the batch axis, pass "
        "jnp.moveaxis(pos, -1, 0)."
    )


class Series:
    """Like a column of pandas: it converts to an array, and its repr is a table."""

    def __array__(self, dtype=None, copy=None):
        return np.ones(2, dtype)

    def __repr__(self):
        return "0    1.0\n1    1.0\nName: a, dtype: float64"


NO_ARRAY = "untraced(): mass has a rank, so it must be an array or a number, but it is {}"
WITHOUT_RANK = f"{NO_ARRAY}; a parameter that takes other objects has rank None"
CONVERT = (
    f"{NO_ARRAY.format('ndarray (an array of dtype {})')}; convert it to numbers first, such as "
    "mass.astype(float)"
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"abc", WITHOUT_RANK.format("bytes (b'abc')")),
        ({1, 2}, WITHOUT_RANK.format("set ({1, 2})")),
        (np.str_("abc"), WITHOUT_RANK.format("str_ (np.str_('abc'))")),
        ((1.0, ["x"]), WITHOUT_RANK.replace("mass", "mass[1][0]").format("str ('x')")),
        (np.array(["a", "b"]), CONVERT.format("<U1")),
        (np.array([1, None]), CONVERT.format("object")),
        (np.zeros(2, [("a", "f4")]), CONVERT.format("[('a', '<f4')]")),
        (Series(), f"{NO_ARRAY.format('Series')}; pass jnp.asarray(mass)"),
        (
            jax.ShapeDtypeStruct((4,), jnp.float32),
            "untraced(): mass is a ShapeDtypeStruct, which has no values; pass it through "
            "jax.eval_shape(untraced, ...), or to untraced.plan(...)",
        ),
    ],
)
def test_a_ranked_argument_that_is_no_array(decorate, value, text):
    assert text_of(TypeError, decorate(0, 1)(untraced), value, ones(2, 3)) == text


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ([[1, 2], [3, 4]], "pos"),
        ([True, *np.arange(3)], "pos"),
        ({"a": [1.0, 2.0]}, "pos['a']"),
    ],
    ids=str,
)
def test_a_list_of_numbers_where_an_array_is_meant(decorate, value, name):
    f = decorate(0, 1)(untraced)
    assert text_of(TypeError, f, ones(2), value) == (
        f"untraced(): {name} is a list of numbers, but an array is expected; pass "
        f"jnp.asarray({name}). (For a list of separate scalars, declare a rank for each.)"
    )


def test_a_list_of_numbers_with_a_rank_for_each_is_a_tree(decorate):
    f = decorate([0, 0], 0)(lambda pair, x: pair[0] * x + pair[1])
    np.testing.assert_array_equal(f([2.0, 1.0], jnp.arange(3.0)), [1.0, 3.0, 5.0])


MISFITS = {
    "entries": (
        ({"a": {"x": 0}}, [0]),
        ({"a": {"y": 1.0, "z": 2.0}}, [1.0]),
        "the rank of mass['a'] has an entry for mass['a']['x'], which is absent; the rank of "
        "mass['a'] has no entry for mass['a']['y'] and mass['a']['z'] (None would leave it as it "
        "is)",
    ),
    "length": (
        (None, [0]),
        (None, [1.0, 2.0]),
        "the rank of pos has no entry for pos[1] (None would leave it as it is)",
    ),
    "array": (
        ((0, 1), None),
        (ones(3), None),
        "the rank of mass is a tuple of 2 entries, but mass is an array of shape (3,)",
    ),
    "type": (
        (Point(0, 1), None),
        ((1.0, ones(3)), None),
        "the rank of mass is a Point of 2 entries, but mass is tuple",
    ),
}


@pytest.mark.parametrize(("ranks", "args", "text"), MISFITS.values(), ids=MISFITS)
def test_rank_trees_that_do_not_fit(decorate, ranks, args, text):
    assert text_of(ValueError, decorate(*ranks)(untraced), *args) == f"{UNTRACED}: {text}"


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1.0,), {}, "untraced() missing a required argument: 'pos'"),
        ((1.0, 2.0, 3.0, 4.0), {}, "untraced() too many positional arguments"),
        ((1.0,), {"mass": 1.0, "pos": 2.0}, "untraced() multiple values for argument 'mass'"),
        ((1.0, 2.0), {"size": 3}, "untraced() got an unexpected keyword argument 'size'"),
    ],
)
def test_arguments_that_do_not_fit_the_kernel(decorate, args, kwargs, text):
    assert text_of(TypeError, decorate(0, 0)(untraced), *args, **kwargs) == text


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
