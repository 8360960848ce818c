# SPDX-License-Identifier: MIT
"""Calls with ragged arguments, beside a Python loop over the items with their own rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rankax
from helpers import assert_same, compilations, enable_x64, slow, weekly
from rankax import Mask, Ragged, SplitKey, auto_vmap, chunked_vmap
from rankax.reductions import Best, Fold, Moments, TopK

LENGTHS = {
    "some": [6, 0, 5, 1, 3, 6, 1, 3],  # three programs
    "many": [3, 0, 2, 7, 1, 1, 4, 2],
    "equal": [4] * 5,
    "one long": [1, 2, 1, 60, 2, 1, 3],
    "empty": [0, 0, 0],
    "one item": [4],
    "none": [],
}
MODES = {
    "eager": {},
    "chunks": {"chunk_size": 3},
    "jit": {"jit": True},
    "jit in chunks": {"jit": True, "chunk_size": 3},
}


def ragged(lengths, *core, seed=0):
    rng = np.random.default_rng(seed)
    return Ragged(rng.normal(size=(sum(lengths), *core)).astype(np.float32), lengths)


def total(x, mask, s):
    """One item; its value depends on every real row, and on no other."""
    return jnp.sum(jnp.tanh(x).sum(-1) ** 2, where=mask) * s


total_of = auto_vmap(x="n 3", mask=Mask("n"), s=0)(total)


def one_by_one(kernel, x, *others):
    """Call a kernel for each item with its own rows, in one program."""

    @jax.jit
    def stacked(items, others):
        outs = [
            kernel(item, np.ones(len(item), bool), *(other[i] for other in others))
            for i, item in enumerate(items)
        ]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

    return stacked(x.to_list(), others)


@functools.cache
def case(name):
    x = ragged(LENGTHS[name], 3)
    return x, jnp.linspace(-1.0, 2.0, len(x), dtype=jnp.float32)


@functools.cache
def totals(name):
    return one_by_one(total, *case(name))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("some", "jit in chunks"),
        ("empty", "jit"),
        slow("one long", "eager"),
        weekly("many", "chunks"),
        slow("one item", "eager"),
        weekly("equal", "jit in chunks"),
    ],
)
def test_values_and_gradients(name, mode):
    (x, s), kernel = case(name), total_of.with_options(**MODES[mode])
    assert_same(kernel(x, s), totals(name))

    def exact(values, s):
        items = jnp.split(values, np.cumsum(x.lengths)[:-1])
        return sum(total(v, np.ones(len(v), bool), s[i]) ** 2 for i, v in enumerate(items))

    got = jax.grad(lambda x, s: jnp.sum(kernel(x, s) ** 2), argnums=(0, 1))(x, s)
    want = jax.jit(jax.grad(exact, argnums=(0, 1)))(jnp.asarray(x.values), s)
    assert got[0].lengths.tolist() == x.lengths.tolist()
    assert_same((got[0].values, got[1]), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["jit in chunks", "eager"])
def test_no_item(mode):
    x, s = case("none")
    kernel = total_of.with_options(**MODES[mode])
    assert_same(kernel(x, s), jnp.zeros(0))
    assert kernel.with_options(reduce="sum")(x, s) == 0
    with pytest.raises(ValueError, match="max needs at least 1 item"):
        kernel.with_options(reduce="max")(x, s)


def test_inside_jit_and_vmap_and_twice_differentiated():
    x, s = case("some")
    want = totals("some")
    kernel = total_of.with_options(chunk_size=3)
    assert_same(jax.jit(kernel)(x, s), want)
    both = jax.tree.map(lambda v: jnp.stack([jnp.asarray(v), jnp.zeros_like(v)]), x)
    outs = jax.vmap(kernel, in_axes=(0, None))(both, s)
    assert_same(outs, jnp.stack([want, jnp.zeros_like(want)]))
    _, got = jax.jvp(lambda x: kernel(x, s), (x,), (x,))
    exact = functools.partial(one_by_one, lambda v, m, s: jnp.sum(2 * v * _slope(v)) * s)
    np.testing.assert_allclose(got, exact(x, s), rtol=1e-4, atol=1e-5)


def _slope(v):
    return jnp.sum(jnp.tanh(v), -1, keepdims=True) * (1 - jnp.tanh(v) ** 2)


def test_a_maximum_that_ignores_the_mask():
    """Copies of the last row share its derivative."""
    x = Ragged(jnp.array([1.0, 5.0, 2.0, 1.0, 9.0, 3.0, 2.0]), [2, 3, 1, 1])
    kernel = auto_vmap(x="n", chunk_size=2)(lambda x: jnp.max(x))
    want = [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    np.testing.assert_allclose(jax.grad(lambda x: kernel(x).sum())(x).values, want)


def test_nothing_flows_back_to_what_fills_an_empty_item():
    kernel = auto_vmap(x="n", mask=Mask("n"))(
        lambda x, mask: jnp.where(mask.any(), jnp.sqrt(jnp.sum(x**2, where=mask)), 0.0)
    )
    x = Ragged(jnp.array([3.0, 4.0, 2.0]), [2, 0, 1])
    got = jax.grad(lambda x: kernel(x).sum())(x).values
    np.testing.assert_allclose(got, [0.6, 0.8, 1.0], rtol=1e-6)


def test_outputs_with_a_row_for_each_row():
    x, _ = case("some")

    def centred(x, mask):
        mean = jnp.sum(x, axis=0, where=mask[:, None]) / jnp.maximum(mask.sum(), 1).astype(x.dtype)
        return x - mean[None], jnp.sum(x**2, -1), mask.sum()

    declared = auto_vmap("(n,3)->(n,3),(n),()", mask=Mask("n"), jit=True, chunk_size=3)
    kernel = declared(centred)
    of_x, norm, count = kernel(x)
    assert of_x.lengths.tolist() == norm.lengths.tolist() == x.lengths.tolist()
    items = jax.jit(lambda items: [centred(v, np.ones(len(v), bool)) for v in items])(x.to_list())
    for got, want in zip((of_x.values, norm.values), zip(*items, strict=True), strict=False):
        assert_same(got, jnp.asarray(np.concatenate(want)))
    assert_same(count, jnp.asarray(np.stack([item[2] for item in items])))
    got = jax.grad(lambda x: jnp.sum(kernel(x)[0].values ** 3))(x)
    assert got.values.shape == x.values.shape
    slope = jax.jit(jax.grad(lambda v: jnp.sum((v - v.mean(0)[None]) ** 3)))
    np.testing.assert_allclose(got.values[6:11], slope(x.values[6:11]), rtol=1e-4, atol=1e-5)


def test_all_dtypes():
    lengths = [1, 5, 0]  # two programs; with jit=True, 5 are filled up to 6
    kernel = auto_vmap("(n)->(n)", mask=Mask("n"), jit=True)(lambda x, mask: x)
    keys = jax.random.split(jax.random.key(0), 6)
    small = [np.array([1, 0, 1, 1, 0, 1], d) for d in (bool, np.complex64)]
    for values in (*small, jnp.arange(6, dtype=jnp.bfloat16), keys):
        for options in ({}, {"jit": False, "chunk_size": 1}):
            out = kernel.with_options(**options)(Ragged(values, lengths))
            assert_same(out.values, jnp.asarray(values))
    narrow = auto_vmap(x="n", mask=Mask("n"), chunk_size=2)(lambda x, mask: jnp.sum(x, where=mask))
    x = Ragged(jnp.arange(6, dtype=jnp.bfloat16), lengths)
    got = jax.grad(lambda x: narrow(x).astype(jnp.float32).sum())(x)
    assert_same(got.values, jnp.ones(6, jnp.bfloat16))
    with enable_x64():
        x = Ragged(np.arange(6.0), lengths)
        assert_same(kernel(x).values, jnp.arange(6.0))
        assert kernel(x).values.dtype == jnp.float64


def test_several_dimensions_and_trees():
    nodes, edges = ragged([3, 0, 2, 5], 3), ragged([4, 1, 0, 9], seed=1)

    def molecule(nodes, edges, a, b, g):
        return jnp.sum(nodes["x"].sum(-1) * nodes["q"], where=a) * jnp.sum(edges, where=b) + g

    kernel = auto_vmap(
        nodes={"x": "n 3", "q": "n"}, edges="e", a=Mask("n"), b=Mask("e"), g=0, chunk_size=2
    )(molecule)
    charges = ragged([3, 0, 2, 5], seed=2)
    g = jnp.arange(4.0)
    out = kernel({"x": nodes, "q": charges}, edges, g)
    triples = zip(nodes.to_list(), charges.to_list(), edges.to_list(), strict=True)
    want = [(x.sum(-1) * q).sum() * e.sum() for x, q, e in triples]
    np.testing.assert_allclose(out, np.array(want) + np.arange(4), rtol=1e-4, atol=1e-5)
    plan = str(kernel.plan({"x": nodes, "q": charges}, edges, g))
    assert "ragged n: 4 items of 0 to 5 rows in" in plan
    assert "ragged e: 4 items of 0 to 9 rows in" in plan


def test_keys_are_those_of_the_batch():
    x, s = case("some")
    kernel = auto_vmap(x="n 3", s=0, key=SplitKey, **MODES["chunks"])(
        lambda x, s, key: jax.random.normal(key) + 0 * x.sum() + s
    )
    key = jax.random.key(3)
    grid = jnp.arange(32.0).reshape(4, 8)
    own, keys = jax.random.split(key, 8), jax.random.split(key, (4, 1))

    @jax.jit
    def drawn():
        draw = jax.vmap(jax.random.normal)
        of_rows = jax.vmap(lambda k: draw(jax.random.split(k, 8)))(keys[:, 0])
        return draw(own) + s, draw(jax.random.split(key, 32)).reshape(4, 8) + grid, of_rows

    once, of_grid, of_rows = drawn()
    assert_same(kernel(x, s, key), once)
    assert_same(kernel(x, s, own), once)
    assert_same(kernel(x, grid, key), of_grid)
    assert_same(kernel(x, s * 0, keys), of_rows)


FOLD = Fold(
    np.array([1, 0], np.float32),
    lambda v: jnp.stack([jnp.full_like(v, 0.9), v]),
    lambda a, b: jnp.stack([a[0] * b[0], a[1] * b[0] + b[1]]),
    lambda state: state[1],
)
REDUCTIONS = {
    **{name: name for name in ("sum", "max", "argmin", "logsumexp")},
    "top": TopK(3),
    "moments": Moments(),
    "fold": FOLD,
}


@functools.cache
def totals_of_grid():
    x, _ = case("some")
    grid = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
    outs = one_by_one(lambda v, mask, s: jax.vmap(total, (None, None, 0))(v, mask, s), x, grid.T)
    return jnp.asarray(grid), outs.T


@pytest.mark.parametrize(
    ("reduce", "mode"),
    [
        ("top", "jit in chunks"),
        ("fold", "chunks"),
        slow("argmin", "jit"),
        slow("moments", "jit"),
        weekly("max", "eager"),
        weekly("sum", "chunks"),
        weekly("logsumexp", "chunks"),
    ],
)
def test_reductions(reduce, mode):
    """Of a grid whose last axis is that of the ragged items."""
    x, _ = case("some")
    grid, outs = totals_of_grid()
    reduce = REDUCTIONS[reduce]
    plain = auto_vmap(0, reduce=reduce, jit=True)(lambda v: v)
    for axis in (None, 1) if isinstance(reduce, TopK) else (0, 1):
        kernel = total_of.with_options(reduce=reduce, reduce_axis=axis, **MODES[mode])
        want = plain.with_options(reduce_axis=axis)(outs)
        assert_same(kernel(x, grid), want, rtol=1e-4, atol=1e-5)


def test_the_best_item_with_its_other_outputs():
    x, s = case("some")

    def item(x, mask, s):
        return {"v": total(x, mask, s), "s": s, "n": mask.sum()}

    kernel = auto_vmap(x="n 3", mask=Mask("n"), s=0, reduce=Best("v"), **MODES["jit in chunks"])(
        item
    )
    best, at = kernel(x, s), int(jnp.argmin(totals("some")))
    np.testing.assert_allclose(best["s"], s[at])
    assert best["n"] == x.lengths[at]


@pytest.mark.parametrize(
    ("reduce", "mode"),
    [("logsumexp", "chunks"), slow("max", "jit"), weekly("fold", "chunks")],
)
def test_gradients_of_reductions(reduce, mode):
    x, s = case("some")
    reduce = REDUCTIONS[reduce]
    kernel = total_of.with_options(reduce=reduce, **MODES[mode])
    got = jax.grad(kernel)(x, s)
    plain = auto_vmap(0, reduce=reduce)(lambda v: v)

    def exact(values):
        items = jnp.split(values, np.cumsum(x.lengths)[:-1])
        outs = [total(v, np.ones(len(v), bool), s[i]) for i, v in enumerate(items)]
        return plain(jnp.stack(outs))

    want = jax.jit(jax.grad(exact))(jnp.asarray(x.values))
    np.testing.assert_allclose(got.values, want, rtol=1e-4, atol=1e-5)


def test_a_gradient_has_the_rule_of_a_custom_vjp():
    halved = jax.custom_vjp(jnp.sin)
    halved.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x) / 2,))
    least = auto_vmap(x="n", s=0, reduce="min")(lambda x, s: jnp.prod(1 + halved(x)) * s)
    x, s = np.linspace(0, 1, 12, dtype=np.float32).reshape(2, 6), np.float32([3, 2, 1])

    def plain(x, s):
        items = x[:1], x[1:3], x[3:]
        return jnp.min(jnp.stack([jnp.prod(1 + halved(item)) for item in items]) * s)

    def of_ragged(x, s):
        return least(Ragged(x, [1, 2, 3]), s)

    want = jax.vmap(jax.grad(plain), (0, None))(x, s)
    assert_same(jax.jit(jax.vmap(jax.grad(of_ragged), (0, None)))(x, s), want)


def test_where_and_kept_outputs():
    x, s = case("some")

    def longer(x, mask, s):
        return {"v": total(x, mask, s), "ok": mask.sum() > 1}

    outs, ok = totals("some"), x.lengths > 1
    kernel = auto_vmap(x="n 3", mask=Mask("n"), s=0, **MODES["chunks"])(longer)
    mean = kernel.with_options(reduce="mean", where="ok")(x, s)
    np.testing.assert_allclose(mean["v"], outs[ok].mean(), rtol=1e-5)
    kept = kernel.with_options(reduce={"v": None, "ok": "sum"})(x, s)
    np.testing.assert_allclose(kept["v"], outs, rtol=1e-5, atol=1e-6)
    assert kept["ok"] == ok.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"memory_limit": "1 MB"},
        {"devices": 1},
        slow({"progress": max, "chunk_size": 2}),  # a function of two numbers
        {"batch_shape": (2, 8)},
        {"bucket": (4, 8), "jit": True},
    ],
    ids=str,
)
def test_other_options(options):
    x, s = case("some")
    want = totals("some")
    got = total_of.with_options(**options)(x, s)
    if options.get("batch_shape") == (2, 8):
        want = jnp.stack([want, want])
    assert_same(got, want)


def test_items_that_end_by_themselves():
    x, _ = case("some")

    def loop(x, mask):
        n = mask.sum()
        step = lambda c: (c[0] + 1, c[1] + jnp.sin(x[c[0], 0]))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < n, step, (jnp.zeros_like(n), jnp.zeros(())))[1]

    kernel = auto_vmap(x="n 3", mask=Mask("n"), lockstep=False, **MODES["jit in chunks"])(loop)
    want = [np.sin(item[:, 0]).sum() for item in x.to_list()]
    np.testing.assert_allclose(kernel(x), want, rtol=1e-5, atol=1e-6)


def test_a_scope_sets_options_and_dense_calls_stay():
    x, s = case("some")
    with rankax.options(chunk_size=2):
        assert total_of.plan(x, s).in_flight <= 2
    dense = jnp.ones((5, 4, 3))
    assert total_of(dense, 1.0).shape == (5,)


def test_the_plan():
    x = ragged([*range(1, 60), *range(1, 25)], 3)
    s = jnp.ones(83)
    plan = total_of.with_options(chunk_size=10).plan(x, s)
    lines = str(plan).split("\n")
    assert lines[0].startswith("total: batch shape (83,), 83 evaluations, ")
    assert plan.in_flight <= 10
    (note,) = plan.ragged
    assert note.startswith("ragged n: 83 items of 1 to 59 rows in ")
    assert note.endswith(" %")
    assert sum(part.evaluations for _, part in plan.parts) == 83
    assert f"  {note}" in lines
    shape = Ragged(jax.ShapeDtypeStruct(x.values.shape, jnp.float32), x.lengths)
    assert str(total_of.with_options(chunk_size=10).plan(shape, s)) == str(plan)


def test_10000_items_of_log_normal_length():
    """The promise: at most 12 programs, less than a quarter filled in."""
    lengths = np.ceil(np.random.default_rng(0).lognormal(np.log(20), 1.2, 10_000)).astype(int)
    assert lengths.max() > 1000
    x = Ragged(np.ones((lengths.sum(), 3), np.float32), lengths)
    for kernel in (total_of, total_of.with_options(jit=True)):
        plan = kernel.plan(x, jnp.ones(10_000))
        assert len(plan.parts) <= 12
        padding = int(plan.ragged[0].split()[-2])
        assert padding < 25


def test_other_batches_reuse_the_programs():
    kernel = auto_vmap(x="n", s=0, mask=Mask("n"), jit=True, chunk_size=4)(
        lambda x, s, mask: jnp.sum(jnp.sin(x), where=mask) * s
    )

    def batch(seed):
        rng = np.random.default_rng(seed)
        lengths = rng.permutation([*range(1, 9)] * 30)[: 240 - seed]
        return ragged(lengths.tolist(), seed=seed), np.ones(len(lengths), np.float32)

    _, first = compilations(kernel, *batch(0))
    kernel(*batch(8))
    x, s = batch(5)
    out, count = compilations(kernel, x, s)
    assert count <= first // 4
    np.testing.assert_allclose(out, [np.sin(v).sum() for v in x.to_list()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, slow({"reduce": "sum"})], ids=str)
def test_an_eager_call_compiles_a_program_for_each_length(options):
    rng = np.random.default_rng(0)
    x = ragged(rng.integers(0, 40, 300).tolist(), 3)
    weights = rng.normal(size=(3, 5)).astype(np.float32)  # so that no other test has these programs
    kernel = auto_vmap(x="n 3", mask=Mask("n"), **options)(
        lambda x, mask: jnp.sum(jnp.tanh(x @ weights).sum(-1), where=mask)
    )
    lengths = len(kernel.plan(x).parts)
    out, count = compilations(kernel, x)
    assert count <= lengths + 3
    again, count = compilations(kernel, jax.tree.map(lambda v: v * 1, x))
    assert count == 0
    assert_same(again, out)
    gradient = jax.grad(lambda x: kernel(x).sum())
    _, count = compilations(gradient, x)
    assert count <= 2 * lengths + 8
    _, count = compilations(gradient, x)
    assert count == 0


@pytest.mark.parametrize("options", [{}, {"reduce": "sum", "bucket": (4, 8), "chunk_size": 2}])
def test_a_call_is_lowered_as_one_program(options):
    x, s = case("some")
    kernel = total_of.with_options(jit=True, **options)
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), (x, s))
    compiled = kernel.lower(*shapes).compile()
    assert_same(compiled(jnp.asarray(x.values), s), kernel(x, s))


def test_chunked_vmap_does_not_map_rows():
    x, _ = case("some")
    with pytest.raises(TypeError, match=r"x is Ragged, and its rows are not items of a batch"):
        chunked_vmap(lambda x: x.values, chunk_size=2)(x)
