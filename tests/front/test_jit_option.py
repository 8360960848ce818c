# SPDX-License-Identifier: MIT
"""``jit=True``: one compiled program per set of shapes, dtypes and static values."""

import dataclasses
import enum
import functools
import math
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, refusal
from rankax import BatchShapeError, auto_vmap


def counted(fun, *ranks, **options):
    """Return the decorated kernel, and a list that grows with each trace of it."""
    traces = []

    @functools.wraps(fun)
    def kernel(*args, **kwargs):
        traces.append(args)
        return fun(*args, **kwargs)

    return auto_vmap(*ranks, jit=True, **options)(kernel), traces


X = jnp.asarray(np.arange(1.0, 4.0))


def test_one_trace_per_set_of_shapes_and_dtypes():
    f, traces = counted(lambda s, v: jnp.sum(v) * s, 0, 1)
    v = jnp.ones((5, 3))
    # The same shapes and dtypes, also of NumPy; another batch, another dtype, and scalars.
    same = [(X[:, None], v), (X[:, None] * 2, v + 1), (np.ones((3, 1), np.float32), v)]
    half = jnp.ones((3, 1), jnp.float16), v.astype(jnp.float16)
    for args, count in [
        *((args, 1) for args in same),
        ((X[:2, None], v), 2),
        (half, 3),
        ((2.0, v), 4),
        ((3.0, v), 4),  # a scalar with a rank is traced, whatever its value
    ]:
        f(*args)
        assert len(traces) == count


def test_arguments_by_name_or_position_share_a_program():
    f, traces = counted(lambda x, y=1.0, z=2.0: x + y * z, 0, 0, 0)
    assert_same(f(X), X + 2)
    assert_same(f(X, z=3.0), X + 3)
    assert_same(f(X, z=3.0, y=2.0), X + 6)
    assert_same(f(x=X, y=2.0), X + 4)
    assert len(traces) == 1


def describe(x, value):
    """Return numbers that tell apart what compares equal."""
    kind = [bool, int, float, complex].index(type(value))
    sign = math.copysign(1.0, value.real), math.copysign(1.0, value.imag)
    return x * 0 + kind * 100 + 10 * sign[0] + sign[1] + 1000 * math.isnan(value.real)


def test_equal_values_of_other_kinds_have_programs_of_their_own():
    f, traces = counted(describe, x=0)
    values = [True, 1, 1.0, 1 + 0j, 0.0, -0.0, 0, False, complex(0.0, -0.0), math.nan]
    for value in values * 2:
        assert_same(f(X, value), describe(X, value))
    assert len(traces) == len(values)


class Mode(enum.Enum):
    UP = 1
    DOWN = -1


def test_strings_callables_none_and_unranked_scalars_are_static():
    received = []

    def kernel(x, name, fun, flag, nothing, options, mode):
        received.append((name, fun, flag, nothing, options, mode))
        return fun(x) * options["n"] * mode.value if flag else x

    f, traces = counted(kernel, x=0)
    args = ("a", jnp.sin, True, None, {"n": 2, "deep": ("s", 1.5)}, Mode.UP)
    for _ in range(2):
        assert_same(f(X, *args), jnp.sin(X) * 2)
    assert received == [args]
    assert received[0][1] is jnp.sin
    assert_same(f(X, "b", jnp.cos, *args[2:5], Mode.DOWN), -jnp.cos(X) * 2)
    assert len(traces) == 2


def test_unranked_arrays_are_traced():
    f, traces = counted(lambda x, table, weights: x * table[1] + weights["w"], x=0)
    for k in (1.0, 2.0):
        table, weights = jnp.full(3, k), {"w": np.float32(k)}
        assert_same(f(X, table, weights), X * k + k)
    assert len(traces) == 1


