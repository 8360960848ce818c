# SPDX-License-Identifier: MIT
"""What a kernel does that a chunk may not see: its outputs, its axis, its branches, its effects."""

import functools

import jax
import jax.experimental
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad, batching, mlir

import rankax
from helpers import assert_same, primitives, slow
from rankax import Static, auto_vmap, chunked_reduce, chunked_vmap
from scan_cases import here

X = jnp.asarray(np.linspace(-1.0, 1.0, 5))
ROWS = jnp.asarray(np.arange(15.0).reshape(5, 3))
CHUNKS = pytest.mark.parametrize("chunk_size", [None, 1, 2, 5, 9])


def counted(fun):
    """Return ``fun`` and a list that grows with each trace of it."""
    traces = []

    @functools.wraps(fun)
    def kernel(*args):
        traces.append(args)
        return fun(*args)

    return kernel, traces


# Outputs that do not fit.


def parts(row):
    return {"sum": jnp.sum(row), "row": (row, 2.0), "none": None}


@CHUNKS
@pytest.mark.parametrize(
    ("out_axes", "text"),
    [
        (
            (0, 0),
            "the out_axes of output is a tuple of 2 entries, but output is dict",
        ),
        (
            {"sum": 0, "row": 0},
            "the out_axes of output has no entry for output['none'] (None would leave it as it is)",
        ),
        (
            {"sum": 0, "row": {"a": 0}, "none": None},
            "the out_axes of output['row'] is a dict of 1 entry, but output['row'] is tuple",
        ),
        (
            1,
            "output['row'][1] and output['sum'] cannot have the mapped axis where out_axes says\n\n"
            "    leaf              shape of one item  out_axes  possible\n"
            "    output['row'][0]  (3,)               1         -2 to 1\n"
            "  > output['row'][1]  ()                 1         -1 to 0\n"
            "  > output['sum']     ()                 1         -1 to 0",
        ),
        (
            {"sum": -1, "row": (-3, 0), "none": None},
            "output['row'][0] cannot have the mapped axis where out_axes says\n\n"
            "    leaf              shape of one item  out_axes  possible\n"
            "  > output['row'][0]  (3,)               -3        -2 to 1\n"
            "    output['row'][1]  ()                 0         -1 to 0\n"
            "    output['sum']     ()                 -1        -1 to 0",
        ),
    ],
    ids=["container", "keys", "inner", "too-large", "too-small"],
)
def test_out_axes_that_do_not_fit(chunk_size, out_axes, text):
    kernel, traces = counted(parts)
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the whole text is compared
        chunked_vmap(kernel, chunk_size, out_axes=out_axes)(ROWS)
    assert str(caught.value) == f"{here(parts)}: {text}"
    assert len(traces) == 1


@CHUNKS
def test_outputs_that_depend_on_the_item_need_an_axis(chunk_size):
    def kernel(x):
        return {"a": jnp.sin(x), "b": jnp.ones(2), "c": (x, jnp.int32(3))}

    ones = "it is the same for all items, but it depends on the item; give an axis"
    many = "they are the same for all items, but they depend on the item; give an axis"
    for out_axes, text in (
        ({"a": None, "b": None, "c": (0, 0)}, f"output['a'], which says that {ones}"),
        (None, f"output['a'] and output['c'][0], which says that {many}"),
    ):
        for x in (X, X[None]):
            mapped = chunked_vmap(kernel, chunk_size, out_axes=out_axes)
            with pytest.raises(ValueError) as caught:  # noqa: PT011, the whole text is compared
                (mapped if x is X else jax.vmap(mapped))(x)
            assert str(caught.value) == f"{here(kernel)}: out_axes is None for {text}"
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

    def thing(x):
        return object()

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    end = "but outputs must be arrays or numbers; leave it out, or wrap it in rankax.Static"
    for fun, came in (
        (kernel, "a str at output[1]['a']['type']"),
        (thing, "an object at output"),
        (shape, "a ShapeDtypeStruct at output"),
    ):
        for mapped in (chunked_vmap(fun, chunk_size), auto_vmap(0, chunk_size=chunk_size)(fun)):
            with pytest.raises(TypeError) as caught:
                mapped(X)
            assert str(caught.value) == f"{here(fun)} returned {came}, {end}"
    # What it advises.
    got = chunked_vmap(lambda x: (x, Static("wave")), chunk_size)(X)
    assert_same(got, (X, Static("wave")))


# The name of the axis.


