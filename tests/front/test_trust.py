# SPDX-License-Identifier: MIT
"""``kernel.check`` and ``kernel.nonfinite``, against plain `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import compilations, refusal
from rankax import SplitKey, auto_vmap
from rankax.plans import CheckReport, NonFinite

DRAW = np.random.default_rng(3).uniform
X = jnp.asarray(DRAW(0.1, 1, size=(5, 7, 3)), jnp.float32)
W = jnp.asarray([0.5, 1.0, 2.0], jnp.float32)


def length(x, w):
    return jnp.sqrt(x @ w), {"at": jnp.argmax(x), "ok": x[0] > 0.3}


LENGTH = auto_vmap(x=1, w=1, chunk_size=4)(length)


@jax.custom_batching.custom_vmap
def mixed(x):
    return 2 * x


@mixed.def_vmap
def _(size, is_mapped, x):
    del is_mapped
    return 2 * x + jnp.float32(jnp.arange(size)[:, None] == size - 1), True


@jax.custom_jvp
def slope(x):
    """A function whose batch has another derivative."""
    return jnp.sin(x)


@slope.defjvp
def _(primals, tangents):
    return slope(*primals), mixed(primals[0][None])[0] * tangents[0]


@pytest.mark.parametrize(
    "options", [{"jit": True, "bucket": (8, 16)}, {"reduce": ("sum", None)}], ids=str
)
def test_a_sound_kernel_agrees(options):
    report = LENGTH.with_options(**options).check(X, W, items=6, gradient=True)
    assert isinstance(report, CheckReport)
    assert len(report.items) == 6
    assert {(0, 0), (4, 6)} < set(report.items)
    names = ["output[0]", "output[1]['at']", "output[1]['ok']", "gradient of x", "gradient of w"]
    assert [path for path, _, _ in report.differences] == names
    assert all(ulps < 10 for _, ulps, _ in report.differences)
    first = "length: 6 of 35 items agree with the kernel by itself\n  output[0]: "
    assert str(report).startswith(first)


def test_a_batch_without_items():
    report = LENGTH.check(X[:0], W, gradient=True)
    assert (report.items, report.batch_shape) == ((), (0, 7))


def test_a_number_of_python_is_one_item():
    report = auto_vmap(x=0)(lambda x: 2 * x).check(2.0, gradient=True)
    assert report.items == ((),)
    assert [path for path, _, _ in report.differences] == ["output", "gradient of x"]


def test_a_branch_on_a_number_that_all_items_share():
    kernel = auto_vmap(v=1, s=0)(lambda v, s: v * s if s > 0 else -v)
    report = kernel.check(W, np.float32(2), gradient=True)
    names = ["output", "gradient of v", "gradient of s"]
    assert [path for path, _, _ in report.differences] == names


@pytest.mark.parametrize("x", [W, 2.0], ids=["batch", "number"])
def test_disabled_jit(x):
    kernel = auto_vmap(x=0)(lambda x: (2 * x, 1 / 3))
    with jax.disable_jit():
        assert [ulps for _, ulps, _ in kernel.check(x).differences] == [0, 0]


def test_outputs_of_any_dtype():
    """A gradient that mixes narrow floats, which JAX does not promote, and complex numbers."""
    dtypes = [jnp.float8_e4m3fn, jnp.float32, jnp.complex64, jnp.int8]
    kernel = auto_vmap(x=1, chunk_size=4)(lambda x: [(x * x).astype(dtype) for dtype in dtypes])
    report = kernel.check(X, gradient=True)
    assert len(report.differences) == 5
    assert all(ulps < 10 for _, ulps, _ in report.differences)


def test_a_gradient_through_a_narrow_float():
    """Compiled, as that of the call; an operation at a time, each result would be rounded."""

    @auto_vmap(x=1, chunk_size=4)
    def kernel(x):
        x = x.astype(jnp.bfloat16)
        return jnp.sum(jnp.tanh(x * 3) ** 2 * jnp.exp(x))

    assert kernel.check(DRAW(size=(20, 13)).astype(np.float32), gradient=True).items


def test_few_programs_are_compiled():
    """An operation outside of a program is one more to compile: there were 107."""
    x, w = (DRAW(size=shape).astype(np.float32) for shape in ((2, 11, 13), 13))
    _, programs = compilations(lambda: LENGTH.check(x, w, items=6, gradient=True))
    assert programs < 40


def test_keys_that_are_split_are_those_of_the_items():
    @auto_vmap(x=1, key=SplitKey, chunk_size=4)
    def draw(x, key):
        return x * jax.random.normal(key, x.shape), key

    report = draw.check(X, jax.random.key(1))
    assert [ulps < 1 for _, ulps, _ in report.differences] == [True] * 2


def test_a_function_that_mixes_its_items_is_found():
    kernel = auto_vmap(x=1)(lambda x: mixed(x))
    x = X[0].at[6].set(jnp.array([0.25, 0.5, 1.0]))
    text = (
        "<lambda>.check: output at [6] is [1.5, 2, 3], but the kernel by itself gives "
        "[0.5, 1, 2] (4.19e+06 ulps of the largest number); the item has "
        "x = [0.25, 0.5, 1]"
    )
    assert refusal(ValueError, kernel.check, x) == text


def test_another_gradient_is_found_and_only_if_asked_for():
    kernel = auto_vmap(x=0)(slope)
    kernel.check(W)
    text = r"^slope.check: gradient of x at \[2\] is .*, but the kernel by itself gives "
    with pytest.raises(ValueError, match=text):
        kernel.check(W, gradient=True)


def test_an_item_that_is_not_finite_hides_no_other_gradient():
    LENGTH.check(X.at[2, 3].set(-1.0), W, items=35, gradient=True)


BAD = X.at[2, 3].set(-1.0).at[4, 0, 1].set(jnp.nan).at[1, 1].set(0.0)


@pytest.mark.parametrize(
    "options", [{"jit": True}, {"reduce": ("sum", None), "reduce_axis": 0}], ids=str
)
def test_items_that_are_not_finite_are_counted_and_named(options):
    found = LENGTH.with_options(**options).nonfinite(BAD, W)
    assert isinstance(found, NonFinite)
    assert (found.count, found.indices.tolist()) == (2, [[2, 3], [4, 0]])
    for index, arguments in zip(found.indices, found.arguments, strict=True):
        np.testing.assert_array_equal(arguments["x"], BAD[tuple(index)])
        np.testing.assert_array_equal(arguments["w"], W)


def test_the_report_is_text():
    found = LENGTH.nonfinite(BAD.at[2, 3].set([-1.0, -2.0, -4.0]), W, most=1)
    assert str(found) == (
        "length: a value that is not finite in 2 of 35 items\n"
        "  [2, 3]: x = [-1, -2, -4], w = [0.5, 1, 2]\n"
        "  and 1 more"
    )


def test_items_whose_gradient_alone_is_not_finite():
    """The square root at 0, behind a `jnp.where` that discards it."""

    def root(x, w):
        return jnp.where(x > 0, jnp.sqrt(x), 0.0) * w

    x = jnp.array([1.0, 0.0, 4.0, -1.0, 0.0, jnp.inf])
    kernel = auto_vmap(x=0, w=0, chunk_size=2)(root)
    found = kernel.nonfinite(x, 2.0, gradient=True)
    assert (found.count, found.indices.tolist()) == (3, [[1], [3], [4]])
    assert kernel.nonfinite(x, 2.0).indices.tolist() == [[5]]


def test_items_that_do_not_count_are_left_out():
    kernel = LENGTH.with_options(reduce=("sum", {"at": None, "ok": None}), where="[1]['ok']")
    assert kernel.nonfinite(BAD, W).count == int(BAD[4, 0, 0] > 0.3)
    assert kernel.nonfinite(BAD.at[4, 0, 0].set(1.0), W).indices.tolist() == [[4, 0]]


def test_no_batch_and_no_item():
    assert LENGTH.nonfinite(X[0, 0], W).indices.shape == (0, 0)
    assert LENGTH.nonfinite(X[:0], W).indices.shape == (0, 2)


def test_methods_take_their_object_along():
    class Scale:
        by = 3.0

        @auto_vmap(x=0)
        def log(self, x):
            return self.by * jnp.log(x)

    assert Scale().log.nonfinite(jnp.array([1.0, -1.0])).indices.tolist() == [[1]]
    assert Scale().log.check(jnp.array([1.0, 2.0])).items == ((0,), (1,))


def test_wrong_numbers_are_refused():
    text = refusal(ValueError, LENGTH.check, X, W, items=0)
    assert text.startswith("length.check: items must be a positive int, ")
    text = refusal(ValueError, LENGTH.nonfinite, X, W, most=0)
    assert text.startswith("length.nonfinite: most must be a positive ")
