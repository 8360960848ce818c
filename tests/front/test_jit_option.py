# SPDX-License-Identifier: MIT
"""``jit=True``: one compiled program per set of shapes, dtypes and static values."""

import dataclasses
import enum
import functools
import math
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, primitives
from rankax import BatchShapeError, CoreDimensionError, RankError, Static, auto_vmap


class Counted:
    """A kernel that counts its traces, and its decorated form."""

    def __init__(self, fun, *ranks, **named):
        @functools.wraps(fun)
        def counting(*args, **kwargs):
            self.traces += 1
            return fun(*args, **kwargs)

        self.traces = 0
        self.mapped = auto_vmap(*ranks, jit=True, **named)(counting)

    def __call__(self, *args, **kwargs):
        return self.mapped(*args, **kwargs)


def power(x, n):
    return x**n


X = jnp.asarray(np.arange(1.0, 4.0))


def test_a_kernel_is_traced_once_per_static_value():
    f = Counted(power, 0)
    for n in (2, 2, 3):
        assert_same(f(X, n), X**n)
    assert f.traces == 2


def test_one_trace_per_set_of_shapes_and_dtypes():
    f = Counted(lambda s, v: jnp.sum(v) * s, 0, 1)
    v = jnp.ones((5, 3))
    for _ in range(2):
        f(X[:, None], v)
    assert f.traces == 1
    f(X[:, None] * 2, v + 1)  # other values
    assert f.traces == 1
    f(np.ones((3, 1), np.float32), v)  # NumPy's array of the same shape and dtype
    assert f.traces == 1
    f(X[:2, None], v)  # another batch
    assert f.traces == 2
    f(jnp.ones((3, 1), jnp.float16), v.astype(jnp.float16))  # another dtype
    assert f.traces == 3
    f(2.0, v)
    assert f.traces == 4
    f(3.0, v)  # a scalar with a rank is traced, whatever its value
    assert f.traces == 4


def test_arguments_by_name_or_position_share_a_program():
    f = Counted(lambda x, y=1.0, z=2.0: x + y * z, 0, 0, 0)
    assert_same(f(X), X + 2)
    assert_same(f(X, z=3.0), X + 3)
    assert_same(f(X, z=3.0, y=2.0), X + 6)
    assert_same(f(x=X, y=2.0), X + 4)
    assert f.traces == 1


def describe(x, value):
    """Return numbers that tell apart what compares equal."""
    kind = [bool, int, float, complex].index(type(value))
    sign = math.copysign(1.0, value.real), math.copysign(1.0, value.imag)
    return x * 0 + kind * 100 + 10 * sign[0] + sign[1]


def test_equal_values_of_other_kinds_have_programs_of_their_own():
    f = Counted(describe, x=0)
    values = [True, 1, 1.0, 1 + 0j, 0.0, -0.0, 0, False, complex(0.0, -0.0)]
    for value in values * 2:
        assert_same(f(X, value), describe(X, value))
    assert f.traces == len(values)


class Mode(enum.Enum):
    UP = 1
    DOWN = -1


def test_strings_callables_none_and_unranked_scalars_are_static():
    received = []

    def kernel(x, name, fun, flag, nothing, options, mode):
        received.append((name, fun, flag, nothing, options, mode))
        return fun(x) * options["n"] * mode.value if flag else x

    f = Counted(kernel, x=0)
    args = ("a", jnp.sin, True, None, {"n": 2, "deep": ("s", 1.5)}, Mode.UP)
    for _ in range(2):
        assert_same(f(X, *args), jnp.sin(X) * 2)
    assert received == [args]
    assert received[0][1] is jnp.sin
    assert_same(f(X, "b", jnp.cos, *args[2:5], Mode.DOWN), -jnp.cos(X) * 2)
    assert f.traces == 2


def test_unranked_arrays_are_traced():
    f = Counted(lambda x, table, weights: x * table[1] + weights["w"], x=0)
    for k in (1.0, 2.0):
        table, weights = jnp.full(3, k), {"w": np.float32(k)}
        assert_same(f(X, table, weights), X * k + k)
    assert f.traces == 1


def test_static_values_are_found_by_equality():
    f = Counted(lambda x, n: x * n.value[0], x=0)
    for n in (2, 2, 3):
        assert_same(f(X, Static((n, "a"))), X * n)
    assert f.traces == 2


def test_scalars_with_a_rank_stay_weakly_typed():
    f = Counted(lambda a, b: a * b, 0, 0)
    half = jnp.ones(3, jnp.float16)
    assert f(2.0, half).dtype == jnp.float16
    assert f(2, half).dtype == jnp.float16
    assert f(2.0, 3.0).weak_type
    assert not f(jnp.float32(2.0), 3.0).weak_type
    with pytest.raises(Exception, match="strict"):  # its class has no public name in every JAX
        f(jnp.float32(2.0), half)


