# SPDX-License-Identifier: MIT
"""What `docs/extend.md` shows, a form in loops, and that to decorate starts no backend."""

import dataclasses
import doctest
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from helpers import assert_same
from rankax import auto_vmap
from rankax.call.kernels import bind
from rankax.core.protocols import Form
from rankax.pipeline import evaluate

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


def test_the_page_runs():
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert not failed
    assert tried > 15


@dataclasses.dataclass(frozen=True)
class Twice(Form):
    """Evaluate each item twice, and add the results."""

    def evaluate(self, call, leaves, plan):
        return call.call(leaves, plan) + call.call(leaves, plan)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"reduce": "sum"}], ids=str)
def test_a_form_is_part_of_every_call(options):
    kernel = auto_vmap(x=1, **options)(lambda x: jnp.sin(x @ x))

    def twice(x):
        call = bind(kernel.spec, (x,), {})
        return evaluate(dataclasses.replace(call, form=Twice()), kernel.spec.options())

    x = jnp.arange(15.0).reshape(5, 3) / 15
    assert_same(twice(x), 2 * kernel(x))
    slopes = [jax.grad(lambda x, f=f: f(x).sum())(x) for f in (twice, kernel)]
    assert_same(slopes[0], 2 * slopes[1])


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
