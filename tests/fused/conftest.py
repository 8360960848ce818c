# SPDX-License-Identifier: MIT
"""What tests of fused kernels share."""

import pytest


@pytest.fixture
def kernels_of_three_inputs(monkeypatch):
    """Refuse kernels of more inputs, as those of derivatives have."""
    from rankax.ext.fused import fold

    written = fold.FusedFold.kernel.func

    def few(self):
        if len(self.item.in_avals) > 3:
            raise fold.Refused("a test")
        return written(self)

    monkeypatch.setattr(fold.FusedFold, "kernel", property(few))
