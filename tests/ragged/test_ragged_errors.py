# SPDX-License-Identifier: MIT
"""What is refused, and in which words."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from rankax import Ragged, auto_vmap, chunked_vmap


def ragged(lengths, *core):
    return Ragged(np.ones((sum(lengths), *core), np.float32), lengths)


def first(x, y=None):
    return x.sum()


def same(x, y=None):
    return x


X = ragged([3, 0, 2], 3)
PAIR = auto_vmap("n 3", "n")(first)
TOTAL = auto_vmap("n 3", reduce="sum", jit=True)
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
        (lambda: PAIR(X, ragged([3, 1, 1])), "item 1 of y has 1 rows, but that of x has 0"),
        (lambda: PAIR(X, jnp.ones((3, 4))), "y has the dimension 'n', in which x is Ragged; pass "),
        (lambda: auto_vmap("n 3", "m")(first)(X, ragged([3, 1])), "y has 2 items, but x has 3"),
        (lambda: auto_vmap("n 3")(same)(X), DEPENDS.format(n=1)),
        (lambda: TOTAL(same)(ragged([2, 2], 3)), DEPENDS.format(n=2)),
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
            lambda: TOTAL(first).with_options(bucket=(1,))(ragged([2, 2], 3)),
            "2 items have the same length, but the largest bucket is 1; add a larger one",
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