def test_numpy_strings_are_static_and_string_arrays_refused():
    f = Counted(lambda x, mode: x if mode == "same" else -x, x=0)
    assert_same(f(X, np.str_("same")), X)
    with pytest.raises(TypeError) as caught:
        f(X, np.array(["same"]))
    assert str(caught.value) == (
        "<lambda>(): mode is not an array, so jit=True makes it a static argument, but ndarray "
        "cannot be hashed; pass a hashable value (a tuple for a list), or an array"
    )


def test_an_unhashable_static_argument_is_named():
    @auto_vmap(x=0, jit=True)
    def kernel(x, first, second):
        raise AssertionError("the kernel must not be traced")

    with pytest.raises(TypeError) as caught:
        kernel(X, "fine", {"deep": ["fine", {1, 2}]})
    assert str(caught.value) == (
        "kernel(): second['deep'][1] is not an array, so jit=True makes it a static argument, but "
        "set cannot be hashed; pass a hashable value (a tuple for a list), or an array"
    )


# Methods.


class Plain:
    def __init__(self, factor):
        self.factor, self.traces = factor, 0

    @auto_vmap(x=0, jit=True)
    def scaled(self, x):
        self.traces += 1
        return x * self.factor


@dataclasses.dataclass  # equal by value, and so without a hash
class Unhashable:
    factor: float
    traces: int = 0

    @auto_vmap(x=0, jit=True, chunk_size=2)
    def scaled(self, x):
        self.traces += 1
        return x * self.factor


