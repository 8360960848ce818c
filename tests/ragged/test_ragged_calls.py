# SPDX-License-Identifier: MIT
"""Calls with ragged arguments, beside a Python loop over the items with their own rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rankax
from helpers import assert_same, compilations, enable_x64
from rankax import Mask, Ragged, SplitKey, auto_vmap
from rankax.reductions import Best, Fold, TopK

LENGTHS = {
    "some": [6, 0, 5, 1, 3, 6, 1, 3],  # three programs
    "empty": [0, 0, 0],
    "none": [],
}
MODES = {
    "eager": {},
    "chunks": {"chunk_size": 3},
    "jit in chunks": {"jit": True, "chunk_size": 3},
}


def ragged(lengths, *core, seed=0):
    rng = np.random.default_rng(seed)
    return Ragged(rng.normal(size=(sum(lengths), *core)).astype(np.float32), lengths)


def total(x, mask, s):
    """One item; its value depends on every real row, and on no other."""
    return jnp.sum(jnp.tanh(x).sum(-1) ** 2, where=mask) * s


total_of = auto_vmap(x="n 3", mask=Mask("n"), s=0)(total)


def of_each_item(values, x, s):
    """Return the totals of the items of flat values, each with its own rows."""
    items = jnp.split(values, np.cumsum(x.lengths)[:-1])
    return jnp.stack([total(v, np.ones(len(v), bool), s[i]) for i, v in enumerate(items)])


@functools.cache
def case(name):
    x = ragged(LENGTHS[name], 3)
    return x, jnp.linspace(-1.0, 2.0, len(x), dtype=jnp.float32)


@functools.cache
def totals():
    x, s = case("some")
    return jax.jit(lambda values: of_each_item(values, x, s))(x.values)


@pytest.mark.parametrize(
    ("name", "mode", "reduce"),
    [
        ("some", "jit in chunks", None),
        ("empty", "eager", None),
        ("some", "chunks", "logsumexp"),
    ],
)
def test_values_and_gradients(name, mode, reduce):
    (x, s), kernel = case(name), total_of.with_options(reduce=reduce, **MODES[mode])
    plain = auto_vmap(0, reduce=reduce)(lambda v: v)

    @jax.jit
    def wanted(values, s):
        def exact(values, s):
            return plain(of_each_item(values, x, s))

        squared = jax.grad(lambda values, s: jnp.sum(exact(values, s) ** 2), argnums=(0, 1))
        return exact(values, s), squared(values, s)

    outs, (of_values, of_s) = wanted(jnp.asarray(x.values), s)
    assert_same(kernel(x, s), outs)
    got = jax.grad(lambda x, s: jnp.sum(kernel(x, s) ** 2), argnums=(0, 1))(x, s)
    assert_same(got, (Ragged(of_values, x.lengths), of_s), rtol=1e-4, atol=1e-5)


def test_no_item():
    x, s = case("none")
    assert_same(total_of.with_options(jit=True)(x, s), jnp.zeros(0))
    assert total_of.with_options(reduce="sum")(x, s) == 0
    with pytest.raises(ValueError, match="max needs at least 1 item"):
        total_of.with_options(reduce="max")(x, s)


def test_inside_jit_and_vmap_and_forward_derivatives():
    x, s = case("some")
    kernel = total_of.with_options(chunk_size=3)

    @jax.jit
    def inside(x):
        both = jax.tree.map(lambda v: jnp.stack([v, jnp.zeros_like(v)]), x)
        outs = jax.vmap(kernel, in_axes=(0, None))(both, s)
        return kernel(x, s), outs, jax.jvp(lambda x: kernel(x, s), (x,), (x,))[1]

    values = jnp.asarray(x.values)
    slope = jax.jvp(lambda values: of_each_item(values, x, s), (values,), (values,))[1]
    want = totals()
    want = want, jnp.stack([want, jnp.zeros_like(want)]), slope
    assert_same(inside(x), want, rtol=1e-4, atol=1e-5)


FILLED = {
    "copies of the last row share its derivative": (
        lambda x, mask: jnp.where(mask.any(), jnp.max(x), 0.0),
        [0, 1, 0, 0, 1, 1],
    ),
    "nothing flows back to an empty item": (
        lambda x, mask: jnp.where(mask.any(), jnp.sqrt(jnp.sum(x**2, where=mask)), 0.0),
        [3 / 5, 4 / 5, 2 / 11, 6 / 11, 9 / 11, 1],
    ),
}


@pytest.mark.parametrize("name", FILLED)
def test_gradients_where_rows_fill_an_item_up(name):
    fun, want = FILLED[name]
    kernel = auto_vmap(x="n", mask=Mask("n"), chunk_size=2)(fun)
    x = Ragged(jnp.array([3.0, 4.0, 2.0, 6.0, 9.0, 3.0]), [2, 3, 0, 1])
    got = jax.jit(jax.grad(lambda x: kernel(x).sum()))(x)
    np.testing.assert_allclose(got.values, want, rtol=1e-6)


def test_outputs_with_a_row_for_each_row():
    x, _ = case("some")

    @auto_vmap("(n,3)->(n,3),(n),()", mask=Mask("n"), chunk_size=3)
    def centred(x, mask):
        mean = jnp.sum(x, axis=0, where=mask[:, None]) / jnp.maximum(mask.sum(), 1).astype(x.dtype)
        return x - mean[None], jnp.sum(x**2, -1), mask.sum()

    @jax.jit
    def results(x):
        return *centred(x), jax.grad(lambda x: jnp.sum(centred(x)[0].values ** 3))(x)

    items = [item for item in x.to_list() if len(item)]
    rows = [item - item.mean(0) for item in items]
    slopes = [3 * (row**2 - (row**2).mean(0)) for row in rows]
    norms = [(item**2).sum(-1) for item in items]
    want = (Ragged(jnp.concatenate(parts), x.lengths) for parts in (rows, norms, slopes))
    of_rows, of_norms, of_slopes = want
    counts = jnp.asarray(x.lengths, jnp.int32)
    assert_same(results(x), (of_rows, of_norms, counts, of_slopes), rtol=1e-4, atol=1e-5)


def test_all_dtypes():
    lengths = [1, 5, 0]  # two programs; with jit=True, 5 are filled up to 6
    narrow = jnp.arange(6, dtype=jnp.bfloat16)
    binary = (np.array([1, 0, 1, 1, 0, 1], dtype) for dtype in (bool, np.complex64))
    values = *binary, narrow, jax.random.split(jax.random.key(0), 6)
    same = auto_vmap("(n),(n),(n),(n)->(n),(n),(n),(n)", jit=True)(lambda *xs: xs)
    for options in ({}, {"jit": False, "chunk_size": 1}):
        outs = same.with_options(**options)(*(Ragged(v, lengths) for v in values))
        assert_same(tuple(out.values for out in outs), jax.tree.map(jnp.asarray, values))
    total = auto_vmap(x="n", mask=Mask("n"), chunk_size=2)(lambda x, mask: jnp.sum(x, where=mask))
    got = jax.grad(lambda x: total(x).astype(jnp.float32).sum())(Ragged(narrow, lengths))
    assert_same(got.values, jnp.ones(6, jnp.bfloat16))
    with enable_x64():
        rows = auto_vmap("(n)->(n)", jit=True)(lambda x: x)(Ragged(np.arange(6.0), lengths))
        assert_same(rows.values, jnp.arange(6.0))


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
    keys = jax.random.split(jax.random.key(3), (4, 1))

    @jax.jit
    def drawn():
        own = jax.vmap(lambda key: jax.random.split(key, 8))(keys[:, 0])
        return jax.vmap(jax.vmap(jax.random.normal))(own) + s[None]

    own = jax.random.split(keys[0, 0], 8)
    assert_same(jax.jit(kernel)(x, s, keys), drawn())
    assert_same(jax.jit(kernel)(x, s, own), drawn()[0])


FOLD = Fold(
    np.array([1, 0], np.float32),
    lambda v: jnp.stack([jnp.full_like(v, 0.9), v]),
    lambda a, b: jnp.stack([a[0] * b[0], a[1] * b[0] + b[1]]),
    lambda state: state[1],
)


@functools.cache
def totals_of_grid():
    x, _ = case("some")
    grid = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
    return grid, jax.jit(jax.vmap(lambda s: of_each_item(x.values, x, s)))(grid)


@pytest.mark.parametrize(
    ("reduce", "axis", "mode"),
    [(TopK(3), None, "jit in chunks"), (FOLD, 1, "chunks"), ("sum", 0, "eager")],
)
def test_reductions(reduce, axis, mode):
    """Of a grid whose last axis is that of the ragged items."""
    x, _ = case("some")
    grid, outs = totals_of_grid()
    options = {"reduce": reduce, "reduce_axis": axis}
    kernel = total_of.with_options(**options, **MODES[mode])
    want = auto_vmap(0, jit=True, **options)(lambda v: v)(outs)
    assert_same(kernel(x, grid), want, rtol=1e-4, atol=1e-5)


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

    @jax.jit
    def gradients(x, s):
        return [jax.vmap(jax.grad(fun), (0, None))(x, s) for fun in (of_ragged, plain)]

    assert_same(*gradients(x, s))


def test_where_kept_outputs_and_the_best_item():
    x, s = case("some")
    reduce = {"all": None, "best": Best("v"), "ok": "sum"}

    @auto_vmap(x="n 3", mask=Mask("n"), s=0, reduce=reduce, where="ok", **MODES["chunks"])
    def kernel(x, mask, s):
        own = {"v": total(x, mask, s), "n": mask.sum()}
        return {"all": own, "best": own, "ok": mask.sum() > 1}

    each = {"v": totals(), "n": jnp.asarray(x.lengths, jnp.int32)}
    at = min(np.flatnonzero(x.lengths > 1), key=each["v"].__getitem__)
    best = jax.tree.map(lambda v: v[at], each)
    count = jnp.sum(x.lengths > 1)
    assert_same(jax.jit(kernel)(x, s), {"all": each, "best": best, "ok": count})


def test_the_plan():
    x = ragged([*range(1, 60), *range(1, 25)], 3)
    s = jnp.ones(83)
    plan = total_of.with_options(chunk_size=10).plan(x, s)
    assert str(plan).startswith("total: batch shape (83,), 83 evaluations, ")
    assert plan.in_flight <= 10
    (note,) = plan.ragged
    assert note.startswith("ragged n: 83 items of 1 to 59 rows in ")
    assert note.endswith(" %")
    assert sum(part.evaluations for _, part in plan.parts) == 83
    assert f"\n  {note}\n" in f"{plan}\n"
    shape = Ragged(jax.ShapeDtypeStruct(x.values.shape, jnp.float32), x.lengths)
    with rankax.options(chunk_size=10):
        assert str(total_of.plan(shape, s)) == str(plan)


def test_a_plan_says_what_sums_count_without_a_mask():
    def total(x, mask=True):
        return jnp.sum(x, where=mask)

    uneven, even = (Ragged(jnp.ones(sum(n)), n) for n in (range(1, 40), [4, 4]))
    bare, masked = auto_vmap(x="n")(total), auto_vmap(x="n", mask=Mask("n"))(total)
    line = 'no parameter is Mask("n"): sums over n count copies of each item\'s last row, too'
    assert bare.plan(uneven).notes == (line,)
    assert str(bare.plan(uneven)).endswith(f"\n  {line}")
    assert bare.plan(even).notes == masked.plan(uneven).notes == ()


def test_an_error_of_jax_names_the_argument():
    kernel = auto_vmap(x="n 2", w=0)(lambda x, w: x if w > 0 else -x)
    with pytest.raises(jax.errors.TracerBoolConversionError, match="value of the argument w"):
        kernel(Ragged(np.ones((6, 2)), [1, 2, 3]), jnp.ones(3))


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


def test_an_eager_call_compiles_a_program_for_each_length():
    x = ragged([1, 3, 0, 3, 6, 1, 6], 3)
    weights = np.ones((3, 5), np.float32)  # so that no other test has these programs
    kernel = auto_vmap(x="n 3", mask=Mask("n"))(
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


def test_a_call_is_lowered_as_one_program():
    x, s = case("some")
    kernel = total_of.with_options(jit=True, reduce="sum", bucket=(4, 8), chunk_size=2)
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), (x, s))
    compiled = kernel.lower(*shapes).compile()
    assert_same(compiled(jnp.asarray(x.values), s), kernel(x, s))


@pytest.mark.parametrize("reduce", ["max", TopK(1)], ids=["max", "top"])
def test_winners_that_lose_send_nothing_back(reduce):
    """Each group of items of one length has a winner, whose derivative may be infinite."""
    values, b = np.float32([0, 0, 4, 5, 6, 7, 0, 0, 0, 0]), np.float32([1, 0, 10, 0])
    best = auto_vmap(v="n", b=0, reduce=reduce)(lambda v, b: b - jnp.sqrt(v).sum())

    def largest(values, b):
        return jax.tree.leaves(best(Ragged(values, np.array([2, 3, 1, 4])), b))[0].sum()

    slopes = jax.grad(largest, (0, 1))(values, b)
    assert_same(slopes, (np.eye(10, dtype="f")[5] / -(2 * 7**0.5), np.eye(4, dtype="f")[2]))
