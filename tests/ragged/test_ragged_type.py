# SPDX-License-Identifier: MIT
"""`Ragged` and `Mask` by themselves, and what calls with them refuse."""

import inspect
import pickle
import re
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Bool, Float

from rankax import Mask, Ragged, auto_vmap, chunked_vmap


def test_what_it_holds():
    x = Ragged(np.arange(6.0), [3, 0, 1, 2])
    assert len(x) == 4
    assert x.lengths.tolist() == [3, 0, 1, 2]
    assert [item.tolist() for item in x.to_list()] == [[0, 1, 2], [], [3], [4, 5]]
    assert repr(x) == "Ragged(4 items of 0 to 3 rows, float64[6])"
    assert repr(Ragged(np.ones((2, 3)), [1, 1])) == "Ragged(2 items of 1 row, float64[2, 3])"
    assert [item.tolist() for item in x] == [[0, 1, 2], [], [3], [4, 5]]
    assert [x[i].tolist() for i in (0, 1, -1, np.int32(2))] == [[0, 1, 2], [], [4, 5], [3]]
    with pytest.raises(IndexError):
        x[4]
    again = Ragged.from_list(x.to_list())
    assert again.lengths.tolist() == x.lengths.tolist()
    np.testing.assert_array_equal(again.values, x.values)
    loaded = pickle.loads(pickle.dumps(x))
    assert loaded.lengths.tolist() == x.lengths.tolist()


def test_a_pytree_with_static_lengths():
    x, y = Ragged(jnp.arange(3.0), [1, 2]), Ragged(jnp.arange(3.0), np.array([1, 2], np.int32))
    structure = jax.tree.structure(x)
    assert structure == jax.tree.structure(y)
    assert hash(structure) == hash(jax.tree.structure(y))
    assert structure != jax.tree.structure(Ragged(jnp.arange(3.0), [2, 1]))
    assert "2 lengths" in str(structure)
    gradient = jax.jit(jax.grad(lambda r: jnp.sum(r.values**2)))(x)
    assert isinstance(gradient, Ragged)
    assert gradient.lengths.tolist() == [1, 2]
    assert jax.tree.map(lambda v: None, x).values is None
    assert [len(v) for v in jax.jit(Ragged.to_list)(x)] == [1, 2]


def test_lengths_are_a_copy():
    lengths = np.array([1, 2])
    x = Ragged(np.arange(3.0), lengths)
    lengths[0] = 7
    assert x.lengths.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        x.lengths[0] = 7


PAIR = Ragged(np.ones(3), [1, 2])


