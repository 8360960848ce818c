# SPDX-License-Identifier: MIT
"""A decorated kernel is treated as a function, by Python's tools and by JAX."""

import abc
import copy
import dataclasses
import doctest
import functools
import gc
import inspect
import pickle
import pydoc
import subprocess
import sys
import threading
import typing
import weakref

import beartype
import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Array, Float

import wrapper_kernels
from helpers import assert_same
from rankax import BatchShapeError, SplitKey, Static, auto_vmap
from wrapper_kernels import Body, Comet

X = jnp.asarray(np.arange(1.0, 13.0).reshape(4, 3))
S = jnp.asarray(np.arange(4.0))


def kernel(s: float, /, v: Array, *rest: Array, scale: float = 2.0) -> Array:
    """Scale a vector.

    At some length.
    """
    return s * v * scale


@pytest.mark.parametrize("options", [{}, {"jit": True}], ids=str)
def test_metadata_are_the_kernels(options):
    mapped = auto_vmap(0, 1, **options)(kernel)
    assert inspect.signature(mapped) == inspect.signature(kernel)
    assert inspect.getsource(mapped) == inspect.getsource(kernel)
    assert inspect.getdoc(mapped) == inspect.getdoc(kernel)
    for name in ("__annotations__", "__name__", "__qualname__", "__module__"):
        assert getattr(mapped, name) == getattr(kernel, name), name
    assert mapped.__wrapped__ is kernel
    assert inspect.isroutine(mapped)
    assert typing.get_type_hints(mapped) == typing.get_type_hints(kernel)
    # Only the title differs, which names the type.
    texts = [pydoc.render_doc(f, renderer=pydoc.plaintext).split("\n") for f in (mapped, kernel)]
    assert texts[0][1:] == texts[1][1:]
    assert texts[0][0] == f"Python Library Documentation: Kernel in module {__name__}"


def test_attributes_of_the_kernel_are_kept():
    def marked(x):
        return x

    marked.unit = "metre"
    marked.tuning = "of the user's"  # hides nothing
    mapped = auto_vmap(0)(marked)
    assert mapped.unit == "metre"
    assert mapped.tuning is None


def test_partials_and_objects_are_named_and_described():
    mapped = auto_vmap(1)(functools.partial(kernel, 3.0))
    assert mapped.__name__ == "kernel"
    assert mapped.__doc__ == kernel.__doc__
    assert inspect.signature(mapped) == inspect.signature(functools.partial(kernel, 3.0))
    assert_same(mapped(X), 6 * X)

    class Affine:
        """Shift and scale."""

        def __init__(self):
            self.plan = self.shift = 1.0

        def __call__(self, x, by=0.0):
            return x + self.shift + by

    mapped = auto_vmap(0)(Affine())
    assert (mapped.__name__, mapped.__doc__) == ("Affine", "Shift and scale.")
    assert str(inspect.signature(mapped)) == "(x, by=0.0)"
    assert mapped.plan(S).batch_shape == (4,)
    assert not hasattr(mapped, "shift")


@pytest.mark.parametrize(("module", "name"), [(pickle, "plain"), (cloudpickle, "jitted")])
def test_module_level_kernels_are_pickled_by_name(module, name):
    mapped = getattr(wrapper_kernels, name)
    mapped(S, X)
    assert pickle.loads(module.dumps(mapped)) is mapped
    bound = pickle.loads(module.dumps(Body(2.0).pull))
    assert_same(bound(X), Body(2.0).pull(X))
    assert pickle.loads(module.dumps(Comet.unit)) == Comet.unit


class Pair(eqx.Module):
    a: jax.Array
    b: jax.Array


