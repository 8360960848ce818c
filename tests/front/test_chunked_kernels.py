# SPDX-License-Identifier: MIT
"""What a kernel does that a chunk may not see: its outputs, its axis, its branches, its effects."""

import re

import jax
import jax.experimental
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad, batching, mlir

from helpers import assert_same, primitives, refusal
from rankax import Static, auto_vmap, chunked_reduce, chunked_vmap
from scan_cases import here

X = jnp.asarray(np.linspace(-1.0, 1.0, 5))
ROWS = jnp.asarray(np.arange(15.0).reshape(5, 3))
CHUNKS = pytest.mark.parametrize("chunk_size", [None, 1, 2])


# Outputs that do not fit.


@CHUNKS
@pytest.mark.parametrize(
    ("out_axes", "text"),
    [
        (
            {"sum": 0, "row": 0},
            "the out_axes of output has no entry for output['none'] (None would leave it as it is)",
        ),
        (
            {"sum": 0, "row": {"a": 0}, "none": None},
            "the out_axes of output['row'] is a dict of 1 entry, but output['row'] is tuple",
        ),
        (
            {"sum": 1, "row": (-3, 0), "none": None},
            "output['row'][0] and output['sum'] cannot have the mapped axis where out_axes says\n\n"
            "    leaf              shape of one item  out_axes  possible\n"
            "  > output['row'][0]  (3,)               -3        -2 to 1\n"
            "    output['row'][1]  ()                 0         -1 to 0\n"
            "  > output['sum']     ()                 1         -1 to 0",
        ),
    ],
    ids=["keys", "container", "axes"],
)
def test_out_axes_that_do_not_fit(chunk_size, out_axes, text):
    traces = []

    def kernel(row):
        traces.append(row)
        return {"sum": jnp.sum(row), "row": (row, 2.0), "none": None}

    mapped = chunked_vmap(kernel, chunk_size, out_axes=out_axes)
    assert refusal(ValueError, mapped, ROWS) == f"{here(kernel)}: {text}"
    assert len(traces) == 1


@CHUNKS
def test_outputs_that_depend_on_the_item_need_an_axis(chunk_size):
    key = jax.random.key(3)

    def kernel(x):
        return {"a": jnp.sin(x), "b": jnp.ones(2), "c": (x, key)}

    ones = "it is the same for all items, but it depends on the item; give an axis"
    many = "they are the same for all items, but they depend on the item; give an axis"
    for out_axes, text in (
        ({"a": None, "b": None, "c": (0, 0)}, f"output['a'], which says that {ones}"),
        (None, f"output['a'] and output['c'][0], which says that {many}"),
    ):
        for x in (X, X[None]):
            mapped = chunked_vmap(kernel, chunk_size, out_axes=out_axes)
            came = refusal(ValueError, mapped if x is X else jax.vmap(mapped), x)
            assert came == f"{here(kernel)}: out_axes is None for {text}"
    fits = {"a": 0, "b": None, "c": (-1, None)}
    want = jax.jit(jax.vmap(kernel, out_axes=fits))(X)
    assert_same(chunked_vmap(kernel, chunk_size, out_axes=fits)(X), want)


@CHUNKS
def test_an_error_of_the_kernel_is_not_taken_for_one_of_out_axes(chunk_size):
    def kernel(x):
        return jax.vmap(jnp.sin, out_axes=None)(x[None])

    with pytest.raises(ValueError, match="output was batched") as caught:
        chunked_vmap(kernel, chunk_size, out_axes=None)(X)
    assert here(kernel) not in str(caught.value)


@CHUNKS
def test_an_error_of_a_rule_for_vmap_passes_through(chunk_size):
    @jax.custom_batching.custom_vmap
    def kernel(x):
        return x

    @kernel.def_vmap
    def _(axis_size, in_batched, x):
        raise ZeroDivisionError("by the rule")

    if chunk_size == 1:  # the rule is not asked
        assert_same(chunked_vmap(kernel, 1)(X), X)
    else:
        with pytest.raises(ZeroDivisionError, match=r"^by the rule"):
            chunked_vmap(kernel, chunk_size)(X)


@CHUNKS
def test_an_output_that_is_no_array_is_named(chunk_size):
    def kernel(x):
        return x, {"a": {"value": x, "type": "wave"}}

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    end = "but outputs must be arrays or numbers; leave it out, or wrap it in rankax.Static"
    for fun, came in (
        (kernel, "a str at output[1]['a']['type']"),
        (shape, "a ShapeDtypeStruct at output"),
    ):
        for mapped in (chunked_vmap(fun, chunk_size), auto_vmap(0, chunk_size=chunk_size)(fun)):
            assert refusal(TypeError, mapped, X) == f"{here(fun)} returned {came}, {end}"
    # What it advises.
    got = chunked_vmap(lambda x: (x, Static("wave")), chunk_size)(X)
    assert_same(got, (X, Static("wave")))


