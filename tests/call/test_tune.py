# SPDX-License-Identifier: MIT
"""``kernel.tune``: which options are tried, and what is chosen."""

import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, compilations, slow
from rankax import Mask, Ragged, auto_vmap, options
from rankax._options import Options
from rankax.ext import tune
from rankax.ext.xla_cpu.library import IS_TUNED

SHORT = 0.005  # seconds, enough for little more than the options as they are
ENOUGH = 0.3  # seconds of `clock`, enough for everything
X = jnp.asarray(np.sin(np.arange(40 * 8 * 3.0)).reshape(40, 8, 3))

needs_library = pytest.mark.skipif(
    not (IS_TUNED and Options(xla_cpu=True).on_cpu), reason="elsewhere there is no such library"
)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still, except for a millisecond at each reading."""
    clock = SimpleNamespace(now=0.0)

    def read():
        clock.now += 1e-3
        return clock.now

    monkeypatch.setattr(time, "perf_counter", read)
    return clock


def distances(points):
    separation = points[:, None] - points[None]
    return jnp.sum(jnp.sqrt(jnp.sum(separation**2, axis=-1) + 1e-3))


kernel = auto_vmap(2)(distances)


def tuning_of(kernel, *args, seconds=ENOUGH, **options):
    return kernel.tune(*args, seconds=seconds, **options).tuning


def tiles(tuning):
    return [candidate.tile for candidate in tuning.candidates]


# What is tried.


def test_lanes_are_tried_where_items_differ(clock):
    def collatz(n):
        step = lambda n: jnp.where(n % 2 == 0, n // 2, 3 * n + 1)  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] > 1, lambda s: (step(s[0]), s[1] + 1), (n, 0))[1]

    tuning = tuning_of(auto_vmap(0)(collatz), np.arange(1, 70, dtype=np.int32))
    assert any(candidate.options.get("lockstep") is False for candidate in tuning.candidates)


def test_sizes_are_tried_and_the_options_as_they_are_come_first(clock):
    tuning = tuning_of(kernel, X)
    assert tiles(tuning) == [40, 14, 4, 1]
    assert [c.options for c in tuning.candidates] == [
        {"chunk_size": size} for size in (None, 16, 4, 1)
    ]
    assert all(c.seconds > 0 and c.temporaries >= 0 for c in tuning.candidates)


def test_a_chunk_size_is_a_bound_unless_a_limit_is_given(clock):
    chunked, x = kernel.with_options(chunk_size=4), X[:7]
    assert tiles(tuning_of(chunked, x, memory_limit=10**9)) == [4, 7, 1]
    with options(chunk_size=2):
        assert tiles(tuning_of(kernel, x)) == [2, 1]
        assert tiles(tuning_of(chunked, x)) == [4, 1]


@needs_library
def test_with_jit_sums_are_tried_without_the_library_of_xla(clock):
    given = {"xla_embed_ir_in_executable": True}
    jitted = kernel.with_options(jit=True, compiler_options=given, xla_cpu=True)
    option = "xla_cpu_experimental_ynn_fusion_type"
    off = {**given, option: "LIBRARY_FUSION_TYPE_DOT"}
    tried = [c.options for c in tuning_of(jitted, X).candidates]
    assert [o for o in tried if "compiler_options" in o] == [
        {"chunk_size": None, "compiler_options": off},
        {"chunk_size": 16, "compiler_options": off},
    ]
    without = jitted.with_options(compiler_options={option: ""})
    assert len(tuning_of(without, X[:7]).candidates) == 3


# What is chosen.


@pytest.fixture
def compiled_with_care():
    """As in no other test, because time passes."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@needs_library
@pytest.mark.weekly
@pytest.mark.optimized
def test_what_is_much_faster_is_chosen(compiled_with_care):
    """Times are compared, so nothing else should run: beside other tests, all are alike."""
    tuning = tuning_of(kernel, jnp.tile(X, (500, 1, 1)), seconds=20)
    chosen = tuning.candidates[tuning.chosen]
    assert chosen.tile <= 21
    assert chosen.seconds < tuning.candidates[0].seconds  # by how much, other processes decide


