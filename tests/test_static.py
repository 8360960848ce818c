# SPDX-License-Identifier: MIT
import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same
from rankax import Static, chunked_vmap


def test_is_structure_and_not_a_leaf():
    tree = {"x": 1.0, "mode": Static("fast")}
    leaves, treedef = jax.tree.flatten(tree)
    assert leaves == [1.0]
    assert treedef.unflatten([2.0]) == {"x": 2.0, "mode": Static("fast")}
    assert jax.tree.structure(Static(1)) != jax.tree.structure(Static(2))


def test_equality_and_hash_are_those_of_the_value():
    assert Static[int](3) == Static(3)
    assert Static(1) not in (Static(2), 1)
    assert len({Static((1, "a")), Static((1, "a")), Static(2)}) == 2


def test_is_frozen_shows_its_value_and_pickles():
    static = Static((1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'value'"):
        static.value = 3
    assert repr(static) == "Static(value=(1, 2))"
    assert pickle.loads(pickle.dumps(static)) == static


def test_jit_compiles_once_per_value():
    traced = []

    @jax.jit
    def power(x, exponent):
        traced.append(exponent.value)
        return x**exponent.value

    x = jnp.arange(1.0, 4.0)
    for exponent in (2, 3, 2, 3):
        assert_same(power(x, Static(exponent)), x**exponent)
    assert traced == [2, 3]


def test_is_carried_by_transformations():
    def step(carry, x):
        total, mode = carry
        return (total * 0.5 + (x if mode.value == "add" else -x), mode), carry

    init = jnp.array(1.0), Static("subtract")
    (last, mode), (_, modes) = jax.lax.scan(step, init, jnp.arange(4.0))
    assert (mode, modes) == (Static("subtract"), Static("subtract"))
    assert_same(last, jnp.array(((((0.5 - 0) * 0.5) - 1) * 0.5 - 2) * 0.5 - 3))

    def scaled(tree):
        return {"y": tree["x"] * tree["by"].value, "by": tree["by"]}

    xs = jnp.arange(5.0)
    for mapped in (jax.vmap(scaled), chunked_vmap(scaled, 2), chunked_vmap(scaled, 5)):
        assert_same(mapped({"x": xs, "by": Static(3)}), {"y": xs * 3, "by": Static(3)})

    gradient = jax.grad(lambda tree: jnp.sum(scaled(tree)["y"] ** 2))({"x": xs, "by": Static(3)})
    assert_same(gradient, {"x": 18 * xs, "by": Static(3)})


@pytest.mark.parametrize(
    ("value", "kind"),
    [([1], "list"), ({}, "dict"), (np.ones(2), "ndarray"), (([1],), "tuple")],
)
def test_unhashable_value(value, kind):
    text = (
        f"Static(value) needs a hashable value, got {kind}: a compile-time constant is looked up "
        "by its hash. Pass a tuple for a list, a frozenset for a set; pass an array as an "
        "ordinary leaf."
    )
    with pytest.raises(TypeError, match=re.escape(text)):
        Static(value)