# The name of the axis.


def test_a_name_for_the_axis_is_taken():
    assert_same(chunked_vmap(jnp.sin, 2, axis_name="items")(X), jnp.sin(X))

    def over_rows(inner):
        return jax.vmap(inner, axis_name="outer")(ROWS.T)

    def fun(x):
        return x * lax.psum(x, "outer")

    assert_same(over_rows(chunked_vmap(fun, 2, axis_name="items")), over_rows(jax.vmap(fun)))
    with pytest.raises(NameError, match="outer"):
        chunked_vmap(fun, 2, axis_name="items")(X)


@pytest.mark.parametrize(
    ("fun", "outer"),
    [
        (lambda x: x / lax.psum(x, "items"), None),
        (lambda x: x + lax.axis_index("items").astype(x.dtype), "other"),
        (lambda x: x - lax.pmean(x, "items"), "items"),
    ],
    ids=["psum", "axis_index", "pmean"],
)
def test_a_collective_works_in_one_chunk_only(fun, outer):
    def call(chunk_size):
        mapped = chunked_vmap(fun, chunk_size, axis_name="items")
        return mapped(X) if outer is None else jax.vmap(mapped, axis_name=outer)(X[None])[0]

    assert_same(call(5), jax.vmap(fun, axis_name="items")(X))
    text = (
        f"{here(fun)}: it uses a collective over axis_name='items', which would see the items "
        "of one chunk only; use jax.vmap, or take the collective out of the kernel"
    )
    assert refusal(ValueError, call, 1) == refusal(ValueError, call, 2) == text


@pytest.mark.parametrize(
    "options", [{"memory_limit": "1 MB"}, {"devices": 1}, {"checkpoint": False}], ids=str
)
@pytest.mark.parametrize("chunk_size", [None, 9])
def test_a_collective_works_with_options(options, chunk_size):
    def fun(x, w):
        return {"out": x * w - lax.pmean(x, "i")}

    def call(mapped):
        loss = lambda x, w: jnp.sum(mapped(x, w)["out"] ** 2)  # noqa: E731
        return mapped(X, 2.0), jax.grad(loss, (0, 1))(X, 2.0)

    mapped = chunked_vmap(fun, chunk_size, (0, None), axis_name="i", **options)
    want = call(jax.vmap(fun, (0, None), axis_name="i"))
    assert_same(call(mapped), want)
    assert_same(jax.jit(lambda: call(mapped))(), want)


def test_a_collective_that_needs_more_than_the_limit():
    mapped = chunked_vmap(
        lambda x: jnp.outer(x, x) @ (x - lax.pmean(x, "i")),
        None,
        axis_name="i",
        memory_limit="1 kB",
    )
    text = refusal(ValueError, mapped, jnp.ones((7, 30)))
    assert re.fullmatch(
        r"chunked_vmap\(<lambda>\): it needs [\d.]+ kB, and memory_limit is 1 kB, but a "
        r"collective over axis_name='i' allows no chunks; raise the limit to at least \d+ bytes",
        text,
    )


@pytest.mark.parametrize("chunk_size", [1, 2, None])
def test_the_length_of_the_axis_is_known_in_chunks(chunk_size):
    def fun(x):
        return x * lax.axis_size("i") + lax.psum(1, "i")

    assert_same(chunked_vmap(fun, chunk_size, axis_name="i")(X), jax.vmap(fun, axis_name="i")(X))


def test_a_name_that_the_kernel_lacks_is_no_axis():
    def fun(x):
        raise NameError("a wrong axis name: items")

    with pytest.raises(NameError, match="a wrong axis name: items"):
        chunked_vmap(fun, 2, axis_name="items")(X)


# Chunks of one item.


def branching(x):
    return lax.cond(x > 0, lambda x: jnp.sqrt(x), lambda x: x**2 - 1, x)


def test_a_branch_stays_a_branch_in_chunks_of_one_item():
    def rows(row):
        return branching(row[0]) * row

    x, f, want = ROWS.T - 5.0, chunked_vmap(rows, 1, 1, 1), jax.vmap(rows, 1, 1)

    def loss(f):
        return lambda x: jnp.sum(jnp.sin(f(x)))

    for program in (f, jax.grad(loss(f))):
        names = primitives(program, x)
        assert names["cond"] > 0
        assert names["select_n"] == 0

    derivatives = jax.jit(lambda f, x: (f(x), jax.hessian(loss(f))(x)), static_argnums=0)
    assert_same(derivatives(f, x), derivatives(want, x), rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 5)])
