# SPDX-License-Identifier: MIT
"""`progress=`: what a loop reports, what shows it, and that off leaves nothing in a program."""

import functools
import importlib.util
import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rankax
from helpers import StepLog, assert_same, primitives, slow
from rankax import (
    auto_vmap,
    checkpoint_chunked_scan,
    chunked_jacrev,
    chunked_reduce,
    chunked_vmap,
    sliced_scan,
)
from rankax.ext import progress as host

pytestmark = pytest.mark.usefixtures("unchecked")  # a program to compare with reports as well

X = jnp.asarray(np.linspace(0.1, 0.9, 30, dtype="float32").reshape(10, 3))
W = jnp.asarray(np.ones(3, "float32"))
RATES = np.linspace(0.5, 1, 10, dtype="float32")
TO_TEN = [(done, 10) for done in (0, 2, 4, 6, 8, 10)]
EACH = [(done, 10) for done in range(11)]


def project(v, w):
    return jnp.sin(v) @ w


@auto_vmap(1, 1, chunk_size=4, lockstep=False)
def in_lanes(v, w):
    return jax.lax.while_loop(lambda s: s < 9, lambda s: 2 * s, 1 + v @ w)


def decay(carry, x):
    carry = jnp.sin(carry * x) + 0.1
    return carry, 2 * carry


