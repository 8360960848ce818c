# SPDX-License-Identifier: MIT
"""What the tests of streams share: small blocks, and processes that have imported JAX."""

import multiprocessing

import pytest


@pytest.fixture
def few_blocks(monkeypatch):
    """Let 300 items be 16 blocks of 19, not 100 of 3."""
    monkeypatch.setattr("rankax.stream._job._LEAST", 12)


@pytest.fixture
def out(tmp_path):
    """Where a run stores its results."""
    return tmp_path / "a.zarr"


@pytest.fixture(scope="module")
def processes():
    """Start processes that have imported JAX."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stream_child"])
    return context