def pair(x, m):
    return x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PAIR[:, None], "[:, None] would add a batch axis, but a Ragged has only"),
        (lambda: PAIR[:1], "an index is the number of an item, got slice(None, 1, None)"),
        (lambda: Ragged(np.ones(3), [1, 1]), "2 items add up to 2, but values has 3 rows"),
        (lambda: Ragged(np.ones(3), [4, -1]), "item 1 has the length -1"),
        (lambda: Ragged(np.ones(3), [1.0, 2.0]), "lengths must be a sequence of ints, one for "),
        (lambda: jax.jit(Ragged)(3.0, jnp.arange(2)), "the lengths are traced, but they must be "),
        (lambda: Ragged(3.0, [1]), "values must have the rows of all items on axis 0"),
        (
            lambda: Ragged.from_list([np.ones((2, 3)), np.ones((2, 2))]),
            "Ragged.from_list: item 1 has shape (2, 2), but item 0 has (2, 3); items may differ",
        ),
        (lambda: Ragged.from_list([]), "use Ragged(values, [])"),
        (lambda: Mask(3), "Mask takes the name of a dimension, as in Mask('n'), got 3"),
        (lambda: auto_vmap(x="n", m=Mask("k"))(pair), "m is the mask of 'k', but no parameter has"),
        (lambda: auto_vmap(x="n", m=(Mask("n"), 0))(pair), "m: Mask is the rank of a whole param"),
    ],
)
def test_errors(make, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


def total(x, mask, s):
    return jnp.sum(x.sum(-1), where=mask) * s


class Scaled:
    @auto_vmap(x="n 3", mask=Mask("n"), s=0)
    def total(self, x, mask, s):
        return jnp.sum(x.sum(-1), where=mask) * s


def annotated(
    x: Float[Array, "n 3"], mask: Annotated[Bool[Array, "n"], Mask("n")], s: Float[Array, ""]
):
    return total(x, mask, s)


@pytest.mark.parametrize(
    "kernel", [auto_vmap("n 3", Mask("n"), 0)(total), auto_vmap(annotated), Scaled().total]
)
def test_callers_do_not_pass_the_mask(kernel):
    x = jnp.ones((2, 5, 3))
    assert list(inspect.signature(kernel).parameters) == ["x", "s"]
    np.testing.assert_array_equal(kernel(x, 2.0), [30.0, 30.0])  # dense: all rows are real
    assert "mask" not in str(kernel.plan(x, 2.0))
    ragged = Ragged(jnp.ones((7, 3)), [5, 2])
    np.testing.assert_array_equal(kernel(ragged, 2.0), [30.0, 12.0])


# What calls refuse, and in which words.


def ragged(lengths, *core):
    return Ragged(np.ones((sum(lengths), *core), np.float32), lengths)


def first(x, y=None):
    return x.sum()


def same(x, y=None):
    return x


X = ragged([3, 0, 2], 3)
BOTH = auto_vmap("n 3", "n")(first)
SUMMED = auto_vmap("n 3", reduce="sum", jit=True)
DEPENDS = (
    "output has the shape ({n}, 3) for one item, which depends on how many rows the item is filled "
    'up to; declare the output, as in -> Float[Array, "n 3"], if it has a row for each row'
)
PADS = "has the ragged dimension 'n', but only the first core dimension of an output that is not"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auto_vmap(2)(first)(X), 'its first core dimension needs a name, as in x="n 3"'),
        (lambda: auto_vmap("n n")(first)(X), "x is Ragged, but its rank \"n n\" has 'n' more than"),
        (lambda: auto_vmap("n")(first)(X), "x is Ragged with values of shape (5, 3), but its rank"),
        (lambda: BOTH(X, ragged([3, 1, 1])), "item 1 of y has 1 rows, but that of x has 0"),
        (
            lambda: BOTH(X, jnp.ones((3, 4))),
            "y has the dimension 'n', in which x is Ragged; pass ",
        ),
        (lambda: auto_vmap("n 3", "m")(first)(X, ragged([3, 1])), "y has 2 items, but x has 3"),
        (lambda: auto_vmap("n 3")(same)(X), DEPENDS.format(n=1)),
        (lambda: SUMMED(same)(ragged([2, 2], 3)), DEPENDS.format(n=2)),
        (lambda: auto_vmap("(n,3)->(n,n)")(lambda x: x @ x.T)(X), f'output of rank "n n" {PADS}'),
        (
            lambda: auto_vmap("(n,3)->(n)", reduce="sum")(lambda x: x.sum(-1))(X),
            f'with reduce=, an output of rank "n" {PADS}',
        ),
        (
            lambda: auto_vmap("(n,3),()->(n,3)")(same)(X, jnp.ones((4, 3))),
            "so it would be Ragged, which has one batch axis, but the batch shape is (4, 3)",
        ),
        (
            lambda: auto_vmap("n 3", batched=True)(first)(X),
            "x is Ragged, but with batched=True the",
        ),
        (
            lambda: SUMMED(first).with_options(bucket=(1,))(ragged([2, 2], 3)),
            "2 items have the same length, but the largest bucket is 1; add a larger one",
        ),
        (
            lambda: auto_vmap(x="n", y=0, m=Mask("n"))(lambda x, y, m: y)(None, jnp.ones(3)),
            "m is the mask of 'n', but no argument of this call",
        ),
        (lambda: chunked_vmap(same, 2)(X), "x is Ragged, and its rows are not items of a batch"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
        call()
    assert re.match(r"(chunked_vmap\()?(first|same|<lambda>)\(?\)", str(caught.value))


def test_an_error_of_the_kernel_shows_one_item():
    with pytest.raises(ZeroDivisionError) as caught:
        auto_vmap(x="n 3")(lambda x: 1 / 0)(X)
    notes = "\n".join(caught.value.__notes__)
    assert 'x         (1, 3)  "n 3"  (1, 3)' in notes
