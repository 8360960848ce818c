# SPDX-License-Identifier: MIT
"""Dimension strings: how many axes each stands for, and which sizes agree."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from rankax import CoreDimensionError, RankError, auto_vmap
from rankax.plans import BatchPlan


class Pair(NamedTuple):
    x: Float[Array, "n"]
    y: Float[Array, "m 2"]


def first(*arrays):
    return arrays[0]


def planned(*leaves: tuple[str, tuple[int, ...]]) -> BatchPlan:
    """Plan a kernel whose parameters ``a, b, c...`` have these dimensions and shapes."""
    names = "abcdef"[: len(leaves)]
    kernel = eval(f"lambda {', '.join(names)}: None")
    kernel.__annotations__ = {
        n: Float[Array, dims] for n, (dims, _) in zip(names, leaves, strict=True)
    }
    return auto_vmap(kernel).plan(*[jax.ShapeDtypeStruct(shape, float) for _, shape in leaves])


def clashes(*leaves: tuple[str, tuple[int, ...]]) -> list[str]:
    """Sentences about leaves of a dimension string and a core shape each."""
    try:
        planned(*leaves)
    except CoreDimensionError as error:
        return str(error).split("\n\n")[-1].split("\n")
    return []


@pytest.mark.parametrize(
    ("text", "core"),
    [
        ("", ()),
        (" n  3 ", (5, 3)),
        ("*batch n 3", (5, 3)),
        ("... 3", (3,)),
        ("*#batch n", (5,)),
        ("*_ n", (5,)),
        ("*batch", ()),
        ("_ _n 3", (5, 6, 3)),
        ("#n #3", (1, 1)),
        ("rows=4 cols=n", (4, 5)),
        ("n+1 2*n n-1 n//2 max(n,m)", (5, 6, 7, 8, 9)),
        ("{k} n", (5, 6)),
        ("?n 3", (5, 3)),
    ],
)
def test_the_rank_is_the_number_of_words_after_a_variadic(text, core):
    (leaf,) = planned((text, (2, *core))).leaves
    assert (leaf.rank, leaf.batch_axes, leaf.core_shape) == (len(core), (2,), core)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n *rest", "the dimensions 'n *rest' have a variadic that is not the first word; batch"),
        ("n,3", "the dimensions 'n,3' cannot be read at 'n,3': separate names and sizes with"),
        ("n +", "the dimensions 'n +' cannot be read at '+': a dimension is a name, a size, '_'"),
        ("-3", "the dimensions '-3' cannot be read at '-3': a size must not be negative"),
        ("(n)->()", "'(n)->()' looks like a gufunc signature"),
    ],
)
def test_a_string_that_cannot_be_read_is_an_error_at_decoration(text, message):
    with pytest.raises(ValueError, match="^" + re.escape(f"auto_vmap(first): arrays: {message}")):
        auto_vmap(arrays=text)(first)


def test_every_disagreement_is_reported():
    assert clashes(("n 3", (5, 3)), ("n", (5,)), ("k=3 _", (3, 9)), ("", ())) == []
    assert clashes(("k=4", (5,))) == ["A dimension declared as k=4 is 5 (a)."]
    assert clashes(("n 3", (5, 4)), ("n m", (6, 2)), ("m n", (2, 5))) == [
        "Dimension n is 5 (a, c) and 6 (b).",
        "A dimension declared as 3 is 4 (a).",
    ]


@pytest.mark.parametrize("swap", [False, True])
def test_expressions_do_not_depend_on_the_order_of_arguments(swap):
    order = slice(None, None, -1 if swap else 1)
    good = [("n", (4,)), ("n+1", (5,)), ("2*n", (8,)), ("n-1 n//2", (3, 2)), ("max(n,m) m", (7, 7))]
    assert clashes(*good[order]) == []
    bad = [("n", (4,)), ("n+1", (6,))]
    name = "a" if swap else "b"
    assert clashes(*bad[order]) == [f"A dimension declared as n+1 = 5 is 6 ({name})."]


def test_an_expression_is_compared_by_its_value():
    assert clashes(("n", (4,)), ("n/2", (2,)), ("int(n/3)", (1,)), ("abs(n-6)", (2,))) == []
    assert clashes(("n", (3,)), ("n/2", (1,))) == ["A dimension declared as n/2 = 1.5 is 1 (b)."]


def test_an_expression_that_fails_for_this_call_is_a_clash():
    kernel = auto_vmap("n", "m", "m//n")(lambda a, b, c: c)
    c = np.arange(6.0, dtype="f").reshape(3, 2)
    np.testing.assert_array_equal(kernel(jnp.ones(2), jnp.ones(5), c), c)
    with pytest.raises(CoreDimensionError) as error:
        kernel(jnp.ones(0), jnp.ones(5), jnp.ones(2))
    assert str(error.value).endswith(
        "\n"
        '  > c         (2,)   "m//n"  ()\n'
        "\n"
        "A dimension declared as m//n is 2 (c), but m//n cannot be computed for m = 5 and n = 0: "
        "ZeroDivisionError: integer division or modulo by zero."
    )
    assert clashes(("n", (3,)), ("n.size", (3,))) == [
        "A dimension declared as n.size is 3 (b), but n.size cannot be computed for n = 3: "
        "AttributeError: 'int' object has no attribute 'size'."
    ]


def test_no_axis_is_proposed_where_an_expression_fails():
    rank = '"1 m//n"'
    kernel = auto_vmap("n", "m", "1 m//n")(lambda a, b, c: c)
    for n, end in ((2, "; did you mean c[None]?"), (0, ".")):
        with pytest.raises(RankError) as error:
            kernel(jnp.ones(n), jnp.ones(5), jnp.ones(2))
        assert str(error.value).endswith(f"\n\nc has 1 axis, but its rank {rank} needs 2{end}")


@pytest.mark.parametrize("text", ["...", "*_"])
def test_a_string_without_a_rank_leaves_the_argument_untouched(text):
    plan = auto_vmap(text, "n")(lambda a, b: b).plan(jnp.ones((2, 2)), jnp.ones((4, 3)))
    assert [leaf.path for leaf in plan.leaves] == ["b"]
    assert plan.untouched == (("a", (2, 2)),)


def test_an_expression_of_an_absent_argument_is_not_checked():
    kernel = auto_vmap("n", "m", "n+m")(lambda a, b, c: c if b is None else a[0] + b[0] + c)
    c = np.arange(18.0, dtype="f").reshape(2, 9)
    np.testing.assert_array_equal(kernel(jnp.ones(3), None, c), c)
    with pytest.raises(CoreDimensionError, match=r"declared as n\+m = 7 is 9 \(c\)\.$"):
        kernel(jnp.ones(3), jnp.ones(4), jnp.ones(9))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("m+k", "no argument has a dimension named 'm' or 'k'"),
        ("n+k", "no argument has a dimension named 'k'"),
        ("k=n+k", "no argument has a dimension named 'k'"),
        ("{n}", "the value of an argument is not looked up; name the size, or write '_'"),
        ("2*{n}", "the value of an argument is not looked up; name the size, or write '_'"),
    ],
)
def test_an_expression_of_unknown_names_is_an_error(text, problem):
    expected = f"auto_vmap(<lambda>): b: the dimension {text!r} could never be checked: "
    with pytest.raises(ValueError, match=f"^{re.escape(expected + problem)}$"):
        auto_vmap("n", {"x": f"3 {text}"})(lambda a, b: a)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("n/2", "n/2 = 1.5 is 2 (b)."),
        ("n==2", "n==2 = False is 2 (b)."),
        ("n//0", "n//0 is 2 (b), but n//0 cannot be computed for n = 3: ZeroDivisionError: "),
        ("2//0", "2//0 is 2 (b), but 2//0 cannot be computed: ZeroDivisionError: "),
        ("max+n", "max+n is 2 (b), but max+n cannot be computed for n = 3: TypeError: "),
    ],
)
def test_an_expression_that_is_no_size_is_an_error_at_the_call(text, sentence):
    kernel = auto_vmap("n", text)(lambda a, b: a)
    with pytest.raises(CoreDimensionError, match=re.escape(f"A dimension declared as {sentence}")):
        kernel(jnp.ones(3), jnp.ones(2))


def test_names_of_an_expression_may_come_from_an_annotation():
    def kernel(a: Pair, b, c):
        return c

    assert auto_vmap(b="n+m", c=0)(kernel)
    with pytest.raises(ValueError, match=r"b: the dimension 'n\+k' could never be checked: no "):
        auto_vmap(b="n+k", c=0)(kernel)


def test_what_jaxtyping_accepts_in_an_annotation_is_accepted():
    @auto_vmap
    def kernel(a: Float[Array, "n"], b: Float[Array, "n/2"], c: Float[Array, "{k} n+k"], k: int):
        return c

    c = np.arange(336.0, dtype="f").reshape(6, 7, 8)
    np.testing.assert_array_equal(kernel(jnp.ones(4), jnp.ones(2), c, 7), c)
    with pytest.raises(CoreDimensionError, match=r"declared as n/2 = 2\.5 is 2 \(b\)\.$"):
        kernel(jnp.ones(5), jnp.ones(2), jnp.ones((6, 7, 8)), 7)


def test_a_stretching_dimension_may_have_length_one():
    assert clashes(("n", (4,)), ("#n", (1,)), ("#n", (4,)), ("#3", (1,)), ("#n+1", (1,))) == []
    assert clashes(("#n", (1,)), ("n", (4,))) == []
    assert clashes(("n", (4,)), ("#n", (2,))) == ["Dimension n is 4 (a) and 2 (b)."]
    assert clashes(("#3", (2,))) == ["A dimension declared as 3 is 2 (a)."]


def test_some_names_are_never_compared():
    assert clashes(("_ _n", (4, 5)), ("_n _", (6, 7))) == []
    assert clashes(("?n 3", (4, 3)), ("?n 3", (5, 3))) == []
    assert clashes(("n+k", (7,)), ("n", (3,)), ("{size}", (2,)), ("{n}", (2,))) == []


def test_names_are_compared_within_one_pytree_argument():
    kernel = auto_vmap(body="n")(lambda body: body["a"] * body["b"])
    with pytest.raises(CoreDimensionError) as error:
        kernel({"a": jnp.ones((2, 3)), "b": jnp.ones(4)})
    assert str(error.value).endswith("\n\nDimension n is 3 (body['a']) and 4 (body['b']).")


def test_names_hold_for_one_call_only():
    kernel = auto_vmap("n", "n")(lambda a, b: a @ b)
    for n in (3, 5):
        a, b = np.arange(2.0 * n, dtype="f").reshape(2, n), np.arange(n, dtype="f")
        np.testing.assert_array_equal(kernel(a, b), a @ b)


def test_dimension_strings_and_ints_mix():
    kernel = auto_vmap("n", 1, c=None)(lambda a, b, c: a + b * c)
    a, b = np.arange(8.0, dtype="f").reshape(4, 2), np.arange(2.0, dtype="f")
    np.testing.assert_array_equal(kernel(a, b, 3.0), a + b * 3)
    with pytest.raises(CoreDimensionError, match=r"A dimension declared as n\+1 = 4 is 3 \(b\)\.$"):
        auto_vmap("n", "n+1")(lambda a, b: a)(jnp.ones(3), jnp.ones(3))