@pytest.mark.parametrize("options", [{"jit": True}, {"chunk_size": 2}], ids=str)
def test_local_kernels_are_pickled_by_value_also_after_use(options):
    factor = 3.0

    @auto_vmap(0, 0, **options)
    def local(pair, extra=None):
        return (pair.a + pair.b) * factor

    want = (S + 1) * 3
    assert_same(local(Pair(S, 1.0)), want)
    # Of this call a structure is remembered that no pickle can hold.
    assert_same(local(Pair(S, 1.0), Static(threading.Lock())), want)
    copied = pickle.loads(cloudpickle.dumps(local))
    assert copied is not local
    assert_same(copied(Pair(S, 1.0)), want)
    assert copied.plan(Pair(S, 1.0)) == local.plan(Pair(S, 1.0))
    assert copied.with_options() is copied.with_options()
    assert repr(copied) == repr(local)


def test_a_kernel_that_calls_itself_is_pickled_by_value():
    @auto_vmap(x=0, jit=True)
    def power(x, n):
        return x * power(x, n - 1) if n else 1.0

    copied = pickle.loads(cloudpickle.dumps(power))
    assert_same(copied(S, 3), S**3)
    assert inspect.getclosurevars(copied.__wrapped__).nonlocals["power"] is copied


MAIN = """
import sys
import cloudpickle
from rankax import auto_vmap

@auto_vmap(x=0, jit=True)
def double(x):
    return factor * x

factor = 2
assert cloudpickle.loads(cloudpickle.dumps(double)) is not double
sys.stdout.buffer.write(cloudpickle.dumps(double))
"""
READ = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(2.5))"


@pytest.mark.slow
def test_kernels_of_a_notebook_go_to_other_processes_by_value():
    def run(program, **options):
        command = [sys.executable, "-c", program]
        return subprocess.run(command, stdout=subprocess.PIPE, check=True, **options).stdout

    assert run(READ, input=run(MAIN)) == b"5.0\n"


@pytest.mark.parametrize("options", [{"jit": True}, {"chunk_size": 2}], ids=str)
def test_copies_and_weak_references(options):
    mapped = auto_vmap(0, **options)(lambda x: x)
    mapped(S)
    mapped.with_options(checkpoint=False)(S)
    assert_same(copy.copy(mapped)(S), S)
    assert copy.deepcopy(mapped) is mapped
    reference = weakref.ref(mapped)
    assert reference() is mapped
    del mapped
    gc.collect()
    assert reference() is None


def test_a_call_keeps_no_argument_alive():
    class Marker:
        pass

    mapped = auto_vmap(x=0, chunk_size=2)(lambda x, marker: x + 1)
    marker, array = Marker(), jnp.arange(4.0)
    mapped(array, marker)
    references = [weakref.ref(marker), weakref.ref(array)]
    del marker, array
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_methods_are_inherited_and_call_their_super():
    comet = Comet(2.0)
    pull = -2 * X / jnp.sum(X**2, axis=1, keepdims=True)
    assert_same(Body(2.0).pull(X), pull)
    assert_same(comet.pull(X), pull + X)
    assert_same(Comet.pull(comet, x=X[0]), pull[0] + X[0])
    assert_same(Comet.unit(X), Body.unit(X) + 1)
    assert_same(comet.norm(X), jnp.sum(X**2, axis=1))
    assert comet.pull.plan(X) == Comet.pull.plan(comet, X)
    assert_same(Comet.unit.with_options(chunk_size=2)(X), X + 1)
    for owner in (Comet, comet):
        assert_same(owner.total(X), jnp.sum(X, axis=1) * 5)
        assert_same(owner.largest(X), jnp.max(X, axis=1))
    assert str(inspect.signature(comet.pull)) == "(x)"


def test_bound_methods_are_like_those_of_functions():
    body, twin = Body(2.0), Body(2.0)
    pull = body.pull
    assert (pull.__self__, pull.__func__) == (body, Body.pull)
    assert (pull.__name__, pull.__qualname__) == ("pull", "Body.pull")
    assert pull.__module__ == "wrapper_kernels"
    assert_same(pull.__wrapped__(X[0]), pull(X[0]))
    assert_same(auto_vmap(2)(pull)(X[None]), pull(X)[None])
    assert {pull: 1}[body.pull] == 1
    assert pull not in (twin.pull, body.pull.with_options(chunk_size=3))
    assert inspect.isroutine(pull)
    help_text = pydoc.render_doc(pull, renderer=pydoc.plaintext)
    assert "pull(x)\n    Pull towards the origin." in help_text
    assert_same(functools.partialmethod(Body.pull, X[0]).__get__(body)(), body.pull(X[0]))
    assert copy.copy(pull) == pull
    copied = copy.deepcopy({"pull": pull, "body": body})
    assert copied["pull"].__self__ is copied["body"] is not body
    assert copied["pull"].__func__ is Body.pull


