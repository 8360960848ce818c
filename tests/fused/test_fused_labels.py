# SPDX-License-Identifier: MIT
"""Sums by label in one kernel, against the walk by loops, and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import at_each_run, enable_x64, equations, name_of, slow
from rankax import auto_vmap
from rankax.ext.fused import kernel
from rankax.reductions import ByLabel, Histogram, Moments

pytest.importorskip("warp", reason="needs NVIDIA Warp: pip install 'rankax[warp]'")

DRAW = np.random.default_rng(8).normal
ARGS = tuple(jnp.asarray(DRAW(size=shape), "float32") for shape in ((6, 1, 3), (90, 3), (90,)))


def shells(x, y, w):
    """Return a shell of a pair, of which some are too large, and values of two ranks."""
    offset = x - y
    r = jnp.sqrt(offset @ offset + 0.01)
    return {"shell": jnp.floor(2 * r).astype(int) - 1, "v": w * jnp.exp(-r), "u": offset}


def far(x, y, w):
    return {**shells(x, y, w), "ok": w > -0.4}


def distances(x, y, w):
    return {**shells(x, y, w), "shell": jnp.linalg.norm(x - y)}


def many(x, y, w):
    """Return a label for each entry of a value."""
    labels = jnp.floor(2 * jnp.abs(x - y)).astype(int)
    return {"shell": labels, "v": w * (x - y), "u": jnp.outer(x, jnp.sin(y))}


def both(fun=shells, of="sum", reduce=None, **options):
    """Return a kernel that is fused, and one that is not."""
    reduce = reduce or ByLabel("shell", 5, of)
    plain = auto_vmap(x=1, y=1, w=0, **{"reduce": reduce, "reduce_axis": 1, **options})(fun)
    return plain.with_options(fused=True), plain


def loss(kernel):
    def fun(*args):
        outs = [x for x in jax.tree.leaves(kernel(*args)) if jnp.issubdtype(x.dtype, jnp.floating)]
        # A bin without items has an infinite maximum and a mean of NaN.
        finite = [jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32) for x in outs]
        return sum(jnp.sum(jnp.sin(0.1 * x)) for x in finite)

    return fun


def gradient(kernel):
    return jax.grad(loss(kernel), (0, 1, 2))


def assert_close(got, want, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        largest = np.abs(b[np.isfinite(b)]).max(initial=1e-3)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * largest)


def kernels_of(fun, *args):
    names = [name_of(eqn) for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr)]
    return names.count("rankax_fused")


KINDS = {of: of for of in ("sum", "mean", "count", "max", "min", "logsumexp")}
KINDS |= {"moments": Moments()}
FUNS = {"one": shells, "where": far, "an array": many}
CASES = {f"{of}, {fun}": (KINDS[of], FUNS[fun]) for of in KINDS for fun in FUNS}


@pytest.mark.parametrize("case", at_each_run(("sum, an array", "logsumexp, where"), CASES))
@pytest.mark.parametrize("axis", [1, slow(0), slow(None)])
def test_labels_equal_those_of_loops(case, axis):
    of, fun = case
    fused, plain = both(fun, of, reduce_axis=axis, **({"where": "ok"} if fun is far else {}))
    assert_close(jax.jit(fused)(*ARGS), jax.jit(plain)(*ARGS))
    assert kernels_of(fused, *ARGS) == 1
    if of != "count":
        assert_close(jax.jit(gradient(fused))(*ARGS), jax.jit(gradient(plain))(*ARGS))
        assert kernels_of(gradient(fused), *ARGS) >= 1


BINS = {
    "equal": Histogram(7, range=(0, 3), of="sum", by="shell"),
    "edges": Histogram([0, 0.5, 1, 2.5], "mean", by="shell"),
    "one": Histogram([0, 2], "sum", by="shell"),
    "a hundred": Histogram(100, range=(0, 4), of="max", by="shell"),
    "two hundred": Histogram(200, range=(0, 4), of="logsumexp", by="shell"),
    "densities": Histogram(9, range=(0, 4), by="shell", density=True),
}


@pytest.mark.parametrize("reduce", at_each_run(("equal", "edges"), BINS))
def test_histograms_equal_those_of_loops(reduce):
    fused, plain = both(distances, reduce=reduce)
    assert_close(jax.jit(fused)(*ARGS), jax.jit(plain)(*ARGS))
    assert kernels_of(fused, *ARGS) == 1
    assert_close(jax.jit(gradient(fused))(*ARGS), jax.jit(gradient(plain))(*ARGS))


def test_pairs_are_counted_as_numpy_does():
    x = np.asarray(DRAW(size=(40, 3)), np.float32)
    distance = lambda x, y: jnp.sqrt(jnp.sum((x - y) ** 2))  # noqa: E731
    kernel = auto_vmap(1, 1, reduce=Histogram([0, 0.3, 1, 1.7, 4]), fused=True)(distance)
    found = kernel(x[:, None], x)
    want, _ = np.histogram(
        jax.vmap(jax.vmap(distance, (None, 0)), (0, None))(x, x), [0, 0.3, 1, 1.7, 4]
    )
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    "dtype", [jnp.int8, *map(slow, (jnp.uint8, jnp.int16, jnp.uint16, jnp.uint32, jnp.bool_))]
)
def test_labels_of_any_dtype(dtype):
    def fun(x, y, w):
        label = jnp.round(3 * w).astype(jnp.int32)
        return {"shell": (label > 0) if dtype == jnp.bool_ else label.astype(dtype), "v": w * x[0]}

    fused, plain = both(fun)
    assert_close(jax.jit(fused)(*ARGS), jax.jit(plain)(*ARGS))


def test_labels_that_are_an_argument():
    kernel = auto_vmap(x=0, y=0, cell=0, reduce=ByLabel("cell", 4), reduce_axis=1)
    plain = kernel(lambda x, y, cell: jnp.sin(x * y))
    fused, cells = plain.with_options(fused=True), jnp.arange(90) % 6 - 1
    args = ARGS[0][..., 0], ARGS[2], cells
    assert_close(jax.jit(fused)(*args), jax.jit(plain)(*args))
    assert kernels_of(fused, *args) == 1
    got, want = (jax.jit(jax.grad(loss(each), (0, 1)))(*args) for each in (fused, plain))
    assert_close(got, want)


def mapped(fun):
    return lambda x, y, w: jax.vmap(fun, (None, 1, 0))(
        x, jnp.stack([y, 2 * y], 1), jnp.stack([w, -w])
    )


def pushed(fun):
    return lambda *args: jax.jvp(fun, args, tuple(map(jnp.cos, args)))


def curvature(kernel):
    """Return the gradient of a gradient."""
    return jax.grad(lambda *args: sum(jnp.sum(x**2) for x in gradient(kernel)(*args)), (0, 1, 2))


TRANSFORMED = {
    "eager": lambda fun: fun,
    "eager gradient": gradient,
    "vmap": lambda fun: jax.jit(mapped(fun)),
    "vmap of grad": lambda fun: jax.jit(mapped(gradient(fun))),
    "jvp": lambda fun: jax.jit(pushed(fun)),
    "jvp of grad": lambda fun: jax.jit(pushed(gradient(fun))),
    "jacrev": lambda fun: jax.jit(jax.jacrev(fun, 2)),
    "grad of grad": lambda fun: jax.jit(curvature(fun)),
    "checkpoint": lambda fun: jax.jit(gradient(jax.checkpoint(fun))),
}


@pytest.mark.parametrize("transformed", at_each_run(("eager gradient", "jvp of grad"), TRANSFORMED))
def test_a_transformation_equals_that_of_loops(transformed):
    fused, plain = both()
    assert_close(transformed(fused)(*ARGS), transformed(plain)(*ARGS))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
def test_half_precision_is_added_in_float32(dtype):
    args = [x.astype(dtype) for x in ARGS]
    # A label that is computed could be another one, because a kernel does not round on the way.
    fused, plain = both(lambda x, y, w: {"shell": (w > 0).astype(int), "v": w * (x - y)})
    assert_close(jax.jit(fused)(*args), plain(*args), 0.02)
    assert_close(jax.jit(gradient(fused))(*args), gradient(plain)(*args), 0.05)


@pytest.mark.slow
def test_double_precision():
    with enable_x64():
        args = [x.astype(jnp.float64) for x in ARGS]
        fused, plain = both()
        assert_close(jax.jit(fused)(*args), plain(*args), 1e-13)
        assert_close(jax.jit(gradient(fused))(*args), gradient(plain)(*args), 1e-6)


@pytest.mark.parametrize("shapes", [((6, 1), 0), ((0, 1), 6), ((0, 1), 0), ((1, 1), 1)])
def test_no_items_and_one(shapes):
    rows, columns = shapes
    args = [jnp.asarray(DRAW(size=s), "float32") for s in ((*rows, 3), (columns, 3), (columns,))]
    fused, plain = both(of="max")
    assert_close(jax.jit(fused)(*args), plain(*args))
    assert_close(jax.jit(gradient(fused))(*args), gradient(plain)(*args))


def test_parts_of_a_row_are_merged():
    args = [jnp.asarray(DRAW(size=s), "float32") for s in ((1, 1, 3), (30_000, 3), (30_000,))]
    fused, plain = both(of=Moments())
    assert_close(jax.jit(fused)(*args), plain(*args), 1e-4)


def test_a_long_sum_does_not_drift(monkeypatch):
    monkeypatch.setattr(kernel, "_THREADS", 1)  # or parts of the row would be short
    args = jnp.zeros((1, 1, 3)), jnp.zeros((10**6, 3)), jnp.full(10**6, 0.1)
    fused, _ = both(lambda x, y, w: {"shell": (w > 0).astype(int), "v": w})
    np.testing.assert_allclose(jax.jit(fused)(*args)["v"][0, 1], 1e5, rtol=1e-6)


def test_no_kernel_has_more_bins_than_it_holds():
    fused, _ = both(reduce=ByLabel("shell", 3000))
    assert "not fused, because of a reduction whose state" in str(fused.plan(*ARGS))


def test_its_derivative_reads_at_most_so_many_bins():
    fused, plain = both(reduce=ByLabel("shell", 300))
    assert "its derivative goes by loops, because of the states that it needs" in str(
        fused.plan(*ARGS)
    )
    assert_close(jax.jit(gradient(fused))(*ARGS), gradient(plain)(*ARGS))


@pytest.mark.usefixtures("kernels_of_three_inputs")
def test_a_derivative_without_a_kernel_is_a_sum_by_rows():
    fused, plain = both()
    push = functools.partial(pushed, gradient(fused))()
    assert_close(jax.jit(push)(*ARGS), pushed(gradient(plain))(*ARGS))
