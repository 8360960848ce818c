# SPDX-License-Identifier: MIT
"""Errors of a kernel itself: a note names the kernel and the shapes that each argument had."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rankax import (
    RankError,
    SplitKey,
    auto_vmap,
    checkpoint_chunked_scan,
    chunked_hessian,
    chunked_jacfwd,
    chunked_jacrev,
    chunked_reduce,
    chunked_vmap,
    sliced_scan,
)
from scan_cases import here

V, M = np.ones((4, 3), "float32"), np.ones((5, 5), "float32")


def product(v, m):
    return m @ v


def chosen(v, m):
    return v if v[0] > m[0, 0] else -v


def step(carry, x):
    return M @ carry, x["a"] + carry[0]


RANKED = """\
This error comes from {}, called with

    argument  shape   rank  one item
    v         (4, 3)  1     (3,)
    m         (5, 5)  2     (5, 5)"""

ONE = RANKED.replace("(4, 3)", "(3,)  ")

MAPPED = """\
This error comes from {}, called with

    argument  shape   in_axes  one item
    v         (4, 3)  0        (3,)
    m         (5, 5)  None     (5, 5)"""

TYPED = """\
This error comes from {}, called with

    argument  type
    v         float32[4,3]
    m         float32[5,5]"""

SCANNED = """\
This error comes from {}, called with

    argument  type
    carry     float32[3]
    x['a']    float32[]"""


def error_of(call):
    """Return the error of a call, and the notes of this library, which must be one at most."""
    with pytest.raises(Exception, match=r"\w") as caught:
        call()
    notes = getattr(caught.value, "__notes__", ())
    return caught.value, [note for note in notes if note.startswith("This error")]


XS = {"a": np.ones(6, "float32")}
CALLS = {
    "no batch": (lambda: auto_vmap(1, 2)(product)(V[0], M), ONE),
    "chunks": (lambda: auto_vmap(1, 2, chunk_size=2)(product)(V, M), RANKED),
    "jit": (lambda: auto_vmap(1, 2, jit=True)(product)(V, M), RANKED),
    "plan": (lambda: auto_vmap(1, 2, chunk_size=2)(product).plan(V, M), RANKED),
    "chunked_vmap": (lambda: chunked_vmap(product, 2, (0, None))(V, M), MAPPED),
    "chunked_reduce": (lambda: chunked_reduce(product, "sum", 2, (0, None))(V, M), MAPPED),
    "jacfwd": (lambda: chunked_jacfwd(product)(V, M), TYPED),
    "jacrev": (lambda: chunked_jacrev(product)(V, M), TYPED),
    "hessian": (lambda: chunked_hessian(product)(V, M), TYPED),
    "sliced_scan": (lambda: sliced_scan(step, V[0], XS), SCANNED),
    "checkpointed": (lambda: checkpoint_chunked_scan(step, V[0], XS, chunk_size=2), SCANNED),
}


@pytest.mark.parametrize(("call", "note"), CALLS.values(), ids=CALLS)
def test_an_error_of_the_kernel_names_it_and_its_arguments(call, note):
    error, notes = error_of(call)
    assert isinstance(error, TypeError)
    assert str(error).startswith("dot_general requires contracting dimensions")
    assert notes == [note.format(here(step if note is SCANNED else product))]


def test_the_innermost_kernel_is_named():
    inner = auto_vmap(v=1, m=2)(product)
    outer = auto_vmap(1, 2)(lambda a, b: inner(a, b))
    assert error_of(lambda: outer(V, M))[1] == [ONE.format(here(product))]
    error, notes = error_of(lambda: auto_vmap(1, 1)(lambda a, b: inner(a, b))(V, V))
    assert isinstance(error, RankError)
    assert notes == []


def test_a_kernel_of_jax_has_a_note():
    _, (note,) = error_of(lambda: auto_vmap(1, 1)(jnp.dot)(V, M[0]))
    assert note.startswith("This error comes from dot() at ")


def test_the_table_of_a_note_is_short():
    def kernel(v):
        return v[0] @ jnp.ones(7)

    (note,) = error_of(lambda: auto_vmap(1)(kernel)((V,) * 40))[1]
    lines = note.split("\n")
    assert lines[3] == "    v[0]      (4, 3)  1     (3,)"
    assert lines[18:] == ["    v[15]     (4, 3)  1     (3,)", "    ... 24 more"]


def test_a_list_of_arrays_and_none_are_named():
    kernel = auto_vmap(v=1, m=2)(product)
    error, notes = error_of(lambda: kernel([V[0], V[1]], M))
    assert isinstance(error, TypeError)
    assert notes == [
        f"This error comes from {here(product)}, called with\n\n"
        "    argument  shape   rank  one item\n"
        "    v[0]      (3,)    1     (3,)\n"
        "    v[1]      (3,)    1     (3,)\n"
        "    m         (5, 5)  2     (5, 5)\n\n"
        "v is a list, so the kernel gets a list; jnp.stack(v) is one array."
    ]
    _, (note,) = error_of(lambda: kernel(V[0], None))
    assert note.endswith("\n\nm is None, which passes through whatever its rank.")


def test_arguments_without_a_rank_are_in_the_note():
    def reshaped(v, n, options, m=None):
        return v.reshape(n)

    _, (note,) = error_of(lambda: auto_vmap(v=1)(reshaped)(V, 2, {"m": M, "name": "x" * 50}))
    assert note == (
        f"This error comes from {here(reshaped)}, called with\n\n"
        "    argument         shape   rank  one item\n"
        "    v                (4, 3)  1     (3,)\n"
        "    n                        None  2\n"
        "    options['m']     (5, 5)  None  (5, 5)\n"
        f"    options['name']          None  '{'x' * 39}"
    )
    _, (note,) = error_of(lambda: auto_vmap(v=1, jit=True)(reshaped)(V, None, ()))
    assert note.endswith("    n                 None  None\n    options           None  tuple")


CHOICES = {
    "auto_vmap": (auto_vmap(1, 2, chunk_size=2)(chosen), M, "value of the argument v."),
    "chunked_vmap": (chunked_vmap(chosen, 2), M[:4, None], "values of the arguments v and m."),
}


@pytest.mark.parametrize(("mapped", "m", "names"), CHOICES.values(), ids=CHOICES)
def test_an_if_on_a_traced_value_names_the_kernel(mapped, m, names):
    error, notes = error_of(lambda: mapped(V, m))
    assert isinstance(error, jax.errors.TracerBoolConversionError)
    message = str(error).split("\n")[1]
    assert f"while tracing the function {here(chosen).replace('()', '')} for jit" in message
    assert message.endswith(f"it depends on the {names}")
    assert len(notes) == 1


def test_leaves_and_keys_are_named_by_their_arguments():
    def kernel(pose, key):
        return pose if jax.random.normal(key) > pose["R"][0] else {}

    pose = {"R": V}
    error, _ = error_of(
        lambda: auto_vmap(1, SplitKey, chunk_size=2)(kernel)(pose, jax.random.key(0))
    )
    assert "depends on the values of the arguments pose_R and key" in str(error)


@pytest.mark.parametrize("batch", [(), (4,)])
def test_a_kernel_cannot_change_an_array_of_the_caller(batch):
    def in_place(v, m):
        m[0, 0] = 5
        return m @ v

    m = np.zeros((3, 3), "float32")
    error, _ = error_of(lambda: auto_vmap(1, 2)(in_place)(np.ones((*batch, 3), "float32"), m))
    assert isinstance(error, TypeError)
    assert "JAX arrays are immutable" in str(error)
    np.testing.assert_array_equal(m, 0)
