# SPDX-License-Identifier: MIT
"""The calls of `benchmarks/program_cases.py`, compiled for an H100: loops and kernels a step.

``programs.txt`` has them, so that a change shows. To write it::

    JAX_PLATFORMS=cpu python tests/gpu/test_programs.py

A loop is written as steps x kernels a step, + slices of a stack that a step copies; ``?`` stands
for a number of steps that the host has to ask for.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_cuda13_plugin", reason="it is what compiles for a GPU: tox -e gpu")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from compiled import compiled, shape
from program_cases import CASES, NO_GRADIENT

PROGRAMS = Path(__file__).with_name("programs.txt")

# What asks for a device to measure on, and what puts arrays on devices of its own.
ELSEWHERE = {"auto_vmap, memory_limit"}

# Loops in a kernel that depend on its item, and the walk of items that end by themselves.
OF_UNKNOWN_LENGTH = {"lockstep"}


def cases():
    for group, make in CASES.items():
        if group == "sharded":
            continue
        for name, case in make().items():
            if f"{group}, {name}" not in ELSEWHERE:
                yield f"{group}, {name}", case


def shapes(args):
    return jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), args)


def gradient(fun):
    def total(*args):
        leaves = jax.tree.leaves(fun(*args))
        return sum(jnp.sum(x**2) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

    return jax.grad(total, allow_int=True)


def programs(name, case):
    """Yield the mode and the program of a case, forward and gradient."""
    fun, args = case
    yield "forward", compiled(fun, *shapes(args))
    if name in NO_GRADIENT or not jnp.issubdtype(jax.tree.leaves(args)[0].dtype, jnp.floating):
        return
    outs = jax.tree.leaves(jax.eval_shape(fun, *args))
    if any(jnp.issubdtype(out.dtype, jnp.floating) for out in outs):
        yield "gradient", compiled(gradient(fun), *shapes(args))


def lines(name, case):
    """Return the programs of a case, as the list has them."""
    return [f"{name}, {mode}: {program}" for mode, program in programs(name, case)]


def expected(name):
    modes = [f"{name}, {mode}: " for mode in ("forward", "gradient")]
    return [x for x in PROGRAMS.read_text().splitlines() if x.startswith(tuple(modes))]


@pytest.mark.parametrize(("name", "case"), [pytest.param(*case, id=case[0]) for case in cases()])
def test_loops_and_kernels(name, case):
    found = list(programs(name, case))
    assert [f"{name}, {mode}: {program}" for mode, program in found] == expected(name)
    for _, program in found:
        assert program.in_loops == ()
        if name.split(",")[0] not in OF_UNKNOWN_LENGTH:
            assert None not in [loop.steps for loop in program.loops]


if __name__ == "__main__":
    text = [line for case in cases() for line in lines(*case)]
    PROGRAMS.write_text("\n".join(text) + "\n")
