# SPDX-License-Identifier: MIT
"""Programs for GPUs that are not here: ``tox -e gpu`` installs what compiles for them."""

import importlib.util
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

# Without the compiler there is nothing to read, as in the environments without CUDA.
HAS_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None
collect_ignore_glob = [] if HAS_COMPILER else ["*.py"]
