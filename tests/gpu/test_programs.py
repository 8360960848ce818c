# SPDX-License-Identifier: MIT
"""Loops and kernels a step of the calls of `benchmarks/program_cases.py`, on an H100.

``programs.txt`` has them, so that a change shows. To write it::

    PYTHONPATH=benchmarks python tests/gpu/test_programs.py

A loop is written as steps x kernels+copies; a copy is one of what a step reads of a stack, or
writes to it. ``?`` stands for a number of steps that the host asks for in each of them.
"""

from pathlib import Path

import pytest

from cases import compiled, modes, mostly_weekly, program_cases

PROGRAMS = Path(__file__).with_name("programs.txt")
# Items that end by themselves.
OF_UNKNOWN_LENGTH = "lockstep"
QUICK = {
    *("auto_vmap, uneven", "auto_vmap, keys", "chunked_vmap, even", "chunked_vmap, eigh"),
    *("chunked_reduce, sum", "where, mean", "lockstep, map", "jacobian, jacfwd, gram"),
    "scan, sliced",
}


CASES = {name: case for name, *case in program_cases()}


def listed(name, mode, program):
    return f"{name}, {mode}: {program}"


@pytest.mark.parametrize("name", mostly_weekly(CASES, QUICK))
def test_loops_and_kernels(name):
    fun, args = CASES[name]
    expected = PROGRAMS.read_text().splitlines()
    for mode, call in modes(name, fun, args):
        program = compiled(call, *args)
        assert listed(name, mode, program) in expected
        assert program.collectives == program.host_copies == 0
        assert program.has_unknown_steps == name.startswith(OF_UNKNOWN_LENGTH)


def test_the_list_has_nothing_else():
    lines = PROGRAMS.read_text().splitlines()
    assert {line.partition(":")[0].rpartition(",")[0] for line in lines} == CASES.keys()


if __name__ == "__main__":
    found = [
        listed(name, mode, compiled(call, *args))
        for name, (fun, args) in CASES.items()
        for mode, call in modes(name, fun, args)
    ]
    PROGRAMS.write_text("\n".join(found) + "\n")