def test_strings_of_numpy_are_static_and_sets_are_refused():
    @auto_vmap(x=0, jit=True)
    def kernel(x, first, second):
        assert first == "fine"
        return x

    assert_same(kernel(X, np.str_("fine"), None), X)
    text = (
        "kernel(): {} is not an array, so jit=True makes it a static argument, but {} cannot be "
        "hashed; pass a hashable value (a tuple for a list), or an array"
    )
    nested = {"deep": ["fine", {1, 2}]}
    assert refusal(TypeError, kernel, X, nested, 1) == text.format("first['deep'][1]", "set")
    strings = np.array(["fine"])
    assert refusal(TypeError, kernel, X, "fine", strings) == text.format("second", "ndarray")
    model = Model({"w": jnp.ones(3), "names": {1, 2}}, jnp.sin)
    text = text.replace("kernel()", "__call__()").format("self.weight['names']", "set")
    assert refusal(TypeError, model, jnp.ones((2, 3))) == text


# Methods.


@dataclasses.dataclass(eq=False)
class Plain:
    factor: float
    traces: int = 0

    @auto_vmap(x=0, jit=True)
    def scaled(self, x):
        self.traces += 1
        return x * self.factor


@dataclasses.dataclass
class Unhashable(Plain):
    """Equal by value, and so without a hash."""


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


# Inside other transformations.


def wave(s, v):
    return jnp.tanh(s) * jnp.dot(v, v)


ARGS = [jnp.asarray(x) for x in (np.arange(4.0)[:, None], np.linspace(0, 1, 15).reshape(5, 3))]


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_an_outer_trace_sees_only_calls_of_the_kernel(chunk_size):
    plain = auto_vmap(0, 1, chunk_size=chunk_size)(wave)
    f = plain.with_options(jit=True)
    for transform in (
        lambda f: f,
        lambda f: jax.vmap(f, axis_size=2, in_axes=None),
        lambda f: jax.value_and_grad(lambda s, v: jnp.sum(f(s, v))),
        lambda f: lambda *_: f(*ARGS),  # with constants only
        lambda f: lambda s, v: jax.lax.scan(lambda c, _: (c, f(s, c)), v, None, 3),
    ):
        programs = [str(jax.make_jaxpr(transform(fun))(*ARGS)) for fun in (f, plain)]
        assert len({re.sub("0x[0-9a-f]+", "", program) for program in programs}) == 1


@pytest.mark.parametrize(
    "transform",
    [
        jax.vmap,
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_under_an_eager_transformation_it_is_compiled(transform):
    f, traces = counted(jnp.sin, x=0)
    for k in (1.0, 2.0):
        assert_same(transform(f)(X * k), transform(jnp.sin)(X * k))
    assert len(traces) == 1


def test_lowering_passes_through():
    f, traces = counted(lambda x, n, *, mode: x * n if mode == "up" else -x * n, x=0)
    specs = jax.ShapeDtypeStruct((3,), jnp.float32)
    for x in (X, specs):
        compiled = f.lower(x, 2, mode="up").compile()
        assert_same(compiled(X), X * 2)
        assert compiled.memory_analysis().output_size_in_bytes == 12
    assert len(traces) == 1
    text = f.lower(specs, 3, mode="down").as_text()
    assert "tensor<3xf32>" in text
    assert "@jit__lambda" in text  # the name of the kernel


def test_errors_end_with_our_last_line_as_without_jit():
    """No note of JAX on the frames that it has hidden: it would stand below what to do."""
    told = []
    for compiled in (False, True):
        with pytest.raises(BatchShapeError) as caught:
            auto_vmap(0, 1, jit=compiled)(wave)(jnp.ones(4), jnp.ones((5, 3)))
        told.append("".join(traceback.format_exception_only(caught.value)))
    assert told[1] == told[0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_under_a_tracer_that_is_not_one_of_jax(wrap):
    """Quax runs every primitive by a rule of its own, and looks at what it returns."""
    quax = pytest.importorskip("quax")

    class Wrapped(quax.ArrayValue):
        value: jax.Array

        def aval(self):
            return jax.typeof(self.value)

        def materialise(self):
            return self.value

    f, traces = counted(jnp.sin, x=0, chunk_size=2)
    assert_same(wrap(lambda x: quax.quaxify(f)(Wrapped(x)))(X), jnp.sin(X))
    assert len(traces) == 1
