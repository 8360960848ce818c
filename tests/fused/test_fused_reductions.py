# SPDX-License-Identifier: MIT
"""All reductions in one kernel, against the walk by loops: layouts, dtypes, transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rankax
from helpers import assert_same, at_each_run, enable_x64, equations, name_of, slow
from pair_kernels import gauss
from rankax import auto_vmap
from rankax.ext.fused import fold
from rankax.reductions import Best, Fold, Moments, Several

pytest.importorskip("warp", reason="needs NVIDIA Warp: pip install 'rankax[warp]'")

DRAW = np.random.default_rng(6).normal


def arrays(rows, columns, dtype=np.float32):
    shapes = (rows, 1, 3), (columns, 3), (columns,)
    return [jnp.asarray(DRAW(size=shape).astype(np.float32)).astype(dtype) for shape in shapes]


X, Y, W = ARGS = arrays(6, 90)


def assert_close(got, want, rtol=2e-5):
    """Assert equal types, weak ones too, and values within rounding of the largest."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max(initial=0))


def both(fun=gauss, **options):
    """Return a kernel that is fused, and one that is not."""
    kernel = auto_vmap(x=1, y=1, w=0, **{"reduce": "sum", "reduce_axis": 1, **options})(fun)
    return kernel.with_options(fused=True), kernel


def loss(kernel):
    def fun(*args):
        outs = jax.tree.leaves(kernel(*args))
        floats = [out for out in outs if jnp.issubdtype(out.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.sin(0.01 * out.astype(jnp.float32))) for out in floats)

    return fun


def gradient(kernel):
    return jax.grad(loss(kernel), (0, 1, 2))


def kernels_of(fun, *args):
    """Return how many kernels a program has."""
    names = [name_of(eqn) for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr)]
    return names.count("rankax_fused")


# Reductions.


def masked(x, y, w):
    return {"v": gauss(x, y, w), "ok": w > 0}


def never(x, y, w):
    return {"v": jnp.sqrt(gauss(x, y, w)), "ok": w > 100}


def near_one(x, y, w):
    return 1 + 0.01 * gauss(x, y, w)


def affine():
    """Return a composition of affine functions, which does not commute."""
    lift = lambda v: (1 + 0.01 * v, v)  # noqa: E731
    return Fold((1.0, 0.0), lift, lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]))


REDUCTIONS = {
    **{name: name for name in ("sum", "mean", "prod", "max", "min", "argmax", "argmin")},
    **{name: name for name in ("logsumexp", "gram")},
    "moments": Moments(),
    "several": Several("min", "argmin", "sum"),
    "fold": affine(),
}


@pytest.mark.parametrize("reduce", at_each_run(("argmin", "logsumexp"), REDUCTIONS))
@pytest.mark.parametrize("fun", [masked, slow(near_one), slow(never)])
def test_a_reduction_equals_that_of_loops(fun, reduce):
    options = {"reduce": {"v": reduce, "ok": "sum"}, "where": "ok"}
    options = {"reduce": reduce} if fun is near_one else options
    fused, plain = both(fun, **options)
    assert_close(jax.jit(fused)(*ARGS), jax.jit(plain)(*ARGS))
    assert kernels_of(fused, *ARGS) >= 1
    if reduce not in ("argmax", "argmin"):
        assert_close(jax.jit(gradient(fused))(*ARGS), jax.jit(gradient(plain))(*ARGS))


def test_an_argument_says_which_items_count():
    kernel = auto_vmap(x=1, y=1, w=0, ok=0, reduce="sum", reduce_axis=1, where="ok")
    plain = kernel(lambda x, y, w, ok: gauss(x, y, w))
    fused, args = plain.with_options(fused=True), (X, Y, W, W > 0)
    assert_close(jax.jit(fused)(*args), jax.jit(plain)(*args))
    got, want = (jax.jit(jax.grad(loss(call), (0, 1, 2)))(*args) for call in (fused, plain))
    assert_close(got, want)
    assert kernels_of(fused, *args) == 1


def test_batch_axes_with_names():
    named = auto_vmap(x="i | 3", y="j | 3", w="j |", reduce="sum", over="j", fused=True)(gauss)
    _, plain = both()
    args = X[:, 0], Y, W
    assert_close(jax.jit(named)(*args), jax.jit(plain)(*ARGS))
    assert kernels_of(named, *args) == 1
    assert_close(jax.jit(gradient(named))(*args)[1:], jax.jit(gradient(plain))(*ARGS)[1:])