def test_the_result_is_the_kernel_with_those_options():
    jitted = kernel.with_options(jit=True)
    tuned = jitted.tune(X, seconds=SHORT)
    again = jitted.with_options(**tuned.tuning.options)
    assert tuned.plan(X) == again.plan(X)
    assert_same(tuned(X), jax.vmap(distances)(X), rtol=1e-4)
    assert compilations(again, X)[1] == 0
    assert tuned.lower(X).as_text() == again.lower(X).as_text()
    assert tuned.__wrapped__ is distances
    assert kernel.tuning is None
    assert again.tuning is None
    assert tuned.with_options(chunk_size=3).tuning is None


@pytest.mark.slow
def test_a_gradient_is_also_tried_without_checkpoints(clock):
    x = np.linspace(0, 1, 300 * 3, dtype=np.float32).reshape(300, 3)
    wave = auto_vmap(1)(lambda v: jnp.sin(v).sum())

    def stored(kernel, seconds=SHORT, **options):
        tuning = tuning_of(kernel, x, seconds=seconds, **options)
        return [c.options for c in tuning.candidates if "checkpoint" in c.options]

    found, bound = [{"chunk_size": 256, "checkpoint": False}], wave.with_options(chunk_size=299)
    assert stored(wave, seconds=ENOUGH, gradient=True) == found
    assert stored(bound, seconds=ENOUGH, gradient=True, memory_limit="1 GB") == found
    assert stored(bound, gradient=True) == []
    assert stored(wave.with_options(checkpoint=False), gradient=True) == []
    assert stored(wave) == []


def test_a_bucket_is_tuned_as_it_is_filled_up(clock):
    kernel = auto_vmap(x=0, jit=True, bucket=(100,))(jnp.tanh)
    tuned = kernel.tune(jnp.ones(20))
    sizes = [candidate.options["chunk_size"] for candidate in tuned.tuning.candidates]
    assert 64 in sizes
    assert_same(tuned(jnp.ones(20)), jnp.tanh(jnp.ones(20)))


def sort(x):
    return jnp.sort(jnp.sin(jnp.arange(1024.0) * x))[512]


def test_a_limit_excludes_what_needs_more(clock):
    x = np.arange(8, dtype=np.float32)
    tuning = tuning_of(auto_vmap(0)(sort), x, memory_limit=15_000)
    above = [c for c in tuning.candidates if c.temporaries > 15_000]
    assert above
    assert {c.tile for c in above} == {c.tile for c in tuning.candidates if c.tile >= 4}
    assert {(c.seconds, c.note) for c in above} == {(None, "above the limit of 15 kB")}
    assert tuning.candidates[tuning.chosen].tile <= 2
    by_option = auto_vmap(0, chunk_size=2, memory_limit="15 kB")(sort)
    assert sorted(tiles(tuning_of(by_option, x))) == [1, 2]
    text = (
        r"sort.tune: no chunk size keeps to the memory_limit of 100 B; the smallest one tried "
        r"needs [\d.]+ k?B besides arguments and results"
    )
    with pytest.raises(ValueError, match=f"^{text}$"):
        auto_vmap(0)(sort).tune(x[:2], memory_limit=100, seconds=ENOUGH)


# Any arguments.


@pytest.mark.parametrize(("jit", "gradient"), [(True, False), slow(False, True)])
def test_trees_scalars_keys_static_values_and_outer_products(jit, gradient, clock):
    @auto_vmap({"a": 1, "n": None}, 0, 0, None, None, jit=jit)
    def model(tree, scale, key, table, power):
        noise = jax.random.normal(key, tree["a"].shape)
        return {"out": scale * jnp.sum(tree["a"] ** power + noise) + table[0], "n": power}

    keys, table = jax.random.split(jax.random.key(0), 3), np.ones(4, np.float32)
    args = {"a": jnp.ones((2, 1, 2)), "n": 2}, 2.0, keys, table, 2
    tuned = model.tune(*args, seconds=ENOUGH, gradient=gradient)
    assert set(tiles(tuned.tuning)) == {6, 1, 3}
    assert_same(tuned(*args), model(*args))


