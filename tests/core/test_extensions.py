# SPDX-License-Identifier: MIT
"""Extensions of strangers: what `docs/extend.md` shows, and what a form does in loops."""

import dataclasses
import doctest
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from helpers import assert_same
from rankax import auto_vmap
from rankax.core import hooks, options
from rankax.core.protocols import Form
from without import SOURCE, extensions, leave_out

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


@pytest.mark.slow
def test_the_page_runs():
    """In a process of its own, because it registers options."""
    subprocess.run([sys.executable, "-m", "doctest", PAGE], check=True, timeout=120)
    assert len(doctest.DocTestParser().get_examples(PAGE.read_text())) > 15


@pytest.mark.slow
@pytest.mark.parametrize("extension", [name for name, users in extensions().items() if not users])
def test_a_kernel_runs_without(extension, tmp_path):
    """Whether the other tests pass is for ``tox -e without`` to say, weekly."""
    shutil.copytree(SOURCE, tmp_path / "src")
    leave_out(extension, tmp_path / "src")
    call = "import rankax, numpy; print(rankax.auto_vmap(1)(sum)(numpy.ones((2, 3))))"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-c", call]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout == "[3. 3.]\n", run.stderr


@dataclasses.dataclass(frozen=True)
class Twice(Form):
    def evaluate(self, bound, leaves, plan):
        return bound.call(leaves, plan) + bound.call(leaves, plan)


@pytest.fixture
def twice():
    """An option that evaluates each item twice, and adds the results."""
    before = [(x, x.copy()) for x in (options.OPTIONS, options.DEFAULTS)]
    forms = [*hooks.FORMS.all]
    register(bool_option("twice", False))
    FORMS.add("twice", lambda _: Twice())
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)
    hooks.FORMS.all[:] = forms


@pytest.mark.usefixtures("twice")
def test_a_call_has_one_form():
    kernel = auto_vmap(x=1, batched=True)(lambda x: jnp.sum(x, 1)).with_options(twice=True)
    for call in (kernel, kernel.plan):
        with pytest.raises(TypeError, match="batched and twice exclude each other: each says how"):
            call(jnp.ones((5, 3)))


@pytest.mark.usefixtures("twice")
@pytest.mark.parametrize(
    "given", [{}, {"chunk_size": 2}, {"reduce": "sum"}, {"jit": True}], ids=str
)
def test_a_form_is_part_of_every_call(given):
    kernel = auto_vmap(x=1, **given)(lambda x: jnp.sin(x @ x))
    x = jnp.arange(15.0).reshape(5, 3) / 15
    assert_same(kernel.with_options(twice=True)(x), 2 * kernel(x))
    total = lambda kernel: jax.grad(lambda x: kernel(x).sum())(x)  # noqa: E731
    assert_same(total(kernel.with_options(twice=True)), 2 * total(kernel))


def test_older_kernels_have_the_default_of_an_option(request):
    kernel = auto_vmap(x=1, chunk_size=2)(lambda x: jnp.sin(x @ x))
    request.getfixturevalue("twice")
    x = jnp.arange(15.0).reshape(5, 3) / 15
    assert_same(kernel(x), jnp.sin(jax.vmap(jnp.dot)(x, x)))
    assert_same(kernel.with_options(twice=True)(x), 2 * kernel(x))


@pytest.mark.usefixtures("twice")
def test_an_option_is_refused_as_others_are():
    with pytest.raises(TypeError, match=r"auto_vmap\(.*: twice must be True or False, got 2"):
        auto_vmap(x=1, twice=2)(lambda x: x.sum())


def test_a_hook_is_not_asked_where_its_option_is_not_given(monkeypatch):
    asked = []
    monkeypatch.setattr(TRACED, "all", [("memory_limit", lambda *args: asked.append(args))])
    kernel = auto_vmap(x=1)(lambda x: x.sum())
    kernel(jnp.ones((5, 3)))
    assert not asked
    kernel.with_options(memory_limit="1 GB")(jnp.ones((5, 3)))
    assert len(asked) == 1


DECORATED = """
import jax
from rankax import auto_vmap, chunked_reduce, chunked_vmap, options, sliced_scan
given = [{}, {"chunk_size": 4}, {"reduce": "sum"}, {"lockstep": False}, {"devices": "all"}]
given += [{"jit": True, "bucket": True}, {"memory_limit": "1 GB"}, {"cpu_math": True}]
given += [{"batched": True}, {"progress": max}, {"xla_cpu": False}]
for each in given:
    kernel = auto_vmap(x=1, **each)(lambda x: x)
    kernel.with_options(checkpoint=True)
    chunked = {k: v for k, v in each.items() if k not in ("jit", "bucket", "reduce", "xla_cpu")}
    chunked_vmap(lambda x: x, **{"chunk_size": 4, **chunked})
    chunked_reduce(lambda x: x, "sum", **{"chunk_size": 4, **chunked})
with options(chunk_size=4):
    pass
jax.config.update("jax_num_cpu_devices", 2)
"""


def test_to_decorate_starts_no_backend():
    """What asks for devices comes after `jax.distributed.initialize`, and this setting."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", DECORATED], check=True, timeout=120, env=env)