def test_an_eager_gradient_is_compiled_once(unchecked, monkeypatch):
    fused, _ = both()
    written, kernel_of = [], fold.kernel_of
    monkeypatch.setattr(fold, "kernel_of", lambda *args: written.append(1) or kernel_of(*args))
    for is_first in (True, False, False):
        written.clear()
        gradient(fused)(*ARGS)
        assert bool(written) == is_first


def test_any_and_all():
    options = {"reduce": {"a": "any", "b": "all", "c": "sum"}}
    fun = lambda x, y, w: {"a": w > 2, "b": x[0] > -9, "c": (y[0] > 0).astype(jnp.int32)}  # noqa: E731
    fused, plain = both(fun, **options)
    assert_close(jax.jit(fused)(*ARGS), plain(*ARGS))


@pytest.mark.parametrize("where", [None, "ok"])
def test_the_best_item(where):
    fun = lambda x, y, w: {"v": gauss(x, y, w), "y": y, "ok": w > 0}  # noqa: E731
    fused, plain = both(fun, reduce=Best("v"), **({} if where is None else {"where": where}))
    assert_close(jax.jit(fused)(*ARGS), plain(*ARGS))
    assert_close(jax.jit(gradient(fused))(*ARGS), gradient(plain)(*ARGS))


def test_several_reductions_are_one_kernel():
    fused, _ = both(reduce=Several("sum", "mean", "max", "argmin", Moments()))
    assert kernels_of(fused, *ARGS) == 1


def test_a_gradient_is_one_more_kernel_for_each_side():
    fused, _ = both()
    assert kernels_of(lambda *args: jax.vjp(fused, *args)[1](jnp.ones(6)), *ARGS) == 3


def test_no_pair_is_stored():
    fused, _ = both()
    args = arrays(500, 700)
    for fun in (fused, gradient(fused)):
        sizes = [
            v.aval.size
            for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr)
            for v in eqn.outvars
            if hasattr(v.aval, "size")
        ]
        assert max(sizes) < 500 * 700 / 10


# Layouts.

PAIRS = jnp.asarray(DRAW(size=(6, 90)), "float32")
LAYOUTS = {
    "two axes, the first": (ARGS, 0),
    "two axes, both": (ARGS, None),
    **{
        f"three axes, {axis}": (
            (X[:, None], Y[:8], jnp.asarray(DRAW(size=(5, 8)), "float32")),
            axis,
        )
        for axis in (0, 1, 2, (0, 2), (0, 1), (1, 2), None)
    },
    "an argument of each pair": ((X, Y, PAIRS), 1),
    "stretched": ((X, Y[:1], W), 1),
    "no item": (arrays(6, 0), 1),
    "no row": (arrays(0, 6), 1),
    "nothing": (arrays(0, 0), 1),
    "one item": (arrays(6, 1), 1),
    "one row": (arrays(1, 6), 1),
    "a single pair": (arrays(1, 1), None),
    "few rows": (arrays(2, 30_000), 1),
    "few columns": (arrays(20_000, 2), 0),
}


@pytest.mark.parametrize(
    "layout", at_each_run(("three axes, (0, 2)", "few rows", "no item"), LAYOUTS)
)
def test_a_layout_equals_that_of_loops(layout):
    args, axis = layout
    fused, plain = both(reduce_axis=axis)
    assert_close(jax.jit(fused)(*args), plain(*args))
    assert_close(jax.jit(gradient(fused))(*args), gradient(plain)(*args))


@pytest.mark.parametrize("reduce", ["argmin", "fold", "moments"])
def test_parts_of_a_row_are_merged(reduce):
    args = arrays(2, 30_000)
    fused, plain = both(near_one, reduce=REDUCTIONS[reduce])
    assert_close(jax.jit(fused)(*args), plain(*args), 1e-4)


def test_a_long_sum_does_not_drift():
    args = jnp.full((1, 1, 3), 0.0), jnp.zeros((10**6, 3)), jnp.full(10**6, 0.1)
    fused, _ = both(lambda x, y, w: w + x[0] * y[0])
    # JAX 0.10 adds the sums of the parts of a row one after another.
    np.testing.assert_allclose(jax.jit(fused)(*args), 1e5, rtol=1e-6)


def test_flat_indices_may_need_64_bits():
    with enable_x64():
        shapes = (60_000, 1, 3), (60_000, 3), (60_000,)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        fused, _ = both(reduce="argmin", reduce_axis=None)
        found = equations(jax.make_jaxpr(fused)(*args).jaxpr)
        (body,) = [e.params["fold"].kernel.body for e in found if name_of(e) == "rankax_fused"]
        assert "const long long at = (((long long)0*ni0+i0)*ni1+i1);" in body


