# SPDX-License-Identifier: MIT
"""The pages "Coming from ...": what they compute is what a loop over the items computes."""

import doctest
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rankax import Ragged
from test_docs import missing, runnable

# ASE 3.29, with NumPy 2.5.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting the shape on a NumPy array:DeprecationWarning"
)

FOLDER = Path(__file__).parents[1] / "coming"
PAGES = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != "index")


@functools.cache
def page(name, end="\n## Side by side\n"):
    """What the examples of a page define, by default before they compare memory."""
    path = FOLDER / f"{name}.md"
    if missing(path):
        pytest.skip(f"{', '.join(missing(path))}: in the docs environment only")
    defined, _ = path.read_text(encoding="utf-8").split(end)
    space = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in doctest.DocTestParser().get_examples(runnable(defined)):
            exec(example.source, space)
    return space


@pytest.fixture(autouse=True)
def _as_users():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def assert_same(got, want, rtol=1e-4):
    """Compare with a loop, whose items must differ."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.ptp(other) > 1e-3
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("name", PAGES)
def test_each_page_has_the_four_parts(name):
    heads = re.findall(r"(?m)^## (.*)$", (FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    assert heads[:3] == ["Today", "With rankax", "Side by side"]
    assert re.fullmatch(r"Where .* (is|are) better", heads[3])
    assert len(heads) == 4


def test_flax_and_optax():
    here = page("flax_optax")
    xs, labels, params = here["xs"][:7], here["labels"][:7], here["params"]
    one = jax.jit(lambda params, x, label: here["clip"](jax.grad(here["loss"])(params, x, label)))
    each = [one(params, x, label) for x, label in zip(xs, labels, strict=True)]
    want = jax.tree.map(lambda *leaves: sum(leaves), *each)
    norms = [here["optax"].tree.norm(gradient) for gradient in each]
    assert max(norms) == pytest.approx(1, rel=1e-4)  # some are clipped
    assert_same(here["clipped"](params, xs, labels), want)
    assert_same(here["stored"](params, xs, labels), jax.tree.leaves(want))


def test_diffrax_and_optimistix():
    here = page("diffrax_optimistix")
    some, one = np.array([0, 57, 120, 199]), jax.jit(here["oscillator"])
    want = jax.tree.map(lambda *leaves: np.stack(leaves), *[one(here["mu"][i]) for i in some])
    assert_same(jax.tree.map(lambda leaf: leaf[some], here["here"]), want, rtol=1e-3)
    E, mean = here["found"]["E"], jnp.linspace(0, 3, 50)[:, None]
    e = jnp.array([0.1, 0.5, 0.9])
    np.testing.assert_allclose(E - e * jnp.sin(E), jnp.broadcast_to(mean, E.shape), atol=1e-5)
    assert np.ptp(here["found"]["steps"]) > 0


def test_numpyro_and_blackjax():
    here = page("numpyro_blackjax", "\nA chain of BlackJAX ")  # the page compares the chains
    draws, y = here["draws"], np.asarray(here["y"][:9], float)
    mean, spread = (np.asarray(draws[name], float)[:, None] for name in ("mean", "spread"))
    z = (y - mean) / spread
    density = (1 + z**2 / 4) ** -2.5 * 3 / 8 / spread  # of Student's t with 4 degrees of freedom
    assert_same(here["by_rankax"](draws, here["y"][:9]), np.log(density.mean(axis=0)))


def test_netket_and_desc():
    here = page("netket_desc")
    weights, spins = here["weights"], here["spins"][:5]
    one = jax.jit(jax.value_and_grad(here["log_psi"]))
    each = [one(weights, s) for s in spins]
    assert_same(here["mapped"](weights, spins), jnp.stack([value for value, _ in each]))
    want = jax.tree.map(lambda *leaves: sum(leaves), *[slope for _, slope in each])
    assert_same(here["gradient"](here["mapped"])(weights, spins), want)
    rows = [
        jax.flatten_util.ravel_pytree(jax.grad(here["log_psi"])(here["few"], s))[0] for s in spins
    ]
    rows = np.stack(rows)
    assert_same(here["tensor"](here["few"], spins), rows.T @ rows)


def test_jax_md_and_ase():
    here = page("jax_md_ase")
    want = []
    for atoms in here["molecules"]:
        distances = atoms.get_all_distances()[np.triu_indices(len(atoms), 1)]
        want.append(np.sum(4 * (distances**-12.0 - distances**-6.0)))
    assert_same(here["energy"](here["x"]), np.array(want))


def test_rows_and_programs_of_ragged_molecules():
    here = page("jax_md_ase")
    text = (FOLDER / "jax_md_ase.md").read_text(encoding="utf-8")
    lengths = here["x"].lengths
    shown = {
        "each molecule by itself": (int(lengths.sum()), len({*lengths.tolist()})),
        "filled up to 14 atoms": (len(lengths) * int(lengths.max()), 1),
    }
    for name, jit in {"`Ragged`": False, "`Ragged`, `jit=True`": True}.items():
        plan = str(here["energy"].with_options(jit=jit).plan(here["x"]))
        parts = re.findall(r"(\d+) rows?: axis 0: vmap over (\d+)", plan)
        shown[name] = sum(int(rows) * int(items) for rows, items in parts), len(parts)
    for name, (rows, programs) in shown.items():
        assert re.search(rf"(?m)^\| {re.escape(name)} \| {rows} \| {programs}\b", text), name
    assert isinstance(here["x"], Ragged)


def test_ott_and_keops():
    here = page("ott_keops")
    x, y = np.asarray(here["x"], float), np.asarray(here["y"], float)
    costs = ((x[:, None] - y) ** 2).sum(-1)
    g = np.zeros(len(y))
    for _ in range(100):
        f = 0.1 * (np.log(len(y)) - np.log(np.exp((g - costs) / 0.1).sum(axis=1)))
        g = 0.1 * (np.log(len(x)) - np.log(np.exp((f[:, None] - costs) / 0.1).sum(axis=0)))
    f = 0.1 * (np.log(len(y)) - np.log(np.exp((g - costs) / 0.1).sum(axis=1)))
    assert here["value"] == pytest.approx(f.mean() + g.mean(), rel=1e-5)
    plan = np.exp((f[:, None] + g - costs) / 0.1) / x.shape[0] / y.shape[0]
    slope = 2 * np.sum(plan[..., None] * (x[:, None] - y), axis=1)
    assert_same(here["slope"], slope, rtol=1e-3)


def test_equinox():
    here = page("equinox")
    model = jax.tree.map(
        lambda leaf: leaf[3] if here["eqx"].is_array(leaf) else leaf, here["models"]
    )
    want = jnp.stack([model(x) for x in here["x"][:9]])
    assert_same(here["predict"](here["rows"], here["x"][:9])[3], want)


def test_xarray_and_dask():
    here = page("xarray_dask")
    t = np.arange(120.0) - np.arange(120.0).mean()
    want = np.tensordot(t, here["values"].astype(float), axes=1) / (t @ t)
    assert_same(here["by_rankax"].values, want)


def test_torch_func():
    here = page("torch_func")
    x, key = here["x"][:6], here["key"]
    keys = jax.random.split(key, len(here["x"]))[:6]
    each = [
        jax.value_and_grad(here["energy"])(here["weights"], row, key)
        for row, key in zip(x, keys, strict=True)
    ]
    whole = here["mapped"](here["weights"], here["x"], key)
    assert_same(whole[:6], jnp.stack([value for value, _ in each]))
    slopes = here["gradients"](here["weights"], here["x"], key)
    assert_same(slopes[:6], jnp.stack([slope for _, slope in each]))


def test_numpy_and_numba():
    here = page("numpy_numba")
    x, y = here["x"], here["y"]
    want = np.array([[here["gap"](row[0], other) for other in y[:9]] for row in x[:4]])
    assert_same(here["by_rankax"](x[:4], y[:9]), want)
    assert_same(here["by_numba"](x[:4], y[:9]), want)


def test_laplacians_are_those_of_each_sample():
    space = page("folx_asdex")
    want = [jnp.trace(jax.hessian(space["log_psi"])(x)) for x in space["samples"][:4]]
    for way in ("by_rankax", "by_hessian", "forward_over_reverse"):
        assert_same(space[way](space["samples"][:4]), jnp.stack(want), rtol=1e-3)