@CHUNKS
def test_a_name_for_the_axis_is_taken(chunk_size):
    got = chunked_vmap(jnp.sin, chunk_size, axis_name="items")(X)
    assert_same(got, jnp.sin(X))


def centred(x):
    return x - lax.pmean(x, "items")


COLLECTIVES = {
    "psum": lambda x: x / lax.psum(x, "items"),
    "axis_index": lambda x: x + lax.axis_index("items").astype(x.dtype),
    "pmean": centred,
}


@pytest.mark.parametrize("fun", COLLECTIVES.values(), ids=COLLECTIVES)
@pytest.mark.parametrize("outer", ["items", slow(None), slow("other")])
def test_a_collective_works_in_one_chunk_only(fun, outer):

    def call(chunk_size):
        mapped = chunked_vmap(fun, chunk_size, axis_name="items")
        return mapped(X) if outer is None else jax.vmap(mapped, axis_name=outer)(X[None])[0]

    want = jax.vmap(fun, axis_name="items")(X)
    for chunk_size in (None, 5):
        assert_same(call(chunk_size), want)
    for chunk_size in (1, 2):
        with pytest.raises(ValueError) as caught:  # noqa: PT011, the whole text is compared
            call(chunk_size)
        assert str(caught.value) == (
            f"{here(fun)}: it uses a collective over axis_name='items', which would see the items "
            "of one chunk only; use jax.vmap, or take the collective out of the kernel"
        )


def test_collectives_over_other_axes_pass():
    def fun(x):
        return x * lax.psum(x, "outer")

    def both(inner):
        return jax.vmap(inner, axis_name="outer")(ROWS.T)

    want = both(jax.vmap(fun))
    assert_same(both(chunked_vmap(fun, 2, axis_name="items")), want)
    with pytest.raises(NameError, match="outer"):
        chunked_vmap(fun, 2, axis_name="items")(X)


def test_a_name_that_the_kernel_lacks_is_no_axis():
    def fun(x):
        raise NameError("a wrong axis name: items")

    with pytest.raises(NameError, match="a wrong axis name: items"):
        chunked_vmap(fun, 2, axis_name="items")(X)


# Chunks of one item.


def branching(x):
    return lax.cond(x > 0, lambda x: jnp.sqrt(x), lambda x: x**2 - 1, x)


@pytest.mark.parametrize(("axis", "length"), [(1, 5), (0, 1)])
def test_a_branch_stays_a_branch_in_chunks_of_one_item(axis, length):
    def rows(row):
        return branching(row[0]) * row

    x = ROWS[:length] - 5.0
    x = x if axis == 0 else x.T
    f = chunked_vmap(rows, 1, axis, axis)
    want = jax.vmap(rows, axis, axis)

    def loss(f):
        return lambda x: jnp.sum(jnp.sin(f(x)))

    for program in (f, jax.grad(loss(f))):
        names = primitives(program, x)
        assert names["cond"] > 0
        assert names["select_n"] == 0

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(f, x):
        return jax.grad(loss(f))(x), jax.hessian(loss(f))(x), jax.jvp(f, (x,), (x,))

    assert_same(f(x), jax.jit(want)(x))
    assert_same(derivatives(f, x), derivatives(want, x), rtol=1e-4)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (5,), (5, 1), (1, 5)])
def test_a_branch_stays_a_branch_at_every_level(shape):
    kernel = auto_vmap(0, 0, chunk_size=1)(lambda a, b: branching(a * b))
    a, b = X[: shape[0]].reshape(shape[0], *[1] * (len(shape) - 1)), jnp.ones((1,) * len(shape))
    b = jnp.broadcast_to(b, (*b.shape[:-1], shape[-1]))
    names = primitives(kernel, a, b)
    assert names["cond"] == 1
    assert names["select_n"] == 0
    assert_same(kernel(a, b), jnp.vectorize(branching)(a * b), rtol=1e-5)


def test_keys_and_integers_in_chunks_of_one_item():
    def kernel(key, i):
        use, keep = jax.random.split(key)
        return jax.random.normal(use, (2,)) * i, keep, i, i > 2

    keys, i = jax.random.split(jax.random.key(0), 5), jnp.arange(5.0)
    assert_same(chunked_vmap(kernel, 1)(keys, i), jax.jit(jax.vmap(kernel))(keys, i))


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


