# SPDX-License-Identifier: MIT
"""``kernel.tune``: which options are tried, what is chosen, and how it is saved."""

import json
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, compilations, slow
from rankax import Mask, Ragged, auto_vmap, load_tuning, options
from rankax.call.kernels import bind
from rankax._options import Options
from rankax.ext.tune import measure
from rankax.ext.tune.workload import RaggedWorkload
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


@pytest.mark.slow
def test_lockstep_is_tried_where_it_is_not_asked_for(clock):
    halves = auto_vmap(0, lockstep=False)(
        lambda x: jax.lax.while_loop(lambda y: y > 0.1, lambda y: y / 2, x)
    )
    tuning = tuning_of(halves, jnp.linspace(0.5, 9.0, 6))
    together = [c.options for c in tuning.candidates if c.options.get("lockstep")]
    assert [o["chunk_size"] for o in together][:2] == [None, 1]


def test_sizes_are_tried_and_the_options_as_they_are_come_first(clock):
    tuning = tuning_of(kernel, X)
    assert tiles(tuning) == [40, 14, 4, 1, 8, 2]
    assert [c.options for c in tuning.candidates] == [
        {"chunk_size": size} for size in (None, 16, 4, 1, 8, 2)
    ]
    assert all(c.seconds > 0 and c.temporaries >= 0 for c in tuning.candidates)


def test_a_chunk_size_is_a_bound_unless_a_limit_is_given(clock):
    chunked, x = kernel.with_options(chunk_size=4), X[:7]
    assert tiles(tuning_of(chunked, x, memory_limit=10**9)) == [4, 7, 1, 2]
    with options(chunk_size=2):
        assert tiles(tuning_of(kernel, x)) == [2, 1]
        assert tiles(tuning_of(chunked, x)) == [4, 1, 2]


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
    assert len(tuning_of(without, X[:7]).candidates) == 4


def test_cpu_math_is_compared_if_the_kernel_allows_it(clock):
    tuning = tuning_of(kernel.with_options(cpu_math=True), X[:7])
    assert {c.options.get("cpu_math") for c in tuning.candidates} == {None, False}


# What is chosen.


