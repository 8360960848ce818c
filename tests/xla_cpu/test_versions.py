# SPDX-License-Identifier: MIT
"""The rules hold from the first version that they were measured with, also on the next one."""

import jax
import pytest

from rankax.core.hooks import NO_RULES
from rankax.ext.xla_cpu.rules import rules_of


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 2), (0, 12, 0), (0, 13, 0), (1, 0, 0)])
def test_a_new_jax_loses_no_rule(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert (rules_of({}) is not NO_RULES) == (version >= (0, 12))
