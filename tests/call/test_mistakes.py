# SPDX-License-Identifier: MIT
"""Mistakes that new users made, and what they read of them."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rankax import Mask, Ragged, auto_vmap, chunked_vmap
from rankax.reductions import TopK
from scan_cases import here

V, M = np.ones((5, 3), "float32"), np.ones((4, 3, 3), "float32")


def norm(x):
    return jnp.sqrt(x @ x)


def form(v, m):
    return v @ m @ v


def at_end(x, mask):
    return x[-1] * mask[-1]


def total(*vectors):
    return sum(jnp.sum(v) for v in vectors)


def drawn(key, x):
    return x + jax.random.normal(key)


def text_of(call):
    """Return what a user reads of the error of a call, without the note of JAX."""
    with pytest.raises(Exception, match=r"\w") as caught:
        call()
    notes = getattr(caught.value, "__notes__", ())
    return "\n".join(
        [str(caught.value), *(note for note in notes if "JAX has removed" not in note)]
    )


FEWER = "an argument has fewer axes than its rank"
CORE = "the core dimensions disagree"
APART = "the batch axes do not broadcast together"
RAW_KEY = (
    "If key is a raw key (jax.random.PRNGKey), its rank is 1; a key made with jax.random.key has "
    "rank 0."
)
CLASHES = {
    "a rank is too small": (
        lambda: auto_vmap(v=0, m=2)(form)(V, M),
        f"{here(form)}: {APART}",
        "Batch axis -1 is 3 (v) and 4 (m).\nIf one item of v is a vector, its rank is 1, not 0.",
    ),
    "numbers in a tuple, or a shape": (
        lambda: auto_vmap(1)(norm).plan((5, 3)),
        f"{here(norm)}: {FEWER}",
        "x[0] has 0 axes, but its rank 1 needs 1.\nx[1] has 0 axes, but its rank 1 needs 1.\n"
        "If x is an array, pass jnp.asarray(x); if it is the shape of one, for a plan, pass "
        "jax.ShapeDtypeStruct(x, jnp.float32).",
    ),
    "a number among *args": (
        lambda: auto_vmap(vectors=1)(total)(1.0),
        f"{here(total)}: {FEWER}",
        "vectors[0] has 0 axes, but its rank 1 needs 1.",
    ),
    "a tuple of one number among *args": (
        lambda: auto_vmap(vectors=1)(total)((1.0,)),
        f"{here(total)}: {FEWER}",
        "vectors[0][0] has 0 axes, but its rank 1 needs 1.\nIf vectors[0] is an array, pass "
        "jnp.asarray(vectors[0]); if it is the shape of one, for a plan, pass "
        "jax.ShapeDtypeStruct(vectors[0], jnp.float32).",
    ),
    "a raw key as one of a batch": (
        lambda: auto_vmap(key=0, x=1)(drawn)(jax.random.PRNGKey(0), V),
        f"{here(drawn)}: {APART}",
        "Batch axis -1 is 2 (key) and 5 (x).\n"
        f"To combine every key with every x, pass key[:, None].\n{RAW_KEY}",
    ),
    "a raw key": (
        lambda: auto_vmap(key=0, x=1)(drawn)(jax.random.PRNGKey(0), V[:2]),
        "JAX encountered invalid PRNG key data: expected key_data.ndim >= 1; got ndim=0\n"
        f"This error comes from {here(drawn)}, called with",
        RAW_KEY,
    ),
    "a list of items": (
        lambda: auto_vmap("n")(norm)([V[0], V[0, :2]]),
        f"{here(norm)}: {CORE}",
        "Dimension n is 3 (x[0]) and 2 (x[1]).\n"
        "If x is a list of items, pass rankax.Ragged.from_list(x).",
    ),
    "a list of equals": (
        lambda: auto_vmap("n", "n")(at_end)([V[0], V[1]], V[0, :2]),
        f"{here(at_end)}: {CORE}",
        "Dimension n is 3 (x[0], x[1]) and 2 (mask).",
    ),
}


@pytest.mark.parametrize(("call", "first", "advice"), CLASHES.values(), ids=CLASHES)
def test_a_mistake_in_a_call(call, first, advice):
    got, _table, last = text_of(call).split("\n\n")
    assert (got, last) == (first, advice)


REFUSED = {
    "a kind of device": (
        lambda: auto_vmap(1, devices="gpu")(norm),
        "auto_vmap(norm): devices must be 'all', a positive int, a sequence of jax.Device, a "
        "jax.sharding.PartitionSpec, False, or None, got 'gpu'; for all of this kind, pass 'all' "
        "or jax.devices('gpu')",
    ),
    "a device twice": (
        lambda: auto_vmap(1, devices=jax.devices()[:1] * 2)(norm),
        f"auto_vmap(norm): devices names a device twice, got {jax.devices()[:1] * 2}",
    ),
    "an average": (
        lambda: auto_vmap(1, reduce="average")(norm)(V),
        "auto_vmap(norm): no reduction is called 'average'; did you mean 'mean'?",
    ),
    "a mask in place of its name": (
        lambda: auto_vmap(1, reduce="sum", where=np.ones(2, bool))(norm),
        "auto_vmap(norm): where must be the key, field or index of an output, got ndarray "
        "array([ True,  True]); pass the array to the kernel, and return it",
    ),
    "a mask of what": (
        lambda: auto_vmap(1, y=Mask)(lambda x, y: x),
        "auto_vmap(<lambda>): y: Mask needs the name of a dimension, as in Mask('n')",
    ),
    "too few items": (
        lambda: auto_vmap(1, reduce=TopK(10))(norm)(V),
        f"{here(norm)}: TopK(10) needs at least 10 items; the reduced axes have 5",
    ),
    "a masked array": (
        lambda: auto_vmap(1)(norm)(np.ma.masked_array(V, V > 2)),
        "norm(): x has a rank, so it must be an array or a number, but it is MaskedArray; pass "
        "x.filled(...), and the mask as an argument of its own",
    ),
    "a mask, which the library fills in": (
        lambda: auto_vmap("n", mask=Mask("n"))(at_end)(V, mask=V > 0),
        "at_end() got an unexpected keyword argument 'mask'; do not pass mask, which rankax fills "
        "in",
    ),
    "numbers as ragged items": (
        lambda: Ragged.from_list([1.0, 2.0]),
        "Ragged.from_list: item 0 is a number, not an array of rows",
    ),
}


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(call, text):
    assert text_of(call) == text


@dataclasses.dataclass
class Orbit:
    radius: jax.Array


@pytest.mark.parametrize(
    ("fun", "text"),
    [
        (
            lambda x: None,
            "returned None, but outputs must be arrays or numbers; add the missing return, or "
            "return () from a kernel that is called for its effects",
        ),
        (
            lambda x: "x",
            "returned a str at output, but outputs must be arrays or numbers; leave it out, or "
            "wrap it in rankax.Static",
        ),
        (
            lambda x: np.array(["x"]),
            "returned an array of dtype <U1 at output, but outputs must be arrays or numbers; "
            "leave it out",
        ),
        (
            lambda x: {"norm": jnp.sum(x), 1: x},
            "returned outputs that JAX cannot flatten; the keys of a dict must have an order, so "
            "use keys of one type, such as strings",
        ),
        (
            lambda x: {"orbit": Orbit(x)},
            "returned an Orbit at output['orbit'], but outputs must be arrays or numbers; make "
            "Orbit a pytree: jax.tree_util.register_dataclass(Orbit)",
        ),
    ],
)
def test_a_mistake_in_what_is_returned(fun, text):
    assert text_of(lambda: auto_vmap(1)(fun)(V)) == f"{here(fun)} {text}"
    assert text_of(lambda: chunked_vmap(fun, 2)(V)) == f"{here(fun)} {text}"
    # Without batch axes, what is compiled.
    assert text_of(lambda: auto_vmap(1, jit=True)(fun)(V[0])) == f"{here(fun)} {text}"
    assert auto_vmap(1)(lambda x: ())(V) == ()  # which is no mistake


def called_back(x):
    return jax.pure_callback(np.sum, jax.ShapeDtypeStruct((), x.dtype), x)


def test_what_cannot_be_mapped_names_its_kernel():
    text = text_of(lambda: auto_vmap(1, chunk_size=2)(called_back)(V))
    assert f"\nThis error comes from {here(called_back)}" in text


def pull(x, y, m):
    return m * jnp.exp(-jnp.sum((x - y) ** 2))


ITSELF = (
    "pull(): x and y are the same array, and each of its items meets only itself. For all pairs, "
    'pass x[:, None], or name the axes: x="i | _", y="j | _", over=\'j\'. If this is meant, '
    'x="i | _", y="i | _" says so'
)


@pytest.mark.parametrize(
    "given", [{}, {"jit": True}, {"chunk_size": 2}, {"reduce_axis": 0}], ids=str
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.grad], ids=["", "jit", "grad"])
def test_an_array_with_itself_is_one_warning(given, around):
    kernel = auto_vmap(1, 1, 0, reduce="sum", **given)(pull)
    points = jnp.ones((4, 3))
    with pytest.warns(UserWarning, match=re.escape(ITSELF)) as warned:
        around(lambda points: kernel(points, points, 1.0))(points)
    assert warned[0].filename == __file__
    kernel(points, points, 1.0)  # once is enough


@pytest.mark.parametrize("argnums", [0, (0, 1)], ids=str)
@pytest.mark.parametrize("transform", [jax.grad, jax.hessian], ids=["grad", "hessian"])
def test_a_transformed_kernel_of_one_array_twice_warns(transform, argnums):
    kernel, points = auto_vmap(1, 1, 0, reduce="sum")(pull), jnp.ones((4, 3))
    transform(kernel, argnums)(points, points + 0, 1.0)  # as a loss of predictions and targets
    with pytest.warns(UserWarning, match=re.escape(ITSELF)) as warned:
        transform(kernel, argnums)(points, points, 1.0)
    assert warned[0].filename == __file__


def test_arrays_that_no_reduction_pairs_with_themselves():
    points, one = jnp.ones((4, 3)), jnp.ones((1, 3))
    kernel = auto_vmap(1, 1, 0, reduce="sum")(pull)
    kernel(points[:, None], points, 1.0)
    kernel(one, one, 1.0)
    kernel(one[0], one[0], 1.0)
    kernel(points, points + 0, jnp.ones(4))
    kernel.plan(points, points, 1.0)  # shows it, in words of its own
    auto_vmap(1, 1, 0)(pull)(points, points, 1.0)
    named = auto_vmap(x="i | 3", y="i | 3", m=0, reduce="sum")(pull)
    assert named(points, points, 1.0) == 4
    named.nonfinite(points, points, 1.0)
    tree = auto_vmap({"a": 1, "b": 1}, reduce="sum")(lambda t: t["a"] @ t["b"])
    tree({"a": points, "b": points})  # one argument


def test_a_number_with_itself_is_the_usual_forgotten_axis():
    def repulsion(x, y, i, j):
        return jnp.where(i == j, 0.0, x @ y)

    points, numbers = jnp.ones((4, 3)), jnp.arange(4)
    kernel = auto_vmap(1, 1, 0, 0, reduce="sum")(repulsion)
    with pytest.warns(UserWarning, match="i and j are the same array"):
        assert kernel(points[:, None], points, numbers, numbers) == 0
    assert kernel(points[:, None], points, numbers[:, None], numbers) == 36