class Heard:
    """A function of (done, total) that keeps its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, done, total):
        self.calls.append((done, total))

    def now(self):
        """Return all calls since the last time, after waiting for outstanding ones."""
        jax.effects_barrier()
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def heard(monkeypatch):
    seconds = itertools.count()  # no two reports are too close to be shown
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    return Heard()


@pytest.fixture
def kernel(heard):
    return auto_vmap(1, 1, chunk_size=2, progress=heard)(project)


@pytest.fixture
def bars(monkeypatch):
    """A list of all bars, in the order in which they were opened."""
    import tqdm.auto

    made = []

    class Bar(tqdm.auto.tqdm):
        def __init__(self, **options):
            made.append(self)
            super().__init__(**options)

        @property
        def is_closed(self):
            return self.disable

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    return made


# What a function hears.


def test_a_function_hears_numbers_that_grow_up_to_the_total(kernel, heard):
    assert_same(kernel(X, W), project(X, W))
    assert heard.now() == TO_TEN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", None)  # the loop is kept
        kernel(X, W)
    assert heard.now() == TO_TEN
    kernel.with_options(jit=True)(X, W)
    assert heard.now() == TO_TEN


def test_chunks_that_overlap(kernel, heard):
    kernel.with_options(chunk_size=4)(X, W)
    counts = [done for done, _ in heard.now()]
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (0, 10)


def test_one_report_for_all_lanes_of_a_vmap(kernel, heard):
    batch = jnp.stack([X, 2 * X, 3 * X])
    got = jax.vmap(kernel, (0, None))(batch, W)
    assert heard.now() == TO_TEN
    assert_same(got, jnp.sin(batch) @ W)


def test_only_the_outermost_loop_reports(kernel, heard):
    @auto_vmap(1, 1, chunk_size=2, progress=heard)
    def inner_too(v, w):
        return kernel(jnp.stack([v] * 4), w).sum()

    inner_too(X, W)
    assert heard.now() == TO_TEN
    kernel.with_options(reduce="sum", reduce_axis=1)(X[:, None], jnp.ones((4, 3)))
    assert heard.now() == EACH


def test_a_gradient_reports_its_forward_pass_only(kernel, heard):
    def loss(w):
        return (kernel(X, w) ** 2).sum()

    want = 2 * jnp.sin(X).T @ (jnp.sin(X) @ W)
    assert_same(jax.grad(loss)(W), want)
    assert heard.now() == TO_TEN
    assert_same(jax.jit(jax.vmap(jax.grad(loss)))(jnp.stack([W, W])), jnp.stack([want, want]))
    assert heard.now() == TO_TEN
    hessian = jax.jit(jax.hessian(loss))(W)
    assert_same(hessian, 2 * jnp.sin(X).T @ jnp.sin(X))


def test_a_checkpoint_around_the_loop_does_not_report_twice(kernel, heard):
    gradient = jax.grad(jax.checkpoint(lambda w: kernel(X, w).sum()))
    gradient(W)
    assert heard.now() == TO_TEN
    jax.jit(jax.vmap(gradient))(jnp.ones((2, 3)))
    assert heard.now() == TO_TEN


def test_an_output_that_is_not_used_is_not_differentiated(heard):
    def two(v, w):
        return v @ w, jnp.tanh(v @ w)

    def count(progress):
        kernel = auto_vmap(1, 1, chunk_size=2, progress=progress)(two)
        return primitives(jax.grad(lambda w: kernel(X, w)[0].sum()), W)["tanh"]

    assert count(heard) == count(False)


@pytest.mark.parametrize(
    "run",
    [
        lambda **options: chunked_vmap(project, 2, (0, None), **options)(X, W),
        lambda **options: chunked_reduce(project, "sum", 2, (0, None), **options)(X, W),
        lambda **options: auto_vmap(1, 1, chunk_size=2, reduce="max", **options)(project)(X, W),
    ],
)
def test_other_maps(heard, run):
    assert_same(run(progress=heard), run())
    assert heard.now() == TO_TEN


SCANS = {
    "backwards": lambda c, x, **o: sliced_scan(decay, c, x, reverse=True, step=3, **o),
    "nested": lambda c, x, **o: checkpoint_chunked_scan(decay, c, x, chunk_size=(5, 2), **o),
}


@pytest.mark.parametrize("name", ["nested", slow("backwards")])
def test_scans(heard, name):
    def loss(c, x, **options):
        end, ys = SCANS[name](c, x, **options)
        return end + ys.sum(), (end, ys)

    def gradient(**options):
        fun = functools.partial(loss, **options)
        return jax.jit(jax.grad(fun, (0, 1), has_aux=True))(0.3, RATES)

    want = gradient()
    assert_same(gradient(progress=heard), want)
    assert heard.now() == EACH
    assert_same(loss(0.3, RATES, progress=heard)[1], want[1])
    assert heard.now() == EACH
    jax.vmap(lambda c: loss(c, RATES, progress=heard)[0])(np.ones(3, "float32"))
    assert heard.now() == EACH


def test_a_long_loop_does_not_report_each_step(heard):
    checkpoint_chunked_scan(lambda c, _: (c + 1.0, None), 0.0, length=20_000, progress=heard)
    counts = [done for done, _ in heard.now()]
    assert 45 < len(counts) <= 51
    assert counts == sorted(set(counts))
    assert counts[-1] == 20_000


def test_updates_are_at_least_a_tenth_of_a_second_apart(monkeypatch):
    heard, now = Heard(), iter(np.arange(0, 100, 0.04))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    auto_vmap(1, 1, chunk_size=1, progress=heard)(project)(X, W)
    assert heard.now() == [(0, 10), (3, 10), (6, 10), (9, 10), (10, 10)]


# Where there is nothing to report.


def test_off_leaves_the_program_as_it_is(heard):
    def program(**options):
        kernel = auto_vmap(1, 1, chunk_size=2, **options)(project)
        loss = jax.value_and_grad(lambda w: kernel(X, w).sum())
        return jax.make_jaxpr(loss)(W).effects, primitives(loss, W)

    plain, off, on = program(), program(progress=False), program(progress=heard)
    assert off == plain
    assert not off[0]
    assert on[0]
    assert (on[1] - off[1])["rankax_report"] > 0


def test_a_call_without_a_loop_shows_nothing(kernel, heard):
    kernel.with_options(chunk_size=None)(X, W)
    chunked_vmap(project, 10, (0, None), progress=heard)(X, W)
    kernel(X[:0], W)
    assert heard.now() == []


def test_other_processes_show_nothing(kernel, heard, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    kernel(X, W)
    assert heard.now() == []


def test_a_scope_sets_it(heard):
    kernel = auto_vmap(1, 1, chunk_size=2)(project)
    with rankax.options(progress=heard):
        kernel(X, W)
        assert heard.now() == TO_TEN
        kernel.with_options(progress=False)(X, W)
        assert heard.now() == []


# An observer of one's own.


STEPS = [0, 4, 6, "end"]  # of chunks of 4 of ten items, of which the last one begins earlier


@pytest.mark.parametrize("options", [{}, {"jit": True}, {"reduce": "sum"}], ids=str)
def test_an_observer_is_told_of_each_step(options):
    log = StepLog()
    kernel = auto_vmap(1, 1, chunk_size=4, progress=log, **options)(project)
    want = kernel.with_options(progress=False)(X, W)
    for _ in range(2):
        assert_same(kernel(X, W), want)
        assert log.now() == STEPS
    assert log.asked == [1, (10, 4, 3)]  # the second call found the program of the first one
    kernel.with_options(chunk_size=None)(X, W)
    assert log.now() == []


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda log: chunked_vmap(project, 4, (0, None), progress=log)(X, W), STEPS),
        (lambda log: chunked_reduce(project, "sum", 4, (0, None), progress=log)(X, W), STEPS),
        (lambda log: chunked_jacrev(lambda w: X @ w, chunk_size=4, progress=log)(W), STEPS),
        (lambda log: sliced_scan(decay, 0.3, RATES, progress=log), [*range(10), "end"]),
        (
            lambda log: in_lanes.with_options(progress=log)(X, W),
            [0, 10, 4, 8, "end"],
        ),  # of items that have ended
    ],
    ids=["a map", "a reduction", "a Jacobian", "a scan", "lanes"],
)
def test_an_observer_of_other_loops(run, told):
    log = StepLog()
    run(log)
    assert log.now() == told


def test_observers_are_told_apart_and_an_outer_one_comes_first():
    first, second, inner = StepLog(), StepLog(), StepLog()
    kernel = auto_vmap(1, 1, chunk_size=4)(project)
    for log in (first, second):
        with rankax.options(progress=log):
            kernel(X, W)
    assert first.now() == second.now() == STEPS
    nested = auto_vmap(2, 1, chunk_size=4, progress=first)(kernel.with_options(progress=inner))
    nested(jnp.stack([X] * 10), W)
    assert (first.now(), inner.now(), inner.asked) == (STEPS, [], [])


# Bars.


def test_a_bar_for_each_call(bars):
    kernel = auto_vmap(1, 1, chunk_size=2, progress=True)(project)
    kernel(X, W)
    jax.grad(lambda w: kernel.with_options(progress="energy")(X, w).sum())(W)
    jax.effects_barrier()
    shown = [(bar.desc, bar.n, bar.total, bar.is_closed) for bar in bars]
    assert shown == [("project", 10, 10, True), ("energy", 10, 10, True)]


def test_a_bar_is_closed_when_the_kernel_fails(bars):
    def fail(x):
        if x > 0.5:
            raise KeyError
        return x

    @auto_vmap(1, 1, chunk_size=2, progress=True, jit=True)
    def failing(v, w):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), v.dtype), v[0] * w[0],
                                 vmap_method="sequential")  # fmt: skip

    with pytest.raises(Exception, match="KeyError"):
        failing(X, W)
    (bar,) = bars
    assert bar.is_closed
    assert bar.n < 10


def test_a_bar_is_closed_when_the_user_interrupts(bars, heard):
    def interrupted():
        with host.progress_of_call(True, "project") as progress:
            host.show(progress.target, 0, 10)
            host.show(progress.target, 4, 10)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    host.show("project", 6, 10)  # from the device, which is still running
    (bar,) = bars
    assert (bar.n, bar.is_closed) == (4, True)


def test_a_function_without_a_signature_is_taken():
    assert_same(auto_vmap(1, 1, chunk_size=5, progress=max)(project)(X, W), jnp.sin(X) @ W)


def test_a_bar_that_fails_is_closed(bars, monkeypatch):
    host.show("project", 0, 10)
    (bar,) = bars
    monkeypatch.setattr(bar, "update", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        host.show("project", 10, 10)
    assert bar.is_closed


def test_a_bar_that_was_left_open_is_closed_by_the_next_call(bars):
    host.show("project", 0, 10)
    host.show("project", 4, 10)
    auto_vmap(1, 1, chunk_size=2, progress=True)(project)(X, W)
    old, new = bars
    assert old.is_closed
    assert (new.n, new.is_closed) == (10, True)


# What is refused.


class Unhashable:
    __hash__ = None

    def __call__(self, done, total): ...


MUST = (
    "progress must be True, False, a label, a function of (done, total), or an observer with the "
    "methods of_parts and reports"
)


class Deaf:
    of_parts = StepLog.of_parts


class UnhashableLog(StepLog):
    __hash__ = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, f"{MUST}, got NoneType None"),
        (decay.__get__(0), f"{MUST}, but decay(x) cannot be called with two numbers"),
        (Unhashable(), "progress must be hashable because it is part of the key of a compiled"),
        (UnhashableLog(), "progress must be hashable because it is part of the key of a compiled"),
        (Deaf(), f"{MUST}, got Deaf <"),
        (StepLog, f"{MUST}, but StepLog() cannot be called with two numbers"),
        ("", "progress must not be an empty label; True shows the name"),
    ],
)
def test_wrong_values(value, text):
    text = f"^{re.escape(f'auto_vmap(project): {text}')}"
    with pytest.raises((TypeError, ValueError), match=text):
        auto_vmap(1, 1, progress=value)(project)


def test_scans_check_it_too():
    with pytest.raises(TypeError, match=re.escape(f"sliced_scan(decay): {MUST}, got int 3")):
        sliced_scan(decay, 0.0, X, progress=3)


def test_a_bar_needs_tqdm(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text = "progress='energy' shows a bar with tqdm, which is not installed; pip install tqdm, or"
    with pytest.raises(ImportError, match=text):
        auto_vmap(1, 1, progress="energy")(project)
    auto_vmap(1, 1, progress=Heard())(project)


@pytest.mark.parametrize(
    ("ranks", "unit"),
    [("i |", "i"), ("i j |", "i j"), (0, "items")],
    ids=["name", "merged", "unnamed"],
)
def test_a_bar_counts_by_the_name_of_the_axis(bars, heard, ranks, unit):
    y = {"i |": "j |"}.get(ranks, ranks)
    mapped = auto_vmap(x=ranks, y=y, chunk_size=3, progress=True)(lambda x, y: x * y)
    x = X if ranks == "i j |" else X[:, 0]
    mapped(x, x)
    jax.effects_barrier()
    assert [bar.unit for bar in bars] == [f" {unit}"]
