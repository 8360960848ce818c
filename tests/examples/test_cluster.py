# SPDX-License-Identifier: MIT
"""``examples/cluster.py``: its sum over devices, its formula, and two processes of it."""

import re

import numpy as np
import pytest

import cluster


def test_the_potential_is_the_sum_over_all_charges():
    charges = cluster.own_charges(0, 80)
    _, points = cluster.line_of_points(5)
    distances = np.linalg.norm(np.float64(points)[:, None] - charges, axis=-1)
    found = cluster.coulomb(points[:, None], charges)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.sum(1 / distances, axis=1), rtol=1e-5)


def test_charges_fill_the_ball_evenly():
    charges = cluster.own_charges(1, 20_000)
    radii = np.linalg.norm(charges, axis=1)
    shares = [np.mean(radii <= share ** (1 / 3)) for share in (0.25, 0.5, 0.75, 1.0001)]
    np.testing.assert_allclose(shares, [0.25, 0.5, 0.75, 1], atol=0.02)
    np.testing.assert_allclose(charges.mean(0), 0, atol=0.02)
    assert not np.array_equal(charges, cluster.own_charges(0, 20_000))


def test_the_closed_form_is_that_of_shells():
    """Each shell counts as 1 over the larger one of its radius and the distance."""
    radii = (np.arange(20_000) + 0.5) / 20_000
    away = np.array([0, 0.3, 0.99, 1.01, 2.5])
    shells = np.mean(3 * radii**2 / np.maximum(radii, away[:, None]), axis=1)
    np.testing.assert_allclose(cluster.in_closed_form(away), shells, rtol=1e-6)


@pytest.mark.slow
def test_two_processes_exchange_one_sum(capfd):
    cluster.main()
    lines = re.findall(r"(?m)^process (\d) of 2: (.*)$", capfd.readouterr().out)
    assert [number for number, _ in lines] == ["0", "1"]
    (said,) = {text for _, text in lines}  # both found the same
    assert said.startswith("500000 of 1000000 charges; sent: all-reduce; at the centre 1.")
    assert float(re.search(r"error (\S+)$", said)[1]) < 3e-3


@pytest.mark.slow
def test_a_process_that_fails_is_reported(monkeypatch, tmp_path):
    (tmp_path / "rankax.py").write_text("raise ImportError('no such luck')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit, match="a process failed"):
        cluster.main()
