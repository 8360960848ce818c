# SPDX-License-Identifier: MIT
"""What a user can import, and what its docstrings say."""

import dataclasses
import doctest
import importlib
import inspect
import pickle
import pydoc
import sys
import typing

import jax
import jax.numpy as jnp
import pytest

import rankax
from rankax._options import Options
from rankax.core.base.cache import switch
from rankax.core.plan.schedule import Chunks

MODULES = {"plans", "reductions"}


def test_all_names_what_the_package_offers():
    public = {name for name, value in vars(rankax).items() if callable(value)}
    assert set(rankax.__all__) == public | MODULES | {"caches"}
    assert rankax.__all__ == sorted(rankax.__all__)


def test_a_switch_of_the_environment_is_0_or_1(monkeypatch):
    monkeypatch.setenv("RANKAX_XLA_CPU", "maybe")
    with pytest.raises(ValueError, match="RANKAX_XLA_CPU must be 0 or 1, got 'maybe'"):
        switch("RANKAX_XLA_CPU", default=True)
    for word, is_on in (("0", False), ("off", False), ("1", True)):
        monkeypatch.setenv("RANKAX_XLA_CPU", word)
        assert switch("RANKAX_XLA_CPU", default=not is_on) is is_on


def test_errors_are_value_errors():
    for name in ("BatchShapeError", "CoreDimensionError", "RankError"):
        assert issubclass(getattr(rankax, name), ValueError)


@pytest.mark.parametrize(
    ("module", "name"),
    [("", name) for name in sorted({*rankax.__all__} - MODULES)]
    + [(f".{home}", name) for home in sorted(MODULES) for name in getattr(rankax, home).__all__],
)
def test_a_pickle_stores_the_name_that_a_user_imports(module, name):
    """What is stored must outlive the file that it stands in today."""
    value = getattr(importlib.import_module(f"rankax{module}"), name)
    stored = pickle.dumps(value, protocol=0)
    assert stored.startswith(f"crankax{module}\n{name}\n".encode())
    assert pickle.loads(stored) is value


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_list_what_they_offer_in_order_and_once(module):
    names = getattr(rankax, module).__all__
    assert names == sorted(names)
    assert not {*names} & {*vars(rankax)}


def test_instances_pickle_by_public_names():
    plan = rankax.auto_vmap(1, chunk_size=2)(len).plan(jnp.ones((5, 3)))
    errors = [getattr(rankax, name)("why") for name in rankax.__all__ if name.endswith("Error")]
    assert len(errors) == 3
    limited = rankax.auto_vmap(1, memory_limit="1 GB")(jnp.sum).plan(jnp.ones((5, 3)))
    of_plans = plan, limited, limited.memory, plan.leaves[0], plan.levels[0]
    for value in (*of_plans, rankax.Static((1, "a")), *errors):
        stored = pickle.dumps(value)
        assert b"rankax" in stored
        assert b"rankax._" not in stored
        assert repr(pickle.loads(stored)) == repr(value)


def test_fields_of_plans_and_of_check_and_tune_are_public():
    results = [getattr(rankax.plans, name) for name in rankax.plans.__all__]
    classes = [rankax.Static, *filter(dataclasses.is_dataclass, results)]
    assert len(classes) == 9
    for cls in classes:
        assert typing.get_type_hints(cls).keys() == {f.name for f in dataclasses.fields(cls)}


def test_functions_have_their_source_and_examples():
    values = {name: getattr(rankax, name) for name in rankax.__all__}
    functions = [name for name, value in values.items() if inspect.isroutine(value)]
    for name in functions:
        assert f"def {name}(" in inspect.getsource(getattr(rankax, name))
    for name in ("rankax.xarray", "rankax.stream"):  # each of which has one of its own
        importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test.name.rpartition(".")[2]
        for module in [m for n, m in sorted(sys.modules.items()) if n.split(".")[0] == "rankax"]
        for test in finder.find(module)
        if test.examples
    ]
    assert sorted(found) == sorted(
        ["ByLabel", "Histogram", "Mask", "Ragged", "SplitKey", "Static", "apply", "run", *functions]
    )  # each once


def test_help_shows_the_options_of_auto_vmap():
    signature = inspect.signature(rankax.auto_vmap)
    shown = (
        "(*positional_ranks, ranks=None, chunk_size='auto', memory_limit=None, reduce=None, "
        "reduce_axis=None, over=None, where=None, batch_shape=None, checkpoint=None, jit=False, "
        "compiler_options=None, progress=False, devices=None, lockstep=True, bucket=False, "
        "batched=False, cpu_math=False, xla_cpu=True, hoist=True, fused=False, **named_ranks)"
    )
    assert str(signature) == shown
    page = pydoc.render_doc(rankax.auto_vmap, renderer=pydoc.plaintext)
    # Python 3.13 gives each parameter a line of its own.
    assert "".join(f"auto_vmap{shown}".split()) in "".join(page.split())
    # It is what a type checker knows; the defaults are those of a call.
    options = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    expected = {"ranks": None, **defaults, "xla_cpu": True}  # without RANKAX_XLA_CPU=0
    del expected["target"]
    assert {p.name: p.default for p in options} == expected


def test_a_plan_is_made_once_and_executed():
    """What is printed is what runs: the kept object, for the shapes of this call."""
    kernel = rankax.auto_vmap(1, chunk_size=2, jit=True)(jnp.sum)
    x = jnp.ones((5, 3))
    (level,) = kernel.plan(x).levels
    assert kernel.plan(x + 1).levels[0] is level
    chunks = level.chunks
    object.__setattr__(level, "chunks", Chunks(length=5, size=1, steps=5))
    try:
        assert "length=5" in str(jax.make_jaxpr(kernel)(x))
        assert kernel(x).shape == (5,)
    finally:
        object.__setattr__(level, "chunks", chunks)
