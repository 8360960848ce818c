# SPDX-License-Identifier: MIT
"""NumPyro, BlackJAX, tinygp and e3nn: models, a sampler, Gaussian processes, equivariant maps."""

import blackjax
import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
import tinygp

from clients import BATCH, SCALARS, check_against_vmap, forward_and_gradient

DATA = jnp.cos(jnp.arange(BATCH * 5.0)).reshape(BATCH, 5)


def model(scale, data):
    mean = numpyro.sample("mean", dist.Normal(0.0, scale))
    spread = numpyro.sample("spread", dist.HalfNormal(scale))
    with numpyro.plate("items", data.shape[0]):
        numpyro.sample("data", dist.StudentT(4.0, mean, spread), obs=data)


def log_density(scale, data):
    values = {"mean": data.mean(), "spread": jnp.exp(data[0])}
    return numpyro.infer.util.log_density(model, (scale, data), {}, values)[0]


def potential(scale, data):
    seeded = numpyro.handlers.seed(model, jax.random.key(7))
    trace = numpyro.handlers.trace(seeded).get_trace(scale, data)
    drawn = {name: trace[name]["value"] for name in ("mean", "spread")}
    free = {"mean": drawn["mean"], "spread": jnp.log(drawn["spread"])}
    energy = numpyro.infer.util.potential_energy(model, (scale, data), {}, free)
    return {"drawn": drawn, "energy": energy}


def chain(scale, data, seed=3, steps=3):
    """A short chain of HMC: the mean and spread of ``data``, and what the sampler reports."""

    def log_density(position):
        spread = jnp.exp(position[1])
        prior = dist.Normal(0.0, scale).log_prob(position).sum()
        return prior + dist.Normal(position[0], spread).log_prob(data).sum()

    sampler = blackjax.hmc(log_density, 0.1, jnp.ones(2), 4)

    def step(state, key):
        state, info = sampler.step(key, state)
        return state, (state.position, info.acceptance_rate)

    keys = jax.random.split(jax.random.key(seed), steps)
    return jax.lax.scan(step, sampler.init(jnp.zeros(2)), keys)[1]


def process(scale, data):
    times = jnp.linspace(0.0, 3.0, 5)
    kernel = scale**2 * tinygp.kernels.Matern32(scale=scale)
    log_probability, given = tinygp.GaussianProcess(kernel, times, diag=0.1).condition(
        data, times[:3] + 0.1
    )
    return {"log_probability": log_probability, "mean": given.loc}


def tensor_product(scale, data):
    points = jnp.sin(data[:4, None] + jnp.arange(12.0).reshape(4, 3))
    harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", scale * points, normalize=False)
    pairs = e3nn.tensor_product(harmonics[0], e3nn.sum(harmonics, axis=0))
    return pairs.filter(keep="0e + 1o")


@pytest.mark.parametrize("fun", [log_density, potential, chain, process, tensor_product])
@forward_and_gradient
def test_values_and_gradients(fun, gradient):
    check_against_vmap(fun, (0, 1), SCALARS, DATA, gradient=gradient)