def watched(clock, seconds_of_call, seconds_of_trace=0.0):
    """A kernel of two numbers whose calls and traces take this long, and the lengths of calls.

    A call takes ``seconds_of_call`` of its length; a trace stands for the time to compile.
    """
    lengths = []

    def wait(a, b):  # must not read values: a callback cannot wait for other computations
        lengths.append(b.size)
        clock.now += seconds_of_call(b.size)
        return np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32)

    @auto_vmap(0, 0)
    def kernel(a, b):
        clock.now += seconds_of_trace
        steps = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
        return jax.pure_callback(wait, a, a, b, vmap_method="expand_dims") + steps

    return kernel, lengths


def tuning_of_many(kernel, count, **options):
    return tuning_of(kernel, jnp.float32(1), jnp.arange(float(count)), **options)


def measured(tuning):
    return [c.tile for c in tuning.candidates if c.seconds is not None]


def of_rows(x, s, mask):
    return jnp.sum(jnp.sin(x).sum(-1), where=mask) * s


@pytest.mark.parametrize(("shape", "gradient"), [((12,), False), slow((2, 6), True)])
def test_ragged_items(clock, shape, gradient):
    lengths = np.arange(shape[-1]) % 2 * 3
    x = Ragged(np.ones((lengths.sum(), 3), np.float32), lengths)
    s = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    kernel = auto_vmap(x="n 3", s=0, mask=Mask("n"), reduce="sum")(of_rows)
    tuned = kernel.tune(x, s, gradient=gradient, seconds=ENOUGH)
    assert len(measured(tuned.tuning)) > 1
    assert tuned.tuning.candidates[0].temporaries is not None
    assert_same(tuned(x, s), kernel(x, s), rtol=1e-5)


def test_tuning_ends_in_time(clock):
    """It took 60 to 90 seconds instead of 3, and 15 instead of 1."""
    kernel, lengths = watched(clock, lambda n: 0.002 + 1e-6 * n, seconds_of_trace=0.1)
    tuning = tuning_of_many(kernel, 20000, seconds=1)
    assert clock.now < 1.5
    assert measured(tuning)[0] == 20000
    left_out = [c for c in tuning.candidates if c.seconds is None]
    assert len(left_out) > 3
    assert {(c.note, c.temporaries) for c in left_out} == {("not tried", None)}
    assert str(tuning).count("  -              -            not tried") == len(left_out)
    assert f"; {len(left_out)} not tried, for which pass more seconds=\n" in str(tuning)
    assert min(lengths) >= 16  # none that would have taken longer than all the time


def test_the_kernel_as_it_is_and_vmap_are_always_measured(clock):
    kernel, _ = watched(clock, lambda n: 0.01, seconds_of_trace=5.0)
    chunked = kernel.with_options(chunk_size=8)
    assert measured(tuning_of_many(chunked, 60, seconds=1, memory_limit="1 GB")) == [8, 60]
    tuning = tuning_of_many(chunked, 60, seconds=1)
    assert measured(tuning) == [8]


def test_what_is_slow_takes_no_turns(clock):
    kernel, lengths = watched(clock, lambda n: 1e-3)
    tuning = tuning_of_many(kernel, 20, seconds=60)
    assert measured(tuning) == [20, 10, 4, 1]
    assert (lengths.count(1), lengths.count(4)) == (20, 5)
    assert lengths.count(20) > 10