def test_an_axis_that_is_not_in_front():
    x = jnp.asarray(DRAW(size=(3, 40)), "float32")
    norms = rankax.chunked_reduce(lambda v: jnp.sin(v) @ v, "sum", chunk_size=7, in_axes=1)
    want = norms(x)
    with rankax.options(fused=True):
        assert kernels_of(norms, x) == 1
        assert_close(norms(x), want)


# Types.


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    args = arrays(6, 90, dtype)
    fused, plain = both()
    wide, _ = both(lambda x, y, w: gauss(*(a.astype(jnp.float32) for a in (x, y, w))))
    out = jax.jit(fused)(*args)
    assert_close(out.astype(jnp.float32), wide(*args), float(jnp.finfo(dtype).eps))
    assert_close(out, plain(*args), 0.01)
    assert_close(jax.jit(gradient(fused))(*args), gradient(plain)(*args), 0.05)


def test_double_precision():
    with enable_x64():
        args = arrays(6, 90, np.float64)
        fused, plain = both()
        assert_close(jax.jit(fused)(*args), plain(*args), 1e-13)
        assert_close(jax.jit(gradient(fused))(*args), gradient(plain)(*args), 1e-13)


@pytest.mark.parametrize("dtype", [jnp.int8, *map(slow, (jnp.uint8, jnp.int16, jnp.uint16))])
def test_short_integers(dtype):
    def fun(x, y, w):
        return jnp.maximum(x[0] * y[1] + w, -w) // jnp.maximum(y[0], 3) ^ w

    args = [(70 * x).astype(jnp.int32).astype(dtype) for x in ARGS]
    fused, plain = both(fun, reduce="max")
    assert_close(jax.jit(fused)(*args), plain(*args))


@pytest.mark.parametrize("reduce", ["sum", "max", "argmin", "prod"])
def test_integers(reduce):
    def fun(x, y, w):
        whole = (x[0] * y[1] - w) // 3 % 5 + jnp.abs(w) ^ 3
        return jnp.where((w & 1 == 0) | (y[0] > 4), whole, -w) + w // y[2] + w % y[2]

    args = [(10 * x).astype(jnp.int32) for x in ARGS]
    fused, plain = both(fun, reduce=reduce)
    assert_close(jax.jit(fused)(*args), plain(*args))


def test_numbers_without_an_end():
    args = X, Y.at[3].set(jnp.nan), W.at[5].set(jnp.inf).at[6].set(-jnp.inf)
    for reduce in ("sum", "max", "argmin", "logsumexp"):
        fused, plain = both(reduce=reduce)
        np.testing.assert_array_equal(jnp.isnan(jax.jit(fused)(*args)), jnp.isnan(plain(*args)))


def chosen(x, y, w):
    return jnp.select([w > 1, y[0] > 0, w < -1], [x[0], 2 * y[1], w], -1.0) * x[jnp.argmin(y)]


def looked_up(x, y, w):
    shell = jnp.minimum(jnp.abs(2 * w).astype(int), 3)
    return x * jnp.array([1.0, 2.0, 4.0, 8.0])[shell] * y[jnp.array([2, 0, 0])[jnp.argmax(x * y)]]


@pytest.mark.parametrize("fun", [chosen, looked_up])
def test_computed_indices(fun):
    fused, plain = both(fun)
    assert_close(jax.jit(fused)(*ARGS), plain(*ARGS))
    assert_close(jax.jit(gradient(fused))(*ARGS), gradient(plain)(*ARGS))


def test_floats_become_the_nearest_integers():
    fun = lambda x, y, w: (w * 1e9).astype(jnp.int32) // 7  # noqa: E731
    fused, plain = both(fun, reduce="max")
    assert_close(jax.jit(fused)(X, Y, W.at[0].set(jnp.nan)), plain(X, Y, W.at[0].set(jnp.nan)))


# Transformations.


def mapped(fun):
    return lambda x, y, w: jax.vmap(fun, (None, 1, 0))(
        x, jnp.stack([y, 2 * y], 1), jnp.stack([w, -w])
    )


def pushed(fun):
    return lambda *args: jax.jvp(fun, args, tuple(jnp.cos(x) for x in args))


