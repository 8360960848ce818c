# SPDX-License-Identifier: MIT
"""What a user can import, and what the library does not import."""

import pickle
import re
from pathlib import Path

import jax.numpy as jnp

import rankax

SOURCES = sorted(Path(rankax.__file__).parent.rglob("*.py"))


def test_all_names_what_the_package_offers():
    public = {name for name, value in vars(rankax).items() if callable(value)}
    assert set(rankax.__all__) == public
    assert rankax.__all__ == sorted(rankax.__all__)


def test_errors_are_value_errors_with_the_name_a_user_imports():
    for name in ("BatchShapeError", "CoreDimensionError", "RankError"):
        error = getattr(rankax, name)
        assert issubclass(error, ValueError)
        assert error.__module__ == "rankax"


def test_the_parts_of_a_plan_pickle_by_the_name_a_user_imports():
    """A stored plan must outlive the file that its class stands in today."""
    plan = rankax.auto_vmap(1)(len).plan(jnp.ones((2, 3)))
    for part in (plan, plan.leaves[0], plan.levels[0]):
        assert type(part).__module__ == "rankax"
        assert type(part) is getattr(rankax, type(part).__name__)
        stored = pickle.dumps(part)
        assert b"rankax._" not in stored
        assert pickle.loads(stored) == part


def test_nothing_private_of_jax_is_imported():
    assert len(SOURCES) > 10
    for source in SOURCES:
        assert not re.search(r"jax\._|jax import _", source.read_text()), source.name