@pytest.mark.parametrize("fun", [wrapper_kernels.plain, Body(2.0).pull], ids=["kernel", "method"])
def test_kernels_as_constants_of_programs_and_as_keys(fun):
    args = (S, X) if fun is wrapper_kernels.plain else (X,)
    called = jax.jit(lambda fun, *args: fun(*args), static_argnums=0)
    for again in (fun, fun.__func__.__get__(fun.__self__) if fun != wrapper_kernels.plain else fun):
        assert_same(called(again, *args), fun(*args))
    assert called._cache_size() == 1
    assert_same(jax.jit(fun)(*args), fun(*args))
    assert {fun: "found"}[fun] == "found"


def test_a_bound_method_is_a_pytree_of_its_object():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Line:
        slope: jax.Array

        @auto_vmap(x=1)
        def at(self, x):
            return jnp.dot(self.slope, x)

    def apply(fun, x):
        return fun(x)

    line, lines, called = Line(X[0]), Line(X), jax.jit(apply)
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path(line.at)
    assert leaf is line.slope
    assert jax.tree_util.keystr(path) == ".__self__.slope"
    assert_same(called(line.at, X), X @ X[0])
    assert_same(called(lines.at, X[0]), X @ X[0])
    assert called._cache_size() == 2
    assert_same(jax.vmap(apply, in_axes=(0, None))(lines.at, X), X @ X.T)
    assert_same(jax.grad(lambda fun: fun(X).sum())(line.at).__self__.slope, X.sum(0))
    assert_same(auto_vmap(x=1, fun=None, jit=True)(apply)(line.at, X), X @ X[0])


def test_doctest_finds_kernels_and_methods():
    tests = {test.name for test in doctest.DocTestFinder().find(wrapper_kernels) if test.docstring}
    assert {"wrapper_kernels.plain", "wrapper_kernels.Body.pull"} <= tests


def test_what_is_printed():
    @auto_vmap({"a": "n 3", "b": (0, None)}, None, 1, key=SplitKey, reduce=("sum", "max"), jit=True)
    def kernel(tree, *args, flag=True, key, **others): ...

    assert repr(kernel) == (
        "<rankax kernel kernel(tree['a']: \"n 3\", tree['b'][0]: 0, tree['b'][1], args[0], "
        "args[1]: 1, *args, flag, key: SplitKey, **others), reduce=sum and max, jit=True>"
    )
    assert repr(auto_vmap("(n,3),(n)->()")(lambda x, m: x)) == (
        '<rankax kernel <lambda>(x: "n 3", m: "n")>'
    )

    @auto_vmap
    def annotated(x: Float[Array, "*batch n"], pair: PairOfScalars, more: list[Float[Array, ""]]):
        return x

    text = '<rankax kernel annotated(x: "n", pair: PairOfScalars, more: ""), chunk_size=2>'
    assert repr(annotated.with_options(chunk_size=2)) == text
    assert repr(Body(2.0).pull) == "<rankax kernel pull(self, x: 1), chunk_size=2>"


class PairOfScalars(eqx.Module):
    a: Float[Array, ""]
    b: Float[Array, ""]


def test_abstract_methods_stay_abstract():
    class Base(abc.ABC):
        @auto_vmap(x=0)
        @abc.abstractmethod
        def f(self, x): ...

    with pytest.raises(TypeError, match="abstract"):
        Base()


# Other wrappers, inside and outside.