def test_a_branch_stays_a_branch_at_every_level(shape):
    kernel = auto_vmap(0, 0, chunk_size=1)(lambda a, b: branching(a * b))
    a, b = X[: shape[0], None], jnp.ones((1, shape[1]))
    names = primitives(kernel, a, b)
    assert (names["cond"], names["select_n"]) == (1, 0)
    assert_same(kernel(a, b), jnp.vectorize(branching)(a * b), rtol=1e-5)


# Effects.


def recording(ordered, seen):
    def record(x):
        seen.append(float(x))
        return np.float32(x)

    def kernel(x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.experimental.io_callback(record, shape, x, ordered=ordered) * 2

    return kernel


@pytest.mark.parametrize("options", [{}, {"jit": True}], ids=str)
def test_ordered_callbacks_run_in_order_in_chunks_of_one_item(options):
    seen = []
    kernel = auto_vmap(0, chunk_size=1, **options)(recording(True, seen))
    assert_same(kernel(X), X * 2)
    jax.effects_barrier()
    assert seen == [float(x) for x in X]


def test_ordered_callbacks_in_larger_chunks_are_refused():
    kernel = recording(True, [])
    text = (
        f"{here(kernel)}: it has an ordered effect, such as a callback with ordered=True, which "
        "JAX cannot map; with chunk_size=1 the items run one after another in order, and with "
        "ordered=False the order is left open"
    )
    assert refusal(ValueError, auto_vmap(0, chunk_size=3)(kernel), X) == text
    assert refusal(ValueError, jax.jit(chunked_vmap(kernel, 2)), X) == text
    seen = []
    chunked_vmap(recording(False, seen), 2)(X).block_until_ready()
    jax.effects_barrier()
    assert set(seen) == {float(x) for x in X}


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_the_check_for_reuse_names_a_key_that_every_chunk_uses(chunk_size):
    def kernel(key, x):
        return jax.random.normal(key) * x

    def cloned(key, x):
        return kernel(jax.random.clone(key), x)

    text = f"{here(kernel)}: it uses one PRNG key in every chunk, either an argument that is not "
    key, keys, six = jax.random.key(0), jax.random.split(jax.random.key(1), 6), jnp.arange(6.0)
    mapped = auto_vmap(0, 0, chunk_size=chunk_size)(kernel)
    with jax.debug_key_reuse(True):
        for call in (chunked_vmap(kernel, chunk_size, (None, 0)), mapped):
            assert refusal(jax.errors.KeyReuseError, call, key, six).startswith(text)
        # What it advises.
        mapped(keys, six)
        chunked_vmap(cloned, chunk_size, (None, 0))(jax.random.key(0), six)


# Primitives, constants.


def test_a_primitive_may_have_parameters_of_any_name():
    """As those of Equinox have."""

    def run(x, **_):
        return 3 * jnp.sin(x)

    primitive = jax.extend.core.Primitive("tripled_sine")
    primitive.def_impl(run)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(*args, **params),
        dims[0],
    )
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: (
        primitive.bind(*primals, **params),
        3 * jnp.cos(primals[0]) * tangents[0],
    )

    def kernel(row):
        params = dict.fromkeys(["prim", "policy", "names", "params"], 1)
        return jnp.sum(primitive.bind(row, **params) ** 2)

    rows = np.asarray(ROWS)[:4]  # two chunks of two: what is left over is many programs
    want = jax.jit(jax.grad(lambda rows: jnp.sum(jax.vmap(kernel)(rows))))(rows)
    got = jax.grad(lambda rows: jnp.sum(chunked_vmap(kernel, 2)(rows)))(rows)
    assert_same(got, want, rtol=1e-4)
    reduced = jax.grad(chunked_reduce(kernel, "logsumexp", 2))(rows)
    assert reduced.shape == want.shape


@pytest.mark.parametrize(("make", "jit"), [(lambda: jnp.asarray(2.0), False), (lambda: 3, True)])
def test_a_constant_output_is_an_array(make, jit):
    def kernel(x):
        return {"x": jnp.sin(x), "c": make()}

    wrap, x = (jax.jit, X) if jit else (lambda fun: fun, np.asarray(X)[:4])
    items = jax.jit(jax.vmap(kernel))(x)
    assert_same(wrap(chunked_vmap(kernel, 2))(x), items)
    for name, reduce in {"max": jnp.max, "sum": jnp.sum, "argmax": jnp.argmax}.items():
        reduced = auto_vmap(0, reduce=name, chunk_size=2)(kernel)
        assert_same(wrap(reduced)(x), jax.tree.map(reduce, items))
    summed = auto_vmap(0, reduce="sum", chunk_size=2)(kernel)
    assert_same(wrap(jax.grad(lambda x: summed(x)["x"]))(x), jnp.cos(x))
