# SPDX-License-Identifier: MIT
"""The option `fused`: what it takes, what it refuses, and what a plan says of it."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

import rankax
from helpers import assert_same, refusal
from rankax import SplitKey, auto_vmap
from rankax.reductions import ByLabel, Histogram, TopK

X = jnp.ones((4, 3))
needs_warp = pytest.mark.skipif(
    importlib.util.find_spec("warp") is None, reason="needs NVIDIA Warp: pip install 'rankax[warp]'"
)


def total(x):
    return jnp.sum(x)


def spread(x):
    return jnp.sum(jnp.sort(x))


@pytest.fixture
def without_warp(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "warp" else find(name)
    )


@pytest.mark.usefixtures("without_warp")
def test_without_warp_it_is_refused_at_once():
    assert refusal(ImportError, auto_vmap(1, reduce="sum", fused=True), total) == (
        "auto_vmap(total): fused=True needs NVIDIA Warp, which is not installed: pip install "
        "'rankax[warp]'; fused='auto' uses it where it is"
    )


@pytest.mark.usefixtures("without_warp")
def test_without_warp_auto_changes_nothing():
    programs = [
        str(jax.make_jaxpr(auto_vmap(1, reduce="sum", fused=fused)(total))(X))
        for fused in (False, "auto")
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_wrong_value_is_refused(value):
    text = refusal(TypeError, rankax.options, fused=value)
    assert text == f"rankax.options: fused must be True, False or 'auto', got {value!r}"


@needs_warp
def test_a_map_is_not_fused():
    text = refusal(TypeError, auto_vmap(1, fused=True), total)
    assert "fused=True has no effect without reduce=, such as reduce='sum'" in text
    with rankax.options(fused=True):
        assert auto_vmap(1)(total)(X).shape == (4,)


def counted(x, key):
    return jnp.sum(x) * jax.random.normal(key)


def kept(x):
    return jnp.sum(x), x


def many(x):
    return jnp.sum(jnp.outer(x, x) @ jnp.ones((300, 300)))


def looked_up(x):
    return jnp.sin(x)[jnp.argmax(x)]


def labelled(x):
    return (x[0] > 0).astype(int), x[1]


def complex_numbers(x):
    return jnp.real(jnp.sum(jnp.exp(1j * x.astype(jnp.complex64))))


REFUSED = {
    "an operation": (spread, (X,), {}, r"because of sort \(.*test_fused_option.py:\d+.*\)"),
    "bins": (labelled, (X,), {"reduce": ByLabel(0, 5000)}, "more than 4096 numbers in all bins"),
    "edges": (
        total,
        (X,),
        {"reduce": Histogram(300, range=(0, 9))},
        "an argument with 301 numbers",
    ),
    "a reduction": (total, (X,), {"reduce": TopK(2)}, "a reduction whose state takes more than"),
    "a key": (counted, (X, jax.random.key(0)), {"key": SplitKey}, "an item that depends on its"),
    "what is kept": (kept, (X,), {"reduce": ("sum", None)}, "an output that is kept whole"),
    "large items": (many, (jnp.ones((4, 300)),), {}, "an argument with 300 numbers for each item"),
    "an index": (looked_up, (X,), {}, "dynamic_slice.*its index is computed"),
    "complex numbers": (complex_numbers, (X,), {}, "complex64"),
    "a batch": (lambda x: jnp.sum(x, 1), (X,), {"batched": True}, "batched=True"),
}


@needs_warp
@pytest.mark.parametrize(("fun", "args", "options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_fused_is_named(fun, args, options, words):
    kernel = auto_vmap(x=1, **{"reduce": "sum", **options})(fun)
    text = refusal(ValueError, kernel.with_options(fused=True), *args)
    assert re.search(
        rf"it cannot be one kernel, because of .*{words.removeprefix('because of ')}", text
    )
    assert text.endswith("fused='auto' evaluates such a call as without the option")
    if not options.get("batched"):
        assert "not fused, because of" in str(kernel.with_options(fused=True).plan(*args))


@needs_warp
def test_a_plan_says_that_a_call_is_fused():
    kernel = auto_vmap(1, reduce="sum", fused=True)(total)
    assert "fused: one kernel, which stores nothing for an item" in str(kernel.plan(X))
    assert "fused" not in str(kernel.with_options(fused=False).plan(X))


@needs_warp
@pytest.mark.parametrize(("reduce", "is_walked"), [("sum", False), ("prod", True), ("gram", True)])
def test_a_plan_says_that_a_derivative_is_not(reduce, is_walked):
    plan = str(auto_vmap(1, reduce=reduce, fused=True)(total).plan(X))
    assert "fused: one kernel" in plan
    words = "its derivative goes by loops, because of the states that it needs"
    assert (words in plan) == is_walked


@needs_warp
def test_auto_falls_back_in_silence(monkeypatch):
    # As if the CPU were a GPU.
    monkeypatch.setattr("rankax._options.can_fuse", lambda target: True)
    kernel = auto_vmap(1, reduce="sum", fused="auto")(spread)
    assert float(kernel(X)) == 12
    assert "not fused, because of sort" in str(kernel.plan(X))
    kernel = auto_vmap(1, reduce=ByLabel(0, 5000), fused="auto")(labelled)
    assert_same(kernel(X)[1][:2], jnp.array([0.0, 4.0]))
    assert "not fused, because of" in str(kernel.plan(X))
    assert "rankax_fused" in str(jax.make_jaxpr(auto_vmap(1, reduce="sum", fused="auto")(total))(X))


def test_auto_is_for_gpus():
    kernel = auto_vmap(1, reduce="sum", fused="auto")(total)
    assert "rankax_fused" not in str(jax.make_jaxpr(kernel)(X))


@needs_warp
def test_clear_caches_forgets_kernels():
    rankax.clear_caches()
    auto_vmap(1, reduce="sum", fused=True)(total)(X)
    assert rankax.caches.counts()["fused kernels"] == 1
    rankax.clear_caches()
    assert rankax.caches.counts()["fused kernels"] == 0


@needs_warp
def test_items_of_a_fused_kernel_are_checked():
    kernel = auto_vmap(1, reduce="sum", fused=True)(total)
    assert str(kernel.check(X)) == str(kernel.with_options(fused=False).check(X))
    assert kernel.nonfinite(X.at[2].set(jnp.nan)).count == 1


@needs_warp
def test_one_kernel_serves_all_lengths():
    rankax.clear_caches()
    kernel = auto_vmap(1, reduce="sum", fused=True)(total)
    for length in (3, 50, 7000):
        kernel(jnp.ones((length, 3)))
    assert rankax.caches.counts()["fused kernels"] == 1