@pytest.fixture
def compiled_with_care():
    """As in no other test, because time passes."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@needs_library
@pytest.mark.optimized
def test_what_is_much_faster_is_chosen(compiled_with_care):
    tuning = tuning_of(kernel, jnp.tile(X, (500, 1, 1)), seconds=20)
    chosen = tuning.candidates[tuning.chosen]
    assert chosen.tile <= 21
    assert chosen.seconds < tuning.candidates[0].seconds / 1.5


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
    assert set(tiles(tuned.tuning)) == {6, 1, 2, 3}
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


def test_a_slice_has_several_chunks_where_the_batch_has(clock):
    """A large chunk was one in a slice, which is `jax.vmap`, without the tiles of a chunk."""
    kernel, lengths = watched(clock, lambda n: 1e-3 * n)
    tuning_of_many(kernel.with_options(chunk_size=180), 1000, seconds=6)
    assert max(lengths) < 90  # of 1000; a run takes a sixtieth of the time


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


def test_a_slice_has_ragged_items_of_all_lengths():
    lengths = np.sort(np.arange(400) % 5)
    rows = np.arange(lengths.sum(), dtype=np.float32)
    kernel = auto_vmap(x="n", s=0, mask=Mask("n"))(lambda x, s, mask: jnp.sum(x, where=mask) * s)
    call = bind(kernel.spec, (Ragged(rows, lengths), np.arange(400)), {}, takes_nodes=True)
    workload = RaggedWorkload(call, None, False, "tune")
    values, shell = workload.part((20,))
    x, s = shell.treedef.unflatten(values)
    assert np.bincount(x.lengths).tolist() == [4] * 5
    items = Ragged(rows, lengths).to_list()
    assert_same(x, Ragged.from_list([items[int(i)] for i in s]))


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


def test_the_kernel_as_it_is_and_vmap_are_always_measured(clock, tmp_path):
    kernel, _ = watched(clock, lambda n: 0.01, seconds_of_trace=5.0)
    chunked = kernel.with_options(chunk_size=8)
    assert measured(tuning_of_many(chunked, 60, seconds=1, memory_limit="1 GB")) == [8, 60]
    tuning = tuning_of_many(chunked, 60, seconds=1)
    assert measured(tuning) == [8]
    assert "<td>not tried</td>" in tuning._repr_html_()
    tuning.save(tmp_path / "t")
    assert list(load_tuning(tmp_path / "t")) == [tuning]


def test_the_faster_half_runs_on_and_the_options_as_they_are(clock):
    kernel, _ = watched(clock, lambda n: 1e-4 * n)
    notes = [c.note for c in tuning_of_many(kernel, 40, seconds=20).candidates]
    assert notes[0] == ""
    assert notes.count("given up early") >= len(notes) - 2 > 3


@pytest.mark.slow
def test_what_is_fast_on_a_slice_only_is_not_chosen(clock):
    def seconds_of_call(n):
        return 1e-5 if n == 1100 else 1e-5 * n if 50 < n <= 64 else 5e-4 * n

    kernel, lengths = watched(clock, seconds_of_call)
    tuning = tuning_of_many(kernel, 1100, seconds=10)
    assert tuning.options == {"chunk_size": None}
    assert 1100 in lengths
    assert [c.note for c in tuning.candidates].count("no faster in the end") == 1


@pytest.mark.parametrize("share", [0.98, slow(0.9)])
def test_what_wins_by_a_little_is_not_chosen(clock, share):
    kernel, _ = watched(clock, lambda n: 1e-3 * n * (share if n == 4 else 1))
    tuning = tuning_of_many(kernel, 20, seconds=60)
    (close,) = [c for c in tuning.candidates if c.tile == 4]
    assert close.seconds < tuning.candidates[0].seconds
    if share == 0.98:
        assert (tuning.chosen, close.note) == (0, "no faster in the end")
        assert "  chosen\n" in f"{tuning}\n"
    else:
        assert (tuning.options, close.note) == ({"chunk_size": 4}, "")
        assert "  chosen, 1.11 times as fast\n" in f"{tuning}\n"


@pytest.mark.parametrize(("call", "chosen"), [(1e-4, 8), slow(2e-3, None)])
def test_a_slice_of_short_runs_decides_nothing(clock, call, chosen):
    """Programs that take long to compile left time for 16 items, on which two calls lost to one."""
    kernel, lengths = watched(clock, lambda n: call, seconds_of_trace=2.0)
    chunked = kernel.with_options(chunk_size=8)
    tuning = tuning_of_many(chunked, 4000, memory_limit="1 GB", seconds=5)
    assert max(lengths) == 16
    assert tuning.options == {"chunk_size": chosen}
    assert ("too few items to tell" in str(tuning)) == (chosen == 8)


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
    monkeypatch.setattr(measure, "free_bytes", lambda: 15_000)
    tuning = tuning_of(auto_vmap(0)(sort), np.arange(8, dtype=np.float32))
    assert tuning.candidates[0].note == "above the limit of 15 kB"
    assert tuning.candidates[tuning.chosen].temporaries <= 15_000


@pytest.mark.slow
def test_what_was_too_large_for_a_slice_keeps_to_the_limit(clock):
    def wait(x):
        clock.now += 1e-5 if x.size == 1100 else 5e-4 * x.size
        return np.zeros(x.shape, np.float32)

    @auto_vmap(0, chunk_size=400)
    def kernel(x):
        noise = jnp.sort(jnp.sin(jnp.arange(128.0) * x))[64]
        return jax.pure_callback(wait, x, x, vmap_method="expand_dims") + noise

    within = tuning_of(kernel, jnp.arange(1100.0), seconds=10, memory_limit=375_000)
    assert within.options["chunk_size"] is not None
    (vmap,) = [c for c in within.candidates if c.options == {"chunk_size": None}]
    assert vmap.note == "above the limit of 375 kB"


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
    assert tuned.tuning.measured_for["arguments"].keys() == {"self", "x"}
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


# The table, and the file.


def test_the_table_says_what_was_measured():
    tuning = tuning_of(kernel, X, seconds=SHORT, gradient=True)
    title, header, *rows = str(tuning).split("\n")
    left = [candidate.note for candidate in tuning.candidates].count("not tried")
    assert title == (
        "distances: value and gradient for points float32[40, 8, 3], on "
        f"{jax.devices()[0].device_kind} with JAX {jax.__version__}"
        + (f"; {left} not tried, for which pass more seconds=" if left else "")
    )
    assert header.split("  ")[2] == "items at once"
    assert len(rows) == len(tuning.candidates)
    assert [row.startswith("  > ") for row in rows].index(True) == tuning.chosen
    assert "  chosen" in rows[tuning.chosen]
    html = tuning._repr_html_()
    assert html.count("<tr>") == 1 + len(rows)
    assert f"<th>chunk_size={tuning.options['chunk_size']}</th>" in html


def test_a_file_is_found_again_for_exactly_the_same(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    first, second = kernel.tune(X, seconds=SHORT), kernel.tune(X, seconds=SHORT, gradient=True)
    first.tuning.save(path)
    second.tuning.save(str(path))
    first.tuning.save(path)  # in place of itself
    saved = load_tuning(path)
    assert len(saved) == 2
    assert list(saved) == [second.tuning, first.tuning]
    like = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert saved.find(kernel, X) == saved.find(first, points=like) == first.tuning
    assert saved.find(kernel, X, gradient=True) == second.tuning
    assert saved.find(kernel, X[:39]) is None
    assert saved.find(kernel, X.astype(jnp.float16)) is None
    assert saved.find(auto_vmap(2)(jnp.sum), X) is None
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.99")
        assert saved.find(kernel, X) is None

    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="another")])
    assert saved.find(kernel, X) is None


def test_static_values_are_part_of_what_is_found(tmp_path):
    power = auto_vmap(0, None)(lambda x, n: x**n)
    x = jnp.arange(5.0)
    tuning_of(power, x, 2, seconds=SHORT).save(tmp_path / "t")
    found = [load_tuning(tmp_path / "t").find(power, x, n) is not None for n in (2, 3)]
    assert found == [True, False]


def test_a_file_of_the_first_release_is_read(tmp_path):
    candidate = {"options": {"chunk_size": 4}, "tile": 4, "seconds": 1e-6, "temporaries": 8}
    facts = {"kernel": "a.b", "arguments": {}, "gradient": False, "device": "cpu", "jax": "0.9"}
    tuning = {
        "measured_for": facts,
        "candidates": [{**candidate, "note": "given up early"}, {**candidate, "note": ""}],
        "chosen": 1,
    }
    file = {"format": "rankax tunings, 1", "tunings": [tuning]}
    (tmp_path / "t").write_text(json.dumps(file))
    (read,) = load_tuning(tmp_path / "t")
    assert read.options == {"chunk_size": 4}
    assert read.measured_for == facts


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "JSONDecodeError: Expecting property name enclosed in double quotes: "),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
        ('{"format": "rankax tunings, 2"}', "its format is 'rankax tunings, 2', not"),
        ('{"format": "rankax tunings, 1", "tunings": [{}]}', "KeyError: 'measured_for'"),
    ],
)
def test_another_file_is_refused(tmp_path, content, why):
    path = tmp_path / "other.json"
    path.write_text(content)
    begin = re.escape(f"{path}: not a file that Tuning.save wrote ({why}")
    with pytest.raises(ValueError, match=f"^{begin}"):
        load_tuning(path)
