# SPDX-License-Identifier: MIT
"""Lineax, Optimistix, Diffrax and Equinox: their primitives and their rules of differentiation."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
import pytest

from clients import BATCH, check_against_vmap

MATRICES = jnp.sin(jnp.arange(BATCH * 9.0)).reshape(BATCH, 3, 3) + 3 * jnp.eye(3)
VECTORS = jnp.cos(jnp.arange(BATCH * 3.0)).reshape(BATCH, 3)
SCALARS = jnp.linspace(0.5, 2.0, BATCH)


forward_and_gradient = pytest.mark.parametrize(
    "gradient", [False, True], ids=["forward", "gradient"]
)


class TestLineax:
    @pytest.mark.parametrize(
        "solver", [lx.LU(), lx.GMRES(rtol=1e-6, atol=1e-6)], ids=["LU", "GMRES"]
    )
    @forward_and_gradient
    def test_linear_solve(self, solver, gradient):
        def solve(matrix, vector):
            return lx.linear_solve(lx.MatrixLinearOperator(matrix), vector, solver).value

        check_against_vmap(solve, (2, 1), MATRICES, VECTORS, gradient=gradient)


class TestOptimistix:
    @forward_and_gradient
    def test_root_find(self, gradient):
        def root(a, v):
            solver = optx.Newton(rtol=1e-6, atol=1e-6)
            found = optx.root_find(lambda y, _: y**3 + a * y - v, solver, jnp.ones(3))
            return {"root": found.value}

        check_against_vmap(root, (0, 1), SCALARS, VECTORS, gradient=gradient)

    @forward_and_gradient
    def test_minimise(self, gradient):
        def nearest(a, v):
            def cost(y, _):
                return jnp.sum((y - v) ** 2) + a * jnp.sum(y**4)

            solver, adjoint = optx.BFGS(rtol=1e-5, atol=1e-5), optx.ImplicitAdjoint()
            return optx.minimise(cost, solver, jnp.zeros(3), adjoint=adjoint).value

        check_against_vmap(nearest, (0, 1), SCALARS, VECTORS, gradient=gradient, rtol=5e-3)


def pendulum(adjoint, **options):
    def run(frequency, start):
        def field(t, y, w):
            return jnp.stack([y[1], -w * jnp.sin(y[0]), -y[2]])

        term, times = diffrax.ODETerm(field), {"t0": 0.0, "t1": 1.0, "dt0": 0.1}
        solved = diffrax.diffeqsolve(
            term,
            diffrax.Tsit5(),
            y0=start,
            args=frequency,
            adjoint=adjoint,
            max_steps=64,
            **times,
            **options,
        )
        return solved.ys[-1]

    return run


ADAPTIVE = {"stepsize_controller": diffrax.PIDController(rtol=1e-4, atol=1e-4)}


class TestDiffrax:
    @pytest.mark.parametrize("options", [{}, ADAPTIVE], ids=["constant", "adaptive"])
    @forward_and_gradient
    def test_recursive_checkpoint_adjoint(self, options, gradient):
        run = pendulum(diffrax.RecursiveCheckpointAdjoint(), **options)
        check_against_vmap(run, (0, 1), SCALARS, VECTORS, gradient=gradient)

    @forward_and_gradient
    def test_direct_adjoint(self, gradient):
        run = pendulum(diffrax.DirectAdjoint())
        check_against_vmap(run, (0, 1), SCALARS, VECTORS, gradient=gradient)

    @forward_and_gradient
    def test_backsolve_adjoint(self, gradient):
        run = pendulum(diffrax.BacksolveAdjoint())
        check_against_vmap(run, (0, 1), SCALARS, VECTORS, gradient=gradient)

    @forward_and_gradient
    def test_implicit_adjoint(self, gradient):
        """The steady state of a relaxation, which an event of Diffrax ends."""

        def steady(rate, target):
            def field(t, y, args):
                rate, target = args
                return rate * (target - y - 0.1 * y**3)

            solved = diffrax.diffeqsolve(
                diffrax.ODETerm(field),
                diffrax.Tsit5(),
                t0=0.0,
                t1=jnp.inf,
                dt0=0.1,
                y0=jnp.zeros(3),
                args=(rate, target),
                stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
                event=diffrax.Event(diffrax.steady_state_event(rtol=1e-4, atol=1e-4)),
                adjoint=diffrax.ImplicitAdjoint(),
                max_steps=512,
            )
            return solved.ys[-1]

        check_against_vmap(steady, (0, 1), SCALARS, VECTORS, gradient=gradient, rtol=1e-3)


class TestEquinox:
    MODEL = eqx.nn.MLP(3, 2, width_size=5, depth=2, key=jax.random.key(0))

    @forward_and_gradient
    def test_filter_checkpoint(self, gradient):
        def apply(scale, vector):
            return eqx.filter_checkpoint(self.MODEL)(scale * vector)

        check_against_vmap(apply, (0, 1), SCALARS, VECTORS, gradient=gradient)

    @pytest.mark.parametrize(
        ("kind", "gradient"), [("lax", False), ("checkpointed", False), ("checkpointed", True)]
    )
    def test_while_loop(self, kind, gradient):
        """Equinox's own loop; the checkpointed kind has a reverse mode."""

        def doubled(scale, vector):
            def unfinished(carry):
                return jnp.sum(carry**2) < 50

            return eqx.internal.while_loop(
                unfinished, lambda y: y * (1 + scale), vector, kind=kind, max_steps=16
            )

        check_against_vmap(doubled, (0, 1), SCALARS, VECTORS, gradient=gradient)
