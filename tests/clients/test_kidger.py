# SPDX-License-Identifier: MIT
"""Lineax, Optimistix, Diffrax and Equinox: their primitives and their rules of differentiation."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
import pytest

from clients import BATCH, SCALARS, check_against_vmap, forward_and_gradient
from rankax import auto_vmap

VECTORS = jnp.cos(jnp.arange(BATCH * 3.0)).reshape(BATCH, 3)


def linear_solve(solver):
    def solve(a, v):
        matrix = a * jnp.sin(jnp.arange(9.0)).reshape(3, 3) + 3 * jnp.eye(3)
        return lx.linear_solve(lx.MatrixLinearOperator(matrix), v, solver).value

    return solve


def root(a, v):
    solver = optx.Newton(rtol=1e-6, atol=1e-6)
    return {"root": optx.root_find(lambda y, _: y**3 + a * y - v, solver, jnp.ones(3)).value}


def nearest(a, v):
    def cost(y, _):
        return jnp.sum((y - v) ** 2) + a * jnp.sum(y**4)

    solver, adjoint = optx.BFGS(rtol=1e-5, atol=1e-5), optx.ImplicitAdjoint()
    return optx.minimise(cost, solver, jnp.zeros(3), adjoint=adjoint).value


def pendulum(adjoint, **options):
    def run(frequency, start):
        def field(t, y, w):
            return jnp.stack([y[1], -w * jnp.sin(y[0]), -y[2]])

        solved = diffrax.diffeqsolve(
            *(diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.1, start, frequency),
            adjoint=adjoint,
            max_steps=64,
            **options,
        )
        return solved.ys[-1]

    return run


ADAPTIVE = {"stepsize_controller": diffrax.PIDController(rtol=1e-4, atol=1e-4)}


MODEL = eqx.nn.MLP(3, 2, width_size=5, depth=2, key=jax.random.key(0))


def checkpointed(scale, v):
    return eqx.filter_checkpoint(MODEL)(scale * v)


def doubled(scale, v):
    """Equinox's own loop, which has a reverse mode."""
    options = {"kind": "checkpointed", "max_steps": 16}
    return eqx.internal.while_loop(
        lambda y: jnp.sum(y**2) < 50, lambda y: y * (1 + scale), v, **options
    )


# Functions of a number and a vector, and how near their results must be.
PROGRAMS = {
    "Lineax, LU": (linear_solve(lx.LU()), 2e-4),
    "Lineax, GMRES": (linear_solve(lx.GMRES(rtol=1e-6, atol=1e-6)), 2e-4),
    "Optimistix, root_find": (root, 2e-4),
    "Optimistix, minimise": (nearest, 5e-3),
    "Diffrax, recursive": (pendulum(diffrax.RecursiveCheckpointAdjoint()), 2e-4),
    "Diffrax, adaptive": (pendulum(diffrax.RecursiveCheckpointAdjoint(), **ADAPTIVE), 2e-4),
    "Diffrax, direct": (pendulum(diffrax.DirectAdjoint()), 2e-4),
    "Diffrax, backsolve": (pendulum(diffrax.BacksolveAdjoint()), 2e-4),
    "Equinox, filter_checkpoint": (checkpointed, 2e-4),
    "Equinox, checkpointed loop": (doubled, 2e-4),
}


@pytest.mark.parametrize("name", PROGRAMS)
@forward_and_gradient
def test_values_and_gradients(name, gradient):
    fun, rtol = PROGRAMS[name]
    check_against_vmap(fun, (0, 1), SCALARS, VECTORS, gradient=gradient, rtol=rtol)


# Implicit solvers on devices.


def solved(c):
    solver = optx.Newton(rtol=1e-6, atol=1e-6)
    return optx.root_find(lambda x, c: x**2 - c, solver, 1.0, args=c, throw=False).value


C = jnp.linspace(0.5, 4.0, 8)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}])
def test_implicit_solvers_are_differentiated_on_devices(options):
    slopes = auto_vmap(0, devices=1, **options)(jax.grad(solved))(C)
    assert jnp.allclose(slopes, 0.5 / jnp.sqrt(C), rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}, {"lockstep": False}])
def test_implicit_solvers_that_are_differentiated_from_outside(options):
    """A plain `jax.shard_map` cannot: Equinox compares types, which name the mesh there."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    plain = jax.shard_map(
        jax.vmap(solved), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"), check_vma=False
    )
    with pytest.raises(ValueError, match="Closure-converted function called with different"):
        jax.grad(lambda c: plain(c).sum())(C)
    kernel = auto_vmap(0, devices=1, **options)(solved)
    assert jnp.allclose(kernel(C), jnp.sqrt(C), rtol=1e-5)
    slopes = jax.grad(lambda c: kernel(c).sum())(C)
    assert jnp.allclose(slopes, 0.5 / jnp.sqrt(C), rtol=1e-5)


def decayed(c):
    term = diffrax.ODETerm(lambda t, y, c: -c * y)
    steps = diffrax.PIDController(rtol=1e-5, atol=1e-5)
    solution = diffrax.diffeqsolve(
        term, diffrax.Tsit5(), 0, 1, 0.1, jnp.float32(1), c, stepsize_controller=steps
    )
    return solution.ys[0]


@pytest.mark.parametrize("options", [{}, {"chunk_size": 3}])
def test_a_differential_equation_on_devices_from_outside(options):
    kernel = auto_vmap(0, devices=1, **options)(decayed)
    slopes = jax.jit(jax.grad(lambda c: kernel(c).sum()))(C)
    assert jnp.allclose(slopes, -jnp.exp(-C), rtol=1e-3)
