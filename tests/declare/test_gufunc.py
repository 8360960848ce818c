# SPDX-License-Identifier: MIT
"""Gufunc signatures: NumPy's grammar, one for the whole kernel, outputs checked too."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from helpers import assert_same
from rankax import CoreDimensionError, auto_vmap


def center(x, m):
    return m @ x / jnp.sum(m)


x = jnp.asarray(np.arange(24.0).reshape(4, 2, 3))
m = jnp.asarray(np.arange(1.0, 3.0))


@pytest.mark.parametrize(
    "signature",
    ["(n,3),(n)->(3)", " ( n , 3 ) , ( n ) -> ( 3 ) ", "(n,d),(n)->(d)", "(2,3),(2)->(3)"],
)
def test_spaces_and_fixed_sizes(signature):
    got = auto_vmap(signature)(center)(x, m)
    assert_same(got, jnp.stack([center(item, m) for item in x]))


@pytest.mark.parametrize(
    ("signature", "kernel"),
    [
        ("()->()", lambda x: x * 2),
        ("(a,b)->(b,a)", lambda x: x.T),
        ("(n,n)->()", lambda x: x.sum()),
    ],
)
def test_it_means_what_numpy_means(signature, kernel):
    cube = np.arange(27.0, dtype=np.float32).reshape(3, 3, 3)
    want = np.vectorize(kernel, signature=signature)(cube)
    np.testing.assert_array_equal(auto_vmap(signature)(kernel)(cube), want)


def test_outputs_are_compared_with_the_inputs():
    def kernel(a, b):
        return jnp.concatenate([a, b])

    with pytest.raises(CoreDimensionError) as error:
        auto_vmap("(n),(m)->(n)")(kernel)(jnp.ones((4, 3)), jnp.ones(2))
    assert str(error.value).endswith("\n\nDimension n is 5 (output) and 3 (the arguments).")
    # A name that only an output has is free.
    assert auto_vmap("(n),(m)->(k)")(kernel)(jnp.ones((4, 3)), jnp.ones(2)).shape == (4, 5)
    # It overrides the annotation.
    kernel.__annotations__["return"] = Float[Array, "n"]
    assert auto_vmap("(n),(m)->(k)")(kernel)(jnp.ones((4, 3)), jnp.ones(2)).shape == (4, 5)


def test_the_number_of_outputs_is_checked():
    mapped = auto_vmap("()->(),()")
    with pytest.raises(ValueError, match=re.escape("the rank of output is a tuple of 2 entries")):
        mapped(lambda s: s)(jnp.ones(3))
    two = mapped(lambda s: (s, 2 * s))(jnp.ones(3))
    assert_same(two, (jnp.ones(3), 2 * jnp.ones(3)))


LOOKS = "is not a gufunc signature; one looks like '(n,3),(n)->()'"
NAMES = "a core dimension is a name or a size"


@pytest.mark.parametrize(
    ("signature", "why"),
    [
        *((text, LOOKS) for text in ("(n)", "(n)->", "n->()", "(n)->()->()", "(n")),
        ("(n?,3),(n)->()", f"cannot be read at 'n?'; {NAMES} (optional and broadcastable ones"),
        ("(n,),(n)->()", f"cannot be read at ''; {NAMES}"),
        ("(n+1),(n)->()", f"cannot be read at 'n+1'; {NAMES}"),
        ("(n)->()", "has 1 input"),
    ],
)
def test_what_is_no_signature_is_named(signature, why):
    message = f"auto_vmap(center): {signature!r} {why}"
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        auto_vmap(signature)(center)


def test_defaults_keyword_only_and_self_need_no_input():
    class Lens:
        power = 2.0

        @auto_vmap("(n),()->(n)")
        def bend(self, x, n, shift=1.0, *, note="none"):
            assert note == "none"
            return self.power * x * n + shift

    x, n = jnp.arange(12.0).reshape(4, 3), jnp.arange(5.0)
    assert_same(Lens().bend(x, n[:, None]), 2 * jnp.multiply.outer(n, x) + 1)


def test_an_input_may_reach_a_default_and_args():
    kernel = auto_vmap("(n),(n)->()")(lambda x, y=m: x @ y)
    assert kernel(x[..., 0]).shape == (4,)
    every = auto_vmap("(n)->()")(lambda *xs: sum(v @ v for v in xs))
    ys, z = jnp.arange(6.0).reshape(2, 3), jnp.arange(3.0)
    want = (x**2).sum(-1) + (ys**2).sum(-1)[None] + z @ z
    assert_same(every(x, ys, z), want)