TRANSFORMED = {
    "eager": lambda fun: fun,
    "eager gradient": gradient,
    "vmap": lambda fun: jax.jit(mapped(fun)),
    "vmap of grad": lambda fun: jax.jit(mapped(gradient(fun))),
    "grad of vmap": lambda fun: jax.jit(gradient(mapped(fun))),
    "jvp": lambda fun: jax.jit(pushed(fun)),
    "jvp of grad": lambda fun: jax.jit(pushed(gradient(fun))),
    "jacfwd": lambda fun: jax.jit(jax.jacfwd(fun, 2)),
    "jacrev": lambda fun: jax.jit(jax.jacrev(fun, 2)),
    "hessian": lambda fun: jax.jit(jax.hessian(loss(fun), 2)),
    "checkpoint": lambda fun: jax.jit(gradient(jax.checkpoint(fun))),
    "linearize": lambda fun: lambda *args: jax.linearize(fun, *args)[1](*args),
    "in a scan": lambda fun: jax.jit(
        lambda x, y, w: jax.lax.scan(
            lambda s, _: (s + 0.1 * fun(x, y, w).sum(), None), 0.0, None, 3
        )
    ),
    "jit=True": lambda fun: fun.with_options(jit=True),
    "a memory limit": lambda fun: fun.with_options(memory_limit="1 MB"),
    "chunks": lambda fun: fun.with_options(chunk_size=7),
    "progress": lambda fun: fun.with_options(progress=lambda done, total: None),
}


@pytest.mark.parametrize(
    "transformed", at_each_run(("eager gradient", "vmap of grad", "jacfwd"), TRANSFORMED)
)
def test_a_transformation_equals_that_of_loops(transformed):
    fused, plain = both()
    assert_close(transformed(fused)(*ARGS), transformed(plain)(*ARGS))


@pytest.mark.parametrize("check_vma", [True, slow(False)])
def test_in_a_shard_map(check_vma):
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))

    def shared(fun):
        specs = P("i"), P(), P()
        settings = {"mesh": mesh, "in_specs": specs, "out_specs": P("i"), "check_vma": check_vma}
        return jax.jit(jax.shard_map(fun, **settings))

    fused, plain = both()
    got, want = gradient(shared(fused))(*ARGS), gradient(plain)(*ARGS)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(jax.device_count() == 1, reason="needs several devices: tox -e fused")
@pytest.mark.parametrize("reduce", ["sum", slow("argmin")])
def test_on_chosen_devices(reduce):
    fused, plain = both(reduce=reduce)
    assert_same(fused.with_options(devices="all")(*ARGS), plain(*ARGS), rtol=1e-4)


def test_several_kernels_in_one_program():
    first, plain = both()
    second, other = both(near_one, reduce="mean")
    out = jax.jit(lambda *args: first(*args) * second(*args))(*ARGS)
    assert_close(out, plain(*ARGS) * other(*ARGS))


@pytest.mark.usefixtures("kernels_of_three_inputs")
def test_a_derivative_without_a_kernel_is_a_sum_by_rows():
    fused, plain = both()
    assert_close(jax.jit(gradient(fused))(*ARGS), gradient(plain)(*ARGS))
    fused, plain = (kernel.with_options(reduce_axis=0) for kernel in (fused, plain))
    assert_close(jax.jit(gradient(fused))(*ARGS), gradient(plain)(*ARGS))


def test_work_of_one_side_stays_outside():
    weights = [jnp.asarray(DRAW(size=shape), "float32") for shape in ((3, 40), (40, 40), (40, 2))]

    def net(v):
        for matrix in weights:
            v = jnp.tanh(v @ matrix)
        return v

    fun = lambda x, y, w: w * jnp.exp(-jnp.sum((net(x) - net(y)) ** 2))  # noqa: E731
    fused, plain = both(fun)
    assert_close(fused(*ARGS), plain(*ARGS))
    assert_close(jax.jit(gradient(fused))(*ARGS), jax.jit(gradient(plain))(*ARGS))
    assert "fused: one kernel" in str(fused.plan(*ARGS))


def test_a_small_array_that_all_items_share():
    matrix = jnp.asarray(DRAW(size=(3, 3)), "float32")

    def total(matrix, x, y, w, **options):
        kernel = auto_vmap(1, 1, 0, reduce="sum", **options)
        return kernel(lambda x, y, w: w * jnp.sin(x @ matrix @ y))(x, y, w)

    fused, plain = functools.partial(total, fused=True), total
    args = matrix, *ARGS
    assert_close(jax.jit(fused)(*args), plain(*args))
    got, want = (jax.jit(jax.grad(fun))(*args) for fun in (fused, plain))
    assert_close(got, want)
