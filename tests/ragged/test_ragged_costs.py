# SPDX-License-Identifier: MIT
"""What ragged calls cost: what a warm eager one does again, and the memory of a compiled one."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same, compilations, operations_on, python_calls, temporary_bytes
from rankax import Mask, Ragged, SplitKey, auto_vmap, options

X = Ragged(jnp.arange(45.0).reshape(15, 3) / 45, [3, 1, 5, 2, 4])  # four programs


def total(x, mask):
    return jnp.sum(jnp.tanh(x).sum(-1) ** 2, where=mask)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("options", "others"), [({}, 0), ({"reduce": "sum"}, 2)])
def test_a_warm_eager_call_traces_little_but_the_kernel(options, others):
    """What reads the rows is not traced again: that takes several times as many calls.

    With ``reduce``, the outputs of two lengths are compared, and those of one describe the states.
    """
    traces = []

    def counted(x, mask):
        traces.append(len(x))
        return total(x, mask)

    kernel = auto_vmap(x="n 3", mask=Mask("n"), **options)(counted)
    lengths = [longest for (longest,), _ in kernel.plan(X).parts]
    assert len(lengths) == 4
    want = kernel(X)
    traces.clear()
    assert_same(kernel(X), want)
    assert len(traces) == len(lengths) + others

    def traced():
        for length in lengths:
            jax.make_jaxpr(total)(jnp.ones((length, 3)), jnp.ones(length, bool))

    traced()
    assert python_calls(lambda: kernel(X)) <= len(traces) * python_calls(traced)
    assert compilations(kernel, X)[1] == 0


def test_what_the_kernel_uses_may_change():
    used = {"array": np.float32([1, 2, 3]), "number": 1.0}
    x, s = Ragged(X.values[:7], [3, 1, 3]), jnp.arange(3.0)
    rows = [np.asarray(item) for item in x.to_list()]
    kernel = auto_vmap(x="n 3", mask=Mask("n"), s=0)(
        lambda x, mask, s: s * used["number"] * jnp.sum(x @ jnp.asarray(used["array"]), where=mask)
    )

    def check(s):
        want = [(item @ used["array"]).sum() * used["number"] for item in rows]
        np.testing.assert_allclose(kernel(x, s), want * np.asarray(s), rtol=1e-5)

    check(s)
    used["array"] = np.float32([3, 0, 1])
    assert compilations(check, s)[1] == 0  # an array is an input
    used["number"] = 2.0
    check(s)
    check(3.0)


def test_equal_kernels_share_programs_and_nothing_keeps_them():
    def made(weight):
        return auto_vmap(x="n 3", mask=Mask("n"), chunk_size=2)(
            lambda x, mask: jnp.sum(jnp.cosh(x @ weight), where=mask)
        )

    made(jnp.ones(3))(X)
    other = made(2 * jnp.ones(3))
    out, count = compilations(other, X)
    assert count == 0
    assert not np.allclose(out, made(jnp.ones(3))(X))
    kernel = weakref.ref(other.spec.fun)
    del other
    gc.collect()
    assert kernel() is None


def test_one_item_with_a_key():
    """The key is an input of the compiled program, and is split although there is one item."""
    kernel = auto_vmap(x="n", mask=Mask("n"), key=SplitKey, chunk_size=1)(
        lambda x, mask, key: jax.random.normal(key) + jnp.sum(x, where=mask)
    )
    x = Ragged(jnp.arange(2.0), [2])
    with options(check=True):
        for key in map(jax.random.key, (0, 1)):
            (own,) = jax.random.split(key, 1)
            assert_same(kernel(x, key), 1 + jax.random.normal(own)[None])


# Memory.

LENGTHS = np.random.default_rng(0).integers(1, 9, 4000)
WEIGHTS = np.ones((3, 16), np.float32)


@auto_vmap(x="n 3", mask=Mask("n"), chunk_size=32)
def energy(x, mask):
    return jnp.sum(jnp.tanh(x @ WEIGHTS).sum(-1) ** 2, where=mask)


def arguments(count):
    lengths = LENGTHS[:count]
    values = jax.ShapeDtypeStruct((int(lengths.sum()), 3), jnp.float32)
    return values, lambda values: Ragged(values, lengths)


@pytest.mark.optimized
def test_memory_is_that_of_a_chunk():
    """It grows by the results, which the groups have before they are put in order."""
    needs = []
    for count in (1000, 4000):
        values, make = arguments(count)
        needs.append(temporary_bytes(lambda v, make=make: energy(make(v)), values))
    chunk = 32 * 8 * 16 * 4
    assert needs[1] - needs[0] < 3000 * 4 * 12
    assert needs[1] < 4 * chunk + 4000 * 4 * 12


@pytest.mark.optimized
def test_the_gradient_needs_one_cotangent_of_all_lengths():
    """Each length has the cotangent of its own items only; XLA joins some of them, with indices."""
    lengths = np.repeat([4, 16, 64, 400], [3000, 3000, 1000, 50])
    values = jax.ShapeDtypeStruct((int(lengths.sum()), 3), jnp.float32)
    kernel = energy.with_options(chunk_size=8)
    gradient = jax.grad(lambda v: kernel(Ragged(v, lengths)).sum())
    chunk = 8 * int(lengths.max()) * 16 * 4
    assert temporary_bytes(gradient, values) < 2 * chunk + 2.5 * values.size * 4


@pytest.mark.optimized
def test_the_gradient_adds_in_place():
    """Cotangents of the values are scattered into one array, and never added as a whole."""
    values, make = arguments(1000)
    gradient = jax.grad(lambda v: energy(make(v)).sum())
    found = operations_on(values.shape, gradient, values)
    assert found["scatter"] > 0
    assert found["add"] == 0
    assert found["select"] == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("options", [{}, {"reduce": "sum"}])
@pytest.mark.parametrize("lengths", [[3, 3, 3], [3, 1, 5]])
def test_a_compiled_call_traces_the_kernel_once_per_program(options, lengths):
    traces = []

    def counted(x, mask):
        traces.append(len(x))
        return total(x, mask)

    kernel = auto_vmap(x="n 3", mask=Mask("n"), jit=True, **options)(counted)
    x = Ragged(X.values[: sum(lengths)], lengths)
    want = kernel(x)
    traces.clear()
    assert_same(kernel(x), want)
    assert not traces
    plain = [total(item, jnp.ones(len(item), bool)) for item in x.to_list()]
    np.testing.assert_allclose(want, sum(plain) if options else plain, rtol=1e-5)