@pytest.mark.parametrize("cls", [Plain, Unhashable])
def test_methods_compile_once_per_object(cls):
    two, three = cls(2.0), cls(3.0)
    for _ in range(2):
        assert_same(two.scaled(X), X * 2)
        assert_same(three.scaled(X), X * 3)
    assert (two.traces, three.traces) == (1, 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    weight: jax.Array
    activation: object = dataclasses.field(metadata={"static": True})
    traces = 0

    @auto_vmap(x=1, jit=True)
    def __call__(self, x):
        Model.traces += 1
        return self.activation(jnp.dot(self.weight, x))


def test_a_pytree_self_is_traced():
    x = jnp.arange(6.0).reshape(2, 3)
    Model.traces = 0
    for k in (1.0, 2.0):
        model = Model(jnp.arange(3.0) * k, jnp.tanh)
        assert_same(model(x), jnp.tanh(x @ model.weight))
    assert Model.traces == 1
    model = Model(jnp.arange(3.0), jnp.sin)
    assert_same(model(x), jnp.sin(x @ model.weight))
    assert Model.traces == 2
    gradient = jax.grad(lambda model: jnp.sum(model(x)))(model)
    assert_same(gradient.weight, jnp.cos(x @ model.weight) @ x)


def test_a_pytree_self_with_an_unhashable_leaf_is_named():
    model = Model({"w": jnp.ones(3), "names": {1, 2}}, jnp.sin)
    with pytest.raises(TypeError) as caught:
        model(jnp.ones((2, 3)))
    assert str(caught.value).startswith(
        "__call__(): self.weight['names'] is not an array, so jit=True makes it a static argument"
    )


# Inside other transformations.


def wave(s, v):
    return jnp.tanh(s) * jnp.dot(v, v)


def by_hand(s, v):
    return jax.vmap(jax.vmap(wave, in_axes=(None, 0)), in_axes=(0, None))(s, v)


ARGS = [jnp.asarray(x) for x in (np.arange(4.0)[:, None], np.linspace(0, 1, 15).reshape(5, 3))]


@pytest.fixture(params=[None, 3, 20], ids=str)
def f(request):
    return auto_vmap(0, 1, chunk_size=request.param, jit=True)(wave)


def test_an_outer_trace_sees_only_calls_of_the_kernel(f):
    plain = auto_vmap(0, 1)(wave)
    chunked = f.plan(*ARGS).in_flight < 20
    for transform in (jax.jit, lambda f: f):
        # jnp.dot calls none of its own; a chunk is traced as a whole, inside its loop
        calls = primitives(transform(f), *ARGS)["jit"] + primitives(transform(f), *ARGS)["pjit"]
        own = primitives(transform(plain), *ARGS)
        assert calls == own["jit"] + own["pjit"]
    if not chunked:
        assert str(jax.make_jaxpr(f)(*ARGS)) == str(jax.make_jaxpr(plain)(*ARGS))
        # whatever the trace inside which it is called, and also with constants only
        for transform in (
            lambda f: jax.vmap(f, axis_size=2, in_axes=None),
            lambda f: jax.value_and_grad(lambda s, v: jnp.sum(f(s, v))),
            lambda f: lambda *_: f(*ARGS),
            lambda f: lambda s, v: jax.lax.scan(lambda c, _: (c, f(s, c)), v, None, 3),
        ):
            programs = [str(jax.make_jaxpr(transform(fun))(*ARGS)) for fun in (f, plain)]
            assert programs[0] == programs[1]


def test_values_gradients_and_tangents(f):
    def plain(s, v):
        return by_hand(s[:, 0], v)

    def everything(f, *args):
        gradients = jax.grad(lambda *args: jnp.sum(f(*args) ** 2), argnums=(0, 1))(*args)
        return f(*args), jax.jvp(f, args, jax.tree.map(jnp.ones_like, args)), gradients

    got, want = everything(f, *ARGS), jax.jit(everything, static_argnums=0)(plain, *ARGS)
    assert_same(got[:2], want[:2])
    assert_same(got[2], want[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
def test_under_an_eager_transformation_it_is_compiled(transform):
    f = Counted(jnp.sin, x=0)
    for k in (1.0, 2.0):
        assert_same(transform(f)(X * k), transform(jnp.sin)(X * k))
    assert f.traces == 1


def test_vmap_and_scan_over_it(f):
    stack = jnp.stack([ARGS[0], ARGS[0] + 1])
    want = jnp.stack([f(s, ARGS[1]) for s in stack])
    assert_same(jax.vmap(f, in_axes=(0, None))(stack, ARGS[1]), want)
    _, got = jax.lax.scan(lambda _, s: (None, f(s, ARGS[1])), None, stack)
    assert_same(got, want)


def test_lowering_passes_through():
    counted = Counted(lambda x, n, *, mode: x * n if mode == "up" else -x * n, x=0)
    specs = jax.ShapeDtypeStruct((3,), jnp.float32)
    for x in (X, specs):
        compiled = counted.mapped.lower(x, 2, mode="up").compile()
        assert_same(compiled(X), X * 2)
        assert compiled.memory_analysis().output_size_in_bytes == 12
    assert counted.traces == 1
    text = counted.mapped.lower(specs, 3, mode="down").as_text()
    assert "tensor<3xf32>" in text
    assert not hasattr(auto_vmap(0)(jnp.sin), "lower")


def test_the_program_carries_the_kernels_name():
    assert "@jit_wave" in auto_vmap(0, 1, jit=True)(wave).lower(*ARGS).as_text()


def test_eval_shape_and_plan_need_no_values(f):
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ARGS)
    assert jax.eval_shape(f, *specs).shape == (4, 5)
    assert f.plan(*specs).batch_shape == (4, 5)


@pytest.mark.parametrize(
    ("rank", "shapes", "error"),
    [
        ((0, 1), [(4,), (5, 3)], BatchShapeError),
        (("n", "n"), [(4,), (3,)], CoreDimensionError),
        ((1, 1), [(), (3,)], RankError),
    ],
)
def test_errors_end_with_our_last_line_as_without_jit(rank, shapes, error):
    """No note of JAX on the frames that it has hidden: it would stand below what to do."""
    arrays = [jnp.ones(shape) for shape in shapes]
    told = []
    for compiled in (False, True):
        with pytest.raises(error) as caught:
            auto_vmap(*rank, jit=compiled)(wave)(*arrays)
        told.append("".join(traceback.format_exception_only(caught.value)))
    assert told[1] == told[0]


def test_without_jit_nothing_is_kept_between_calls():
    traces = 0

    @auto_vmap(x=0)
    def kernel(x, unhashable):
        nonlocal traces
        traces += 1
        return x + len(unhashable)

    for _ in range(2):
        assert_same(kernel(X, {1, 2}), X + 2)
    assert traces == 2


def test_a_nan_is_a_static_value_like_any_other():
    f = Counted(lambda x, fill: jnp.where(x > 1, x, fill), x=0)
    for _ in range(3):
        got = f(X, float("nan"))
        assert np.isnan(got[0])
    assert f.traces == 1


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}], ids=str)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_under_a_tracer_that_is_not_one_of_jax(options, wrap):
    """Quax runs every primitive by a rule of its own, and looks at what it returns."""
    quax = pytest.importorskip("quax")

    class Wrapped(quax.ArrayValue):
        value: jax.Array

        def aval(self):
            return jax.typeof(self.value)

        def materialise(self):
            return self.value

    f = Counted(jnp.sin, x=0, **options)
    assert_same(wrap(lambda x: quax.quaxify(f)(Wrapped(x)))(X), jnp.sin(X))
    assert f.traces == 1
