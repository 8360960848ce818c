# SPDX-License-Identifier: MIT
"""Random programs on all devices, against plain JAX on one."""

import dataclasses
import os

import pytest

from fuzz import programs
from helpers import weekly
from sharding import naming, on

COUNT = int(os.environ.get("RANKAX_PROGRAMS", "12"))


@pytest.mark.parametrize(
    ("kind", "count"),
    [("pairs", 3), weekly("pairs", 2 * COUNT), weekly("calls", COUNT), weekly("lanes", COUNT)],
)
@on("Auto")
def test_random_programs_on_all_devices(mesh, kind, count):
    drawn = (programs.draw(seed, kind) for seed in range(5 * count))
    maps = [program for program in drawn if program.caller in ("auto_vmap", "chunked_vmap")]
    for program in maps[:count]:
        with naming(program):
            dataclasses.replace(program, options=program.options | {"devices": "all"}).check()
