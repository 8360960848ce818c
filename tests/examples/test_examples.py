# SPDX-License-Identifier: MIT
"""The programs in ``examples/``: their kernels against other methods, and what they write."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from matplotlib.image import imread

import cluster
import planets
import rays


@pytest.fixture
def x64_off_again():
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def x64(x64_off_again):
    jax.config.update("jax_enable_x64", True)


# Planets.


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_position_is_as_near_to_astropy_as_the_table_allows():
    t = np.linspace(-2, 0.5, 1001)
    ours = np.asarray(planets.position(planets.ELEMENTS[:, None], t))
    error = planets.angle(ours, planets.astropy_position(t))
    # Largest angles over 20001 times. Against JPL's DE421, which is far better than either, the
    # table has nearly the same: 32, 28, 23, 101, 516, 739, 113 and 60 arcseconds after 1900.
    assert np.all(error.max(axis=1) < [31, 28, 25, 104, 516, 657, 148, 66])
    rms = np.sqrt(np.mean(error**2, axis=1))
    assert np.all(rms[:6] < planets.NOMINAL[:6])


@pytest.mark.weekly
@pytest.mark.usefixtures("x64_off_again")
def test_planets_main_prints_its_check_and_draws(tmp_path, capsys):
    planets.main(out=tmp_path, times=101)
    printed = capsys.readouterr().out
    assert "position" in printed.splitlines()[0]
    for name, nominal in zip(planets.PLANETS, planets.NOMINAL, strict=True):
        largest, rms, published, _ = re.search(rf"(?m)^{name} +(.*)$", printed)[1].split()
        assert 0 < float(rms) < float(largest) < 700
        assert int(published) == nominal
    assert jax.config.jax_enable_x64
    picture = imread(tmp_path / "planets.png")
    half = picture.shape[1] // 2
    for panel in (picture[:, :half], picture[:, half:]):
        assert len(np.unique(panel.reshape(-1, panel.shape[-1]), axis=0)) > 100  # colours


# Rays.


def test_hit_of_rays_worked_out_by_hand():
    triangle = np.float32([[0, 0, 2], [1, 0, 2], [0, 1, 2]])
    origin = np.float32([[0.2, 0.3, 0], [0.2, 0.3, 3], [0.7, 0.7, 0], [0.2, 0.3, 2]])
    up = np.float32([0, 0, 1])
    white = np.ones(3, np.float32)

    def distance(origin, direction, triangle):
        return rays.hit(origin, direction, triangle, white)["distance"]

    # Hit, behind the origin, past the edge, and starting on the triangle.
    np.testing.assert_array_equal(distance(origin, up, triangle), [2, np.inf, np.inf, np.inf])
    # The distance is counted in lengths of the direction; the triangle has no back.
    assert distance(origin[0], up / 2, triangle) == 4
    assert distance(origin[0], up, triangle[::-1]) == 2
    # Along the triangle's plane, and a triangle without area.
    assert distance(origin[3], np.float32([1, 0, 0]), triangle) == np.inf
    assert distance(origin[0], up, triangle[[0, 0, 1]]) == np.inf
    np.testing.assert_array_equal(rays.hit(origin, up, triangle, white)["normal"][0], [0, 0, 1])


def test_hit_of_points_chosen_on_triangles():
    """Of half of them the point is past the third edge."""
    rng = np.random.default_rng(1)
    triangle = np.float32(rng.normal(size=(40, 3, 3)))
    u, v = np.float32(rng.uniform(size=(2, 40, 1)))
    t, direction = np.float32(rng.uniform(1, 2, (40, 1))), np.float32(rng.normal(size=(40, 3)))
    a, b, c = np.moveaxis(triangle, 1, 0)
    point = a + u * (b - a) + v * (c - a)
    got = rays.hit(point - t * direction, direction, triangle, np.ones_like(a))["distance"]
    np.testing.assert_allclose(got, np.where(u + v <= 1, t, np.inf)[:, 0], rtol=1e-3)


def test_shade_of_a_lamp_above_with_a_roof_over_one_pixel():
    floor = np.float32([[[-9, -9, 0], [9, -9, 0], [0, 9, 0]]])
    roof = np.float32([[[1, -1, 1], [3, -1, 1], [2, 1, 1]]])
    mesh, eye = np.concatenate([floor, roof]), np.float32([0, 0, 0.5])
    lamp = np.float32([0, 0.6, 0.8])
    pixels = np.float32([[[0, 0, -1], [0.9701425, 0, -0.2425356]]])  # down, and under the roof
    color = np.float32([[1, 0, 0], [0, 1, 0]])
    found = rays.nearest(eye, pixels[:, :, None], mesh, color)
    np.testing.assert_array_equal(found["color"], [[[1, 0, 0], [1, 0, 0]]])
    brightness = rays.shade(eye, pixels, found, mesh, lamp)
    np.testing.assert_allclose(brightness, [[0.25 + 0.75 * 0.8, 0.25]], rtol=1e-6)


@pytest.mark.optimized
def test_the_full_picture_stores_no_hits():
    """The sizes that ``rays.main`` prints; nothing is run."""
    scene = [
        jax.ShapeDtypeStruct(shape, np.float32)
        for shape in ((3,), (300, 400, 1, 3), (6402, 3, 3), (6402, 3))
    ]

    def needs(kernel):
        compiled = kernel.lower(*scene).compile().memory_analysis()
        return compiled.temp_size_in_bytes, compiled.output_size_in_bytes

    assert min(needs(rays.hit)) > 20e9
    assert max(needs(rays.nearest)) < 4e6


@pytest.mark.weekly
def test_rays_main_prints_its_memory_and_draws(tmp_path, capsys):
    rays.main(out=tmp_path, height=24, width=32)
    printed = capsys.readouterr().out
    assert "hit" in printed.splitlines()[0]
    table = re.findall(r"(?m)^(?:hit|nearest)[^:]*? +([\d.]+) +([\d.]+)(?:  not run)?$", printed)
    (whole, reduced) = [float(temporaries) for _, temporaries in table]
    # With an older JAX, a chunk of this small picture is not cut into tiles.
    assert reduced < whole / (100 if jax.__version_info__ >= (0, 12) else 50)
    picture = imread(tmp_path / "rays.png")
    half = picture.shape[1] // 2
    for panel in (picture[:, :half], picture[:, half:]):
        assert len(np.unique(panel.reshape(-1, panel.shape[-1]), axis=0)) > 100  # colours


# Two processes.


def test_the_potential_is_the_sum_over_all_charges():
    charges = cluster.own_charges(0, 80)
    _, points = cluster.line_of_points(5)
    distances = np.linalg.norm(np.float64(points)[:, None] - charges, axis=-1)
    found = cluster.coulomb(points[:, None], charges)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.sum(1 / distances, axis=1), rtol=1e-5)


@pytest.mark.slow
def test_two_processes_exchange_one_sum(capfd):
    cluster.main()
    lines = re.findall(r"(?m)^process (\d) of 2: (.*)$", capfd.readouterr().out)
    assert [number for number, _ in lines] == ["0", "1"]
    (said,) = {text for _, text in lines}  # both found the same
    assert said.startswith("500000 of 1000000 charges; sent: all-reduce; at the centre 1.")
    assert float(re.search(r"error (\S+)$", said)[1]) < 3e-3


@pytest.mark.slow
def test_tasks_of_slurm_find_each_other():
    """What `srun` would set for two tasks on this machine."""
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "JAX_COORDINATOR_PORT": str(cluster.free_port()),  # else made of the number of the job
        "JAX_PLATFORMS": "cpu",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, cluster.__file__, "join"],
            env={**os.environ, **job, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = [task.communicate(timeout=cluster.TIMEOUT)[0] for task in tasks]
    for number, text in enumerate(said):
        assert re.search(rf"(?m)^process {number} of 2: 500000 of .*: all-reduce;", text)


@pytest.mark.slow
def test_a_process_that_fails_is_reported(monkeypatch, tmp_path):
    (tmp_path / "rankax.py").write_text("raise ImportError('no such luck')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit, match="a process failed"):
        cluster.main()
