# SPDX-License-Identifier: MIT
"""``benchmarks/gpu.py``, which nobody can run without a GPU, at sizes for a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.weekly
def test_the_first_minutes_on_a_gpu_at_small_sizes():
    run = subprocess.run(
        [sys.executable, str(PROGRAM), "--small"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    tables = run.stdout.split("\n\n| ")[1:]
    assert run.stdout.startswith("Reductions over 100,000 x 100,000 pairs, in ms\n")
    rows = [len(re.findall(r"^\|", table, re.MULTILINE)) - 1 for table in tables]
    assert rows == [4, 1, 1, 2, 4, 30]
    # Every time is a positive number: all programs ran, and none was out of memory.
    assert "nan" not in run.stdout
    pairs = re.findall(r"\| (?:forward|gradient) ((?:\| [\d.]+ ){4})\|", tables[0])
    assert len(pairs) == 4
    assert all(float(ms) > 0 for row in pairs for ms in row.strip("| ").split("|"))
