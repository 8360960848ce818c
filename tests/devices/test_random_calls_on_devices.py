# SPDX-License-Identifier: MIT
"""Random calls and programs on all devices."""

from __future__ import annotations

import dataclasses
import os

import pytest

import random_calls
from fuzz import programs
from sharding import naming, on

COUNT = int(os.environ.get("RANKAX_PROGRAMS", "12"))


@on("Auto")
def test_random_calls_with_other_options(mesh):
    for seed in range(3):  # a few at each run
        random_calls.check(seed)


@pytest.mark.weekly
@on("Auto")
def test_many_random_calls_with_other_options(mesh):
    seeds = range(3, 3 + 2 * COUNT)
    assert sum(random_calls.check(seed) for seed in seeds) > len(seeds) // 2


@pytest.mark.weekly
@on("Auto")
def test_random_programs_on_all_devices(mesh):
    drawn = (programs.draw(seed) for seed in range(5 * COUNT))
    maps = [program for program in drawn if program.caller.endswith("_vmap")]
    for program in maps[:COUNT]:
        with naming(program):
            dataclasses.replace(program, options=program.options | {"devices": "all"}).check()
