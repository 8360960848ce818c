# SPDX-License-Identifier: MIT
"""Kernels of pairs, of physics, geometry and statistics: a point, another one, and its weight."""

import jax
import jax.numpy as jnp
from jax import lax


def far(x, y):
    """Return the squared distance, which is never 0."""
    d = x - y
    return d @ d + 0.1


def norm(x, y):
    return jnp.sqrt(far(x, y))


# Physics.


def gravity(x, y, w):
    d = y - x
    return w * d * lax.rsqrt(d @ d + 1e-2) ** 3


def coulomb(x, y, w):
    return w / norm(x, y)


def lennard_jones(x, y, w):
    r2 = far(x, y) + 1
    s = jnp.where(r2 < 4.0, 1 / r2, 0.0) ** 3
    return w * (s * s - s)


def morse(x, y, w):
    return w * (1 - jnp.exp(-(norm(x, y) - 1))) ** 2


def yukawa(x, y, w):
    return w * jnp.exp(-norm(x, y)) / norm(x, y)


def buckingham(x, y, w):
    return w * jnp.exp(-2 * norm(x, y)) - 1 / far(x, y) ** 3


def dipoles(x, y, w):
    d = x - y
    r = norm(x, y)
    return w * ((x @ y) / r**3 - 3 * (x @ d) * (y @ d) / r**5)


def stokeslet(x, y, w):
    d, r = x - y, norm(x, y)
    return (jnp.eye(3) / r + jnp.outer(d, d) / r**3) @ (w * y)


def biot_savart(x, y, w):
    return w * jnp.cross(y, x - y) / norm(x, y) ** 3


def ewald(x, y, w):
    return w * lax.erfc(norm(x, y)) / norm(x, y)


def periodic_box(x, y, w):
    d = x - y
    d = d - 2 * jnp.round(d / 2)
    return w * jnp.exp(-(d @ d))


def spring(x, y, w):
    return 0.5 * w * (norm(x, y) - 1) ** 2


def cubic_spline(x, y, w):
    q = norm(x, y)
    inner, outer = 1 - 1.5 * q**2 + 0.75 * q**3, 0.25 * (2 - q) ** 3
    return w * jnp.where(q < 1, inner, jnp.where(q < 2, outer, 0.0))


def wendland(x, y, w):
    q = norm(x, y) / 3
    return w * jnp.maximum(1 - q, 0.0) ** 4 * (4 * q + 1)


def damped(x, y, w):
    r = norm(x, y)
    return w * -jnp.expm1(-r) * jnp.log1p(r) / r


def screened_by_branch(x, y, w):
    return lax.cond(w > 0, lambda r: jnp.exp(-r), lambda r: 1 / (1 + r), norm(x, y))


# Geometry.


def distance(x, y, w):
    return w * norm(x, y)


def manhattan(x, y, w):
    return w * jnp.sum(jnp.abs(x - y))


def chebyshev(x, y, w):
    return w * jnp.max(jnp.abs(x - y))


def cosine(x, y, w):
    return w * (x @ y) * lax.rsqrt((x @ x + 0.1) * (y @ y + 0.1))


def angle(x, y, w):
    return w * jnp.arctan2(jnp.sqrt(jnp.sum(jnp.cross(x, y) ** 2) + 0.1), x @ y)


def haversine(x, y, w):
    a = jnp.sin((x[0] - y[0]) / 2) ** 2 + jnp.cos(x[0]) * jnp.cos(y[0]) * jnp.sin(x[1] - y[1]) ** 2
    return 2 * w * jnp.arcsin(jnp.sqrt(jnp.clip(a, 0.01, 0.9)))


def solid_angle(x, y, w):
    return w * y[2] * (x[2] - y[2]) / norm(x, y) ** 3


def segment(x, y, w):
    t = jnp.clip((x @ y) / (y @ y + 0.1), 0.1, 0.9)
    d = x - t * y
    return w * (d @ d)


def overlap(x, y, w):
    return w * jnp.prod(jnp.maximum(1.5 - jnp.abs(x - y), 0.1))


def rotated(x, y, w):
    c, s = jnp.cos(w), jnp.sin(w)
    turn = jnp.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
    return turn @ (x - y)


def reordered(x, y, w):
    return w * jnp.concatenate([x[::-1], y[1:]]) * x[2]


# Statistics.


def gauss(x, y, w):
    return w * jnp.exp(-jnp.sum((x - y) ** 2))


def laplace(x, y, w):
    return w * jnp.exp(-norm(x, y))


def cauchy(x, y, w):
    return w / (1 + far(x, y))


def student(x, y, w):
    return w * (1 + far(x, y) / 3) ** -2.5


def matern(x, y, w):
    r = jnp.sqrt(5.0) * norm(x, y)
    return w * (1 + r + r**2 / 3) * jnp.exp(-r)


def rational_quadratic(x, y, w):
    return w * jnp.power(1 + far(x, y), -(1 + w * w))


def periodic(x, y, w):
    return w * jnp.exp(-2 * jnp.sum(jnp.sin(x - y) ** 2))


def polynomial(x, y, w):
    return w * (x @ y + 1) ** 3


def sigmoid(x, y, w):
    return jnp.tanh(x @ y + w)


def logistic_loss(x, y, w):
    return jax.nn.softplus(-w * (x @ y)) + jax.nn.sigmoid(x[0] * y[0])


def huber(x, y, w):
    d = jnp.abs(x - y)
    return w * jnp.sum(jnp.where(d < 1, 0.5 * d * d, d - 0.5))


def log_density(x, y, w):
    return jax.nn.logsumexp(-0.5 * (x - y) ** 2) - jnp.log(w * w + 1) + lax.erf(w)


def hyperbolic(x, y, w):
    return w * jnp.arccosh(1 + far(x, y)) + jnp.arcsinh(x[0] * y[0]) + jnp.arctanh(0.1 * jnp.sin(w))


@jax.custom_jvp
def clipped(x):
    return x**2


@clipped.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return clipped(x), jnp.clip(2 * x, -1, 1) * dx


def by_rule(x, y, w):
    return w * jnp.sum(clipped(x - y))


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x)


doubled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


def by_reverse_rule(x, y, w):
    return w * jnp.sum(doubled(x - y))


def of_a_jit(x, y, w):
    return jax.jit(gauss)(x, y, w) + jax.checkpoint(coulomb)(x, y, w)


KERNELS = {
    fun.__name__: fun
    for fun in (
        *(gravity, coulomb, lennard_jones, morse, yukawa, buckingham, dipoles, stokeslet),
        *(biot_savart, ewald, periodic_box, spring, cubic_spline, wendland, damped),
        *(screened_by_branch, distance, manhattan, chebyshev, cosine, angle, haversine),
        *(solid_angle, segment, overlap, rotated, reordered, gauss, laplace, cauchy, student),
        *(matern, rational_quadratic, periodic, polynomial, sigmoid, logistic_loss, huber),
        *(log_density, hyperbolic, by_rule, by_reverse_rule, of_a_jit),
    )
}
