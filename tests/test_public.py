# SPDX-License-Identifier: MIT
"""What a user can import, and what the library does not import."""

import dataclasses
import doctest
import inspect
import pickle
import re
import sys
import typing
from pathlib import Path

import jax.numpy as jnp
import pytest

import rankax

SOURCES = sorted(Path(rankax.__file__).parent.rglob("*.py"))


def test_all_names_what_the_package_offers():
    public = {name for name, value in vars(rankax).items() if callable(value)}
    assert set(rankax.__all__) == public
    assert rankax.__all__ == sorted(rankax.__all__)


def test_errors_are_value_errors():
    for name in ("BatchShapeError", "CoreDimensionError", "RankError"):
        assert issubclass(getattr(rankax, name), ValueError)


@pytest.mark.parametrize("name", rankax.__all__)
def test_a_pickle_stores_the_name_that_a_user_imports(name):
    """What is stored must outlive the file that it stands in today."""
    value = getattr(rankax, name)
    stored = pickle.dumps(value, protocol=0)
    assert stored.startswith(f"crankax\n{name}\n".encode())
    assert pickle.loads(stored) is value


def test_instances_pickle_by_public_names():
    plan = rankax.auto_vmap(1, chunk_size=2)(len).plan(jnp.ones((5, 3)))
    errors = [getattr(rankax, name)("why") for name in rankax.__all__ if name.endswith("Error")]
    assert len(errors) == 3
    for value in (plan, plan.leaves[0], plan.levels[0], rankax.Static((1, "a")), *errors):
        stored = pickle.dumps(value)
        assert b"rankax" in stored
        assert b"rankax._" not in stored
        assert repr(pickle.loads(stored)) == repr(value)


def test_fields_of_public_classes_are_known_where_the_classes_are():
    for name in ("BatchPlan", "LeafPlan", "Level", "Static"):
        fields = dataclasses.fields(getattr(rankax, name))
        assert typing.get_type_hints(getattr(rankax, name)).keys() == {f.name for f in fields}


def test_functions_have_their_source_and_examples():
    functions = [
        "auto_vmap",
        "checkpoint_chunked_scan",
        "chunked_vmap",
        "ranks_like",
        "sliced_scan",
    ]
    for name in functions:
        assert f"def {name}(" in inspect.getsource(getattr(rankax, name))
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test.name.rpartition(".")[2]
        for module in [m for n, m in sorted(sys.modules.items()) if n.split(".")[0] == "rankax"]
        for test in finder.find(module)
        if test.examples
    ]
    assert sorted(found) == ["Static", *functions]  # each once


def test_nothing_private_of_jax_is_imported():
    assert len(SOURCES) > 10
    for source in SOURCES:
        assert not re.search(r"jax\._(?!_)|jax import _", source.read_text()), source.name
