# SPDX-License-Identifier: MIT
"""NumPyro, BlackJAX, tinygp and e3nn: models, a sampler, Gaussian processes, equivariant maps."""

import functools

import blackjax
import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import tinygp

from clients import BATCH, SCALARS, check_against_vmap, forward_and_gradient

DATA = jnp.cos(jnp.arange(BATCH * 5.0)).reshape(BATCH, 5)


class TestNumPyro:
    @staticmethod
    def model(scale, data):
        mean = numpyro.sample("mean", dist.Normal(0.0, scale))
        spread = numpyro.sample("spread", dist.HalfNormal(scale))
        with numpyro.plate("items", data.shape[0]):
            numpyro.sample("data", dist.StudentT(4.0, mean, spread), obs=data)

    @forward_and_gradient
    def test_log_density(self, gradient):
        def log_density(scale, data):
            values = {"mean": data.mean(), "spread": jnp.exp(data[0])}
            return numpyro.infer.util.log_density(self.model, (scale, data), {}, values)[0]

        check_against_vmap(log_density, (0, 1), SCALARS, DATA, gradient=gradient)

    @forward_and_gradient
    def test_potential_of_a_seeded_model(self, gradient):
        def potential(scale, data):
            seeded = numpyro.handlers.seed(self.model, jax.random.key(7))
            trace = numpyro.handlers.trace(seeded).get_trace(scale, data)
            drawn = {name: trace[name]["value"] for name in ("mean", "spread")}
            free = {"mean": drawn["mean"], "spread": jnp.log(drawn["spread"])}
            energy = numpyro.infer.util.potential_energy(self.model, (scale, data), {}, free)
            return {"drawn": drawn, "energy": energy}

        check_against_vmap(potential, (0, 1), SCALARS, DATA, gradient=gradient)


class TestBlackJAX:
    @staticmethod
    def chain(scale, data, seed, steps=8):
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

    def test_chain_for_each_item(self):
        seeds = jnp.arange(BATCH)
        check_against_vmap(self.chain, (0, 1, 0), SCALARS, DATA, seeds)

    def test_gradient_through_a_chain(self):
        chain = functools.partial(self.chain, seed=3, steps=3)
        check_against_vmap(chain, (0, 1), SCALARS, DATA, gradient=True)


class TestTinygp:
    @forward_and_gradient
    def test_log_probability_and_prediction(self, gradient):
        times = jnp.linspace(0.0, 3.0, 5)

        def fit(scale, data):
            kernel = scale**2 * tinygp.kernels.Matern32(scale=scale)
            process = tinygp.GaussianProcess(kernel, times, diag=0.1)
            log_probability, given = process.condition(data, times[:3] + 0.1)
            return {"log_probability": log_probability, "mean": given.loc}

        check_against_vmap(fit, (0, 1), SCALARS, DATA, gradient=gradient)


class TestE3nn:
    @forward_and_gradient
    def test_tensor_product_of_spherical_harmonics(self, gradient):
        points = jnp.sin(1 + jnp.arange(BATCH * 12.0)).reshape(BATCH, 4, 3)

        def features(scale, points):
            harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", scale * points, normalize=False)
            pairs = e3nn.tensor_product(harmonics[0], e3nn.sum(harmonics, axis=0))
            return pairs.filter(keep="0e + 1o")

        check_against_vmap(features, (0, 2), SCALARS, points, gradient=gradient)