ORDERS = {"jit": jax.jit, "checkpoint": jax.checkpoint, "filter_jit": eqx.filter_jit}


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_wrappers_does_not_matter(order):
    def f(s, v):
        return jnp.sin(s) * jnp.sum(v**2)

    wrap, decorate = ORDERS[order], auto_vmap(0, 1, chunk_size=3)
    s, x = np.asarray(S), np.asarray(X)
    want = np.sin(s)[:, None] * np.sum(x**2, axis=1)[None]
    slope = np.cos(s) * np.sum(x**2)
    for mapped in (wrap(decorate(f)), decorate(wrap(f))):
        assert_same(mapped(S[:, None], X), want)
        assert_same(jax.grad(lambda s: jnp.sum(mapped(s[:, None], X)))(S), slope)  # noqa: B023
        with pytest.raises(BatchShapeError, match="Batch axis -1 is 4 \\(s\\) and 3 \\(v\\)"):
            mapped(S, X[:3])


def test_jaxtyped_inside_sees_one_item_and_outside_the_batch():
    checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)

    @auto_vmap(0, 1)
    @checked
    def inside(s: Float[Array, ""] | float, v: Float[Array, "3"]) -> Float[Array, "3"]:
        return s * v

    @checked
    @auto_vmap(0, 1)
    def outside(s: Float[Array, "*batch"], v: Float[Array, "*batch 3"]) -> Float[Array, "*batch 3"]:
        return s * v

    for mapped, misfit in ((inside, X[:, :2]), (outside, X[:2])):
        assert_same(mapped(S, X), S[:, None] * X)
        with pytest.raises(jaxtyping.TypeCheckError, match="Type-check error"):
            mapped(S, misfit)
    assert_same(inside(2.0, X), 2 * X)


def test_kernels_with_derivatives_of_their_own():
    mapped = auto_vmap(0, chunk_size=3)(jax.nn.relu)  # whose rule says 0 at 0, and JAX 1/2 else
    assert_same(jax.grad(lambda x: jnp.sum(mapped(x)))(S), jnp.float32(S > 0))
    assert mapped.__name__ == "relu"


def test_a_decorated_function_takes_a_rule_of_its_own():
    mapped = jax.custom_jvp(auto_vmap(0)(lambda x: x**2))
    mapped.defjvp(lambda primals, tangents: (mapped(*primals), 7 * tangents[0]))
    assert_same(jax.jvp(mapped, (S,), (S,)), (S**2, 7 * S))


class Layer(eqx.Module):
    weight: jax.Array
    activation: object = eqx.field(static=True)

    @auto_vmap(x=1)
    def __call__(self, x):
        return self.activation(jnp.dot(self.weight, x))

    @auto_vmap({"k": 1}, x=1, jit=True)
    @staticmethod
    def combine(tree, x):
        return jnp.dot(tree["k"], x)


def test_methods_of_an_equinox_module():
    layer = Layer(jnp.arange(3.0), jnp.tanh)
    want = jnp.tanh(X @ layer.weight)
    assert_same(layer(X), want)
    assert_same(layer.combine({"k": X}, X), jnp.sum(X * X, axis=1))
    assert_same(eqx.filter_jit(layer)(X), want)
    assert_same(eqx.filter_jit(lambda layer, x: layer(x))(layer, X), want)
    gradient = eqx.filter_grad(lambda layer: jnp.sum(layer(X)))(layer)
    assert_same(gradient.weight, (1 - want**2) @ X)


def test_an_equinox_module_as_kernel_and_as_argument():
    keys = jax.random.split(jax.random.key(0), 4)
    linear = eqx.nn.Linear(3, 2, key=keys[0])
    assert_same(auto_vmap(1)(linear)(X), X @ linear.weight.T + linear.bias[None])
    models = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 2, key=key))(keys)
    ranks = eqx.tree_at(lambda model: (model.weight, model.bias), linear, (2, 1))
    got = auto_vmap(ranks, 1)(lambda model, x: model(x))(models, X)
    assert_same(got, jnp.einsum("nij,nj->ni", models.weight, X) + models.bias)