@pytest.mark.parametrize("chunk_size", [2, 3])
def test_ordered_callbacks_in_larger_chunks_are_refused(chunk_size):
    kernel = recording(True, [])
    text = (
        f"{here(kernel)}: it has an ordered effect, such as a callback with ordered=True, which "
        "JAX cannot map; with chunk_size=1 the items run one after another in order, and with "
        "ordered=False the order is left open"
    )
    for mapped in (
        chunked_vmap(kernel, chunk_size),
        auto_vmap(0, chunk_size=chunk_size)(kernel),
        jax.jit(chunked_vmap(kernel, chunk_size)),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011, the whole text is compared
            mapped(X)
        assert str(caught.value) == text
    seen = []
    chunked_vmap(recording(False, seen), chunk_size)(X).block_until_ready()
    jax.effects_barrier()
    assert set(seen) == {float(x) for x in X}


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_the_check_for_reuse_names_a_key_that_every_chunk_uses(chunk_size):
    def kernel(key, x):
        return jax.random.normal(key) * x

    def cloned(key, x):
        return kernel(jax.random.clone(key), x)

    six = jnp.arange(6.0)
    with jax.debug_key_reuse(True):
        for mapped in (
            chunked_vmap(kernel, chunk_size, (None, 0)),
            auto_vmap(0, 0, chunk_size=chunk_size)(kernel),
        ):
            with pytest.raises(jax.errors.KeyReuseError) as caught:
                mapped(jax.random.key(0), six)
            # JAX adds where it explains the error.
            assert str(caught.value).split("\n")[0] == (
                f"{here(kernel)}: it uses one PRNG key in every chunk, either an argument that is "
                "not mapped or a key from outside, or two chunks overlap; map over "
                "jax.random.split(key, n) with a chunk_size that divides n, or use "
                "jax.random.clone(key) in the kernel where all items are meant to draw the same"
            )
        # What it advises.
        keys = jax.random.split(jax.random.key(0), 6)
        chunked_vmap(kernel, chunk_size)(keys, six)
        chunked_vmap(cloned, chunk_size, (None, 0))(jax.random.key(0), six)


# Primitives, constants.


def tripled_sine():
    """Return a primitive that takes any parameters, as Equinox makes them."""

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
    return primitive


@pytest.mark.parametrize("names", [["prim"], ["prim", "policy", "names", "params"]])
def test_a_primitive_may_have_parameters_of_any_name(names):
    primitive = tripled_sine()

    def kernel(row):
        return jnp.sum(primitive.bind(row, **dict.fromkeys(names, 1)) ** 2)

    rows = np.asarray(ROWS)[:4]  # two chunks of two: what is left over is many programs
    want = jax.jit(jax.grad(lambda rows: jnp.sum(jax.vmap(kernel)(rows))))(rows)
    for call in (chunked_reduce(kernel, "logsumexp", 2), chunked_vmap(kernel, 2)):
        got = jax.grad(lambda rows, call=call: jnp.sum(call(rows)))(rows)
        assert got.shape == want.shape
    assert_same(got, want, rtol=1e-4)


CONSTANTS = {"weak": lambda: jnp.asarray(2.0), "typed": lambda: jnp.float32(2), "int": lambda: 3}


@pytest.mark.parametrize(("name", "jit"), [("weak", False), ("int", True), slow("typed", True)])
def test_a_constant_output_is_an_array(name, jit):
    def kernel(x):
        return {"x": jnp.sin(x), "c": CONSTANTS[name]()}

    @jax.jit
    def by_hand(x):
        items = jax.vmap(kernel)(x)
        reduced = [jax.tree.map(f, items) for f in (jnp.max, jnp.sum, jnp.argmax)]
        return items, reduced, [jax.grad(lambda x: f(jnp.sin(x)))(x) for f in (jnp.max, jnp.sum)]  # noqa: B023

    # In eager calls, what is left over by two chunks of two is many programs.
    wrap, x = (jax.jit, X) if jit else (lambda fun: fun, np.asarray(X)[:4])
    items, reduced, gradients = by_hand(x)
    assert_same(wrap(chunked_vmap(kernel, 2))(x), items)
    fold = rankax.reductions.Fold(jnp.asarray([0.0]), lambda x: x["x"][None], jnp.maximum)
    for i, reduce in enumerate(("max", "sum", "argmax")):
        call = auto_vmap(0, reduce=reduce, chunk_size=2)(kernel)
        assert_same(wrap(call)(x), reduced[i])
        if reduce != "argmax":
            assert_same(wrap(jax.grad(lambda x, call=call: call(x)["x"]))(x), gradients[i])
    assert_same(wrap(chunked_reduce(kernel, fold, 2))(x), reduced[0]["x"][None])