@pytest.mark.parametrize("share", [0.98, slow(0.9)])
def test_what_wins_by_a_little_is_not_chosen(clock, share):
    kernel, _ = watched(clock, lambda n: 1e-3 * n * (share if n == 4 else 1))
    tuning = tuning_of_many(kernel, 20, seconds=60)
    (close,) = [c for c in tuning.candidates if c.tile == 4]
    assert close.seconds < tuning.candidates[0].seconds
    if share == 0.98:
        assert (tuning.chosen, close.note) == (0, "")
        assert "  chosen\n" in f"{tuning}\n"
    else:
        assert tuning.options == {"chunk_size": 4}
        assert "  chosen, 1.11 times as fast\n" in f"{tuning}\n"


def test_what_fails_is_a_row(clock):
    def seconds_of_call(n):
        if n == 4:
            raise MemoryError("no memory for four")
        return 1e-3 * n

    kernel, _ = watched(clock, seconds_of_call)
    tuning = tuning_of_many(kernel, 20, seconds=60)
    (failed,) = [c for c in tuning.candidates if c.tile == 4]
    assert failed.seconds is None
    assert failed.note.startswith("failed: INTERNAL: ")
    assert measured(tuning) == [tile for tile in tiles(tuning) if tile != 4]


def test_what_needs_more_than_the_free_memory_is_not_chosen(clock, monkeypatch):
    monkeypatch.setattr(tune, "free_bytes", lambda: 15_000)
    tuning = tuning_of(auto_vmap(0)(sort), np.arange(8, dtype=np.float32))
    assert tuning.candidates[0].note == "above the limit of 15 kB"
    assert tuning.candidates[tuning.chosen].temporaries <= 15_000


class Body:
    factor = 2.0

    @auto_vmap(x=1)
    def energy(self, x):
        return self.factor * jnp.sum(x**2)


def test_methods():
    body, x = Body(), jnp.ones((20, 3))
    tuned = Body.energy.tune(body, x, seconds=SHORT)
    assert_same(tuned(body, x), jnp.full(20, 6.0))
    tuned = body.energy.tune(x, seconds=SHORT)
    assert tuned.__self__ is body
    assert tuned.tuning.measured_for.startswith("energy: value for x float32[20,3], on ")
    assert_same(tuned(x), jnp.full(20, 6.0))


# What is refused.


def test_inside_a_trace_it_is_refused():
    def fun(x):
        return jnp.sum(kernel.tune(x, seconds=SHORT)(x))

    text = r"^distances.tune: it runs the kernel to time it, so it cannot be called inside jax.jit"
    for call in (jax.jit(fun), jax.vmap(fun), jax.grad(fun), jax.jit(lambda _: fun(X))):
        with pytest.raises(TypeError, match=text):
            call(X)


@pytest.mark.parametrize(
    ("x", "options", "text"),
    [
        (X[0], {}, "the arguments have no batch axes, so there is nothing to tune; pass "),
        (X[:0], {}, "the arguments have an empty batch"),
        (X, {"seconds": "5"}, "seconds must be a positive number, got '5'"),
        (X, {"gradient": 1}, "gradient must be True or False, got 1"),
        (X, {"memory_limit": 0}, "memory_limit must be a positive number"),
        (X.astype(int), {"gradient": True}, "gradient=True, but no argument with a rank holds flo"),
    ],
)
def test_wrong_arguments_are_refused(x, options, text):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(f'distances.tune: {text}')}"):
        kernel.tune(x, **options)


# The table.


def test_the_table_says_what_was_measured():
    tuning = tuning_of(kernel, X, seconds=SHORT, gradient=True)
    title, header, *rows = str(tuning).split("\n")
    left = [candidate.note for candidate in tuning.candidates].count("not tried")
    assert title == (
        "distances: value and gradient for points float32[40,8,3], on "
        f"{jax.devices()[0].device_kind} with JAX {jax.__version__}"
        + (f"; {left} not tried, for which pass more seconds=" if left else "")
    )
    assert header.split("  ")[2] == "items at once"
    assert len(rows) == len(tuning.candidates)
    assert [row.startswith("  > ") for row in rows].index(True) == tuning.chosen
    assert "  chosen" in rows[tuning.chosen]
    assert repr(tuning) == str(tuning)
