# SPDX-License-Identifier: MIT
"""The rules for XLA on a CPU hold for all tests of this folder, whatever the environment says."""

import pytest

import rankax
from rankax._options import Options
from rankax.core.protocols import NO_RULES


@pytest.fixture(autouse=True)
def _rules():
    if Options(xla_cpu=True).rules is NO_RULES:
        pytest.skip("the rules are for XLA on a CPU")
    with rankax.options(xla_cpu=True):
        yield
