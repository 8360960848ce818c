# SPDX-License-Identifier: MIT
"""Kernels, each for one item, by which tiles are chosen and timed.

`CASES` are the rows of the benchmark page. Whoever chooses the rule of tiles may look at the times
of all kernels in `TRAINING`; those of ``held_out.py`` check it. ``tile_sizes.py`` times both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# The kernels. All but the last three are those of the table by which tiles were designed.


def distances(points):
    separation = points[:, None] - points[None]
    return jnp.sum(jnp.sqrt(jnp.sum(separation**2, axis=-1) + 1e-3))


def ray_triangle(origin, direction, a, b, c):
    """Moeller and Trumbore: the distance to the triangle along the ray."""
    first, second = b - a, c - a
    h = jnp.cross(direction, second)
    det = first @ h
    s = origin - a
    u = (s @ h) / det
    q = jnp.cross(s, first)
    v = (direction @ q) / det
    hit = (u >= 0) & (v >= 0) & (u + v <= 1)
    return jnp.where(hit, (second @ q) / det, 1e3)


def matmul(a, b):
    return a @ b


def runge_kutta(state):
    def slope(state):
        return jnp.stack([state[1], -jnp.sin(state[0])])

    def step(state, _):
        a = slope(state)
        b = slope(state + 0.005 * a)
        c = slope(state + 0.005 * b)
        d = slope(state + 0.01 * c)
        return state + 0.01 / 6 * (a + 2 * b + 2 * c + d), None

    return lax.scan(step, state, None, length=64)[0]


def rotate(quaternion, vector):
    real, imaginary = quaternion[0], quaternion[1:]
    turned = 2 * jnp.cross(imaginary, vector)
    return vector + real * turned + jnp.cross(imaginary, turned)


def lennard_jones(points):
    separation = points[:, None] - points[None]
    own = jnp.eye(len(points))
    sixth = 1 / (jnp.sum(separation**2, axis=-1) + own) ** 3
    return jnp.sum(jnp.where(own > 0, 0.0, sixth**2 - sixth))


def kepler(anomaly, eccentricity):
    eccentricity = 0.5 * jnp.abs(jnp.tanh(eccentricity))
    e = anomaly
    for _ in range(10):
        e = e - (e - eccentricity * jnp.sin(e) - anomaly) / (1 - eccentricity * jnp.cos(e))
    return e


HIDDEN, OUT = drawn(1, 64, 16) / 4, drawn(2, 1, 64) / 8


def network(x):
    return OUT @ jnp.tanh(HIDDEN @ x)


def kalman(state, covariance, seen):
    """One step of a filter: four states, two of which are seen."""
    move, look = jnp.eye(4) + 0.1 * jnp.eye(4, k=2), jnp.eye(2, 4)
    state, covariance = move @ state, move @ covariance @ move.T + 0.01 * jnp.eye(4)
    s = look @ covariance @ look.T + 0.1 * jnp.eye(2)
    inverse = jnp.array([[s[1, 1], -s[0, 1]], [-s[1, 0], s[0, 0]]])
    gain = covariance @ look.T @ inverse / (s[0, 0] * s[1, 1] - s[0, 1] * s[1, 0])
    return state + gain @ (seen - look @ state), covariance - gain @ look @ covariance


MEANS = drawn(3, 8, 3)


def mixture(x):
    """The log-likelihood of eight Gaussians."""
    return jax.nn.logsumexp(-0.5 * jnp.sum((x - MEANS) ** 2, axis=-1))


GRID = drawn(4, 32, 32, 32)
CORNERS = jnp.array([[i, j, k] for i in (0, 1) for j in (0, 1) for k in (0, 1)])


def trilinear(point):
    """A value between the points of a grid."""
    at = jnp.clip(8 * point + 16, 0, 30.99)
    low = jnp.floor(at).astype(jnp.int32)
    part = at - low
    weights = jnp.prod(jnp.where(CORNERS == 1, part, 1 - part), axis=-1)
    return jnp.sum(weights * GRID[tuple((low + CORNERS).T)])


class Case(NamedTuple):
    name: str
    fun: Callable[..., Any]
    items: int
    cores: tuple[tuple[int, ...], ...]

    def inputs(self) -> list[jax.Array]:
        return [drawn(i, self.items, *core) for i, core in enumerate(self.cores)]


CASES = [
    Case("distances 8x3", distances, 100_000, ((8, 3),)),
    Case("ray-triangle", ray_triangle, 200_000, ((3,),) * 5),
    Case("matmul 16x16", matmul, 20_000, ((16, 16),) * 2),
    Case("RK4, 64 steps", runge_kutta, 20_000, ((2,),)),
    Case("rotation", rotate, 400_000, ((4,), (3,))),
    Case("Lennard-Jones 32x3", lennard_jones, 5_000, ((32, 3),)),
    Case("Kepler", kepler, 200_000, ((), ())),
    Case("MLP 16-64-1", network, 100_000, ((16,),)),
    Case("Kalman 4, 2", kalman, 50_000, ((4,), (4, 4), (2,))),
    Case("mixture of 8", mixture, 200_000, ((3,),)),
    Case("trilinear", trilinear, 200_000, ((3,),)),
]


# Kernels that the benchmark does not have.


def pendulum(state):
    def step(carry, _):
        angle, speed = carry
        speed = speed - 0.05 * (jnp.sin(angle) + 0.1 * speed)
        return (angle + 0.05 * speed, speed), angle**2

    return jnp.sum(lax.scan(step, (state[0], state[1]), None, length=64)[1])


def three_bodies(positions, velocities):
    """Sixteen steps of leapfrog."""

    def pull(positions):
        apart = positions[:, None] - positions[None]
        cubed = (jnp.sum(apart**2, axis=-1) + 0.1) ** 1.5
        return -jnp.sum(apart / cubed[..., None], axis=1)

    def step(state, _):
        positions, velocities = state
        velocities = velocities + 0.01 * pull(positions)
        return (positions + 0.01 * velocities, velocities), None

    return lax.scan(step, (positions, velocities), None, length=16)[0]


def heat(rod):
    """Diffuse along a rod of 64 cells, for eight steps written out."""
    for _ in range(8):
        rod = rod.at[1:-1].add(0.2 * (rod[2:] - 2 * rod[1:-1] + rod[:-2]))
    return rod


def wave(field):
    """Diffuse on a torus of 16x16 cells, in a loop."""

    def step(_, u):
        return u + 0.1 * (sum(jnp.roll(u, s, a) for s in (-1, 1) for a in (0, 1)) - 4 * u)

    return lax.fori_loop(0, 10, step, field)


def smoothed(signal):
    return jnp.convolve(signal, jnp.array([1.0, 4.0, 6.0, 4.0, 1.0]) / 16, mode="same")


FILTERS = drawn(5, 4, 1, 5, 5) / 5


def features(image):
    out = lax.conv_general_dilated(image[None, None], FILTERS, (1, 1), "VALID")
    return jnp.max(jax.nn.relu(out), axis=(2, 3))[0]


def quantiles(sample):
    ordered = jnp.sort(sample)
    return ordered[7] * ordered[24]


def spearman(a, b):
    ranks = [jnp.argsort(jnp.argsort(x)).astype(jnp.float32) for x in (a, b)]
    return jnp.mean(ranks[0] * ranks[1])


def loudest(signal):
    return lax.top_k(signal**2, 4)[0]


def periodogram(signal):
    return jnp.abs(jnp.fft.rfft(signal)) ** 2


def autocorrelation(signal):
    spectrum = jnp.fft.rfft(signal)
    return jnp.fft.irfft(spectrum * jnp.conj(spectrum))[:8]


def positive(matrix):
    return matrix @ matrix.T / len(matrix) + 0.5 * jnp.eye(len(matrix))


def gaussian(x, root):
    factor = jnp.linalg.cholesky(positive(root))
    white = jax.scipy.linalg.solve_triangular(factor, x, lower=True)
    return -0.5 * jnp.sum(white**2) - jnp.sum(jnp.log(jnp.diag(factor)))


def solved(matrix, vector):
    return jnp.linalg.solve(positive(matrix), vector)


def levels(matrix):
    return jnp.linalg.eigvalsh(matrix + matrix.T + jnp.diag(10.0 * jnp.arange(len(matrix))))


def inverse3(matrix):
    a, b, c = matrix + 2 * jnp.eye(3)
    adjugate = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)], axis=1)
    return adjugate / (a @ jnp.cross(b, c) + 10)


def volume(points):
    return jnp.linalg.det(points[1:] - points[0])


def strain(gradient):
    """Energy of a hyperelastic solid."""
    deformation = jnp.eye(3) + 0.1 * gradient
    square = deformation.T @ deformation
    j = jnp.linalg.det(deformation)
    return jnp.trace(square) - 3 - 2 * jnp.log(jnp.abs(j)) + (j - 1) ** 2


def attention(queries, keys, values):
    scores = jax.nn.softmax(queries @ keys.T / jnp.sqrt(queries.shape[-1]), axis=-1)
    return scores @ values


WEIGHTS = [drawn(6 + i, *shape) / 6 for i, shape in enumerate([(32, 4), (32, 32), (1, 32)])]


def deep(x):
    for weight in WEIGHTS[:-1]:
        x = jnp.tanh(weight @ x)
    return (WEIGHTS[-1] @ x)[0]


def laplacian(x):
    """Of a small network, by the trace of its Hessian."""
    return jnp.trace(jax.hessian(lambda x: jnp.sum(jnp.tanh(WEIGHTS[0] @ x)))(x))


def recurrent(inputs):
    """A recurrent network reads sixteen vectors."""

    def step(state, x):
        return jnp.tanh(WEIGHTS[1] @ state + WEIGHTS[0] @ x), None

    return jnp.sum(lax.scan(step, jnp.zeros(32), inputs)[0])


def chebyshev(x):
    """Forty terms of a series, by Clenshaw's recurrence."""
    b, c = 0.0, 0.0
    for k in range(40):
        b, c = 2 * jnp.tanh(x) * b - c + 1 / (40 - k), b
    return b


def hermite(x):
    def step(carry, n):
        low, high = carry
        return (high, (x * high - jnp.sqrt(n) * low) / jnp.sqrt(n + 1)), high**2

    numbers = jnp.arange(1.0, 33.0)
    return jnp.sum(lax.scan(step, (jnp.exp(-(x**2) / 4), x), numbers)[1])


def smoothing(series):
    """An exponential filter over a hundred values."""
    return lax.scan(lambda level, x: (0.9 * level + 0.1 * x,) * 2, 0.0, series)[1]


TABLE = drawn(9, 257)


def lookup(x):
    at = 128 + 127 * jnp.tanh(x)
    low = jnp.floor(at).astype(jnp.int32)
    return TABLE[low] + (at - low) * (TABLE[low + 1] - TABLE[low])


IMAGE = drawn(10, 64, 64)


def bilinear(points):
    """Samples of an image at eight points."""
    at = 31 + 30 * jnp.tanh(points)
    return jnp.sum(jax.scipy.ndimage.map_coordinates(IMAGE, at.T, order=1))


def histogram(sample):
    centres = jnp.linspace(-3, 3, 16)
    return jnp.sum(jnp.exp(-4 * (sample[:, None] - centres) ** 2), axis=0)


def counts(sample):
    bins = jnp.clip(4 * (sample + 2), 0, 15).astype(jnp.int32)
    return jnp.zeros(16).at[bins].add(jnp.abs(sample))


def gamma_density(x, shape, rate):
    x, shape, rate = jnp.exp(x), jnp.exp(shape), jnp.exp(rate)
    log_gamma = jax.scipy.special.gammaln(shape)
    return shape * jnp.log(rate) - log_gamma + (shape - 1) * jnp.log(x) - rate * x


def option_price(spot, strike, spread):
    spot, strike, spread = jnp.exp(0.1 * spot), jnp.exp(0.1 * strike), 0.2 + 0.1 * spread**2
    up = (jnp.log(spot / strike) + spread**2 / 2) / spread
    cdf = jax.scipy.stats.norm.cdf
    return spot * cdf(up) - strike * cdf(up - spread)


def bessel(x):
    return jax.scipy.special.i0e(x) + jax.scipy.special.i1e(x) * jax.scipy.special.erf(x)


def multiplied(a, b):
    """A product of quaternions, normalised."""
    real = a[0] * b[0] - a[1:] @ b[1:]
    imaginary = a[0] * b[1:] + b[0] * a[1:] + jnp.cross(a[1:], b[1:])
    out = jnp.concatenate([real[None], imaginary])
    return out / jnp.linalg.norm(out)


def kinematics(angles):
    """The tip of an arm of six links."""
    at, frame = jnp.zeros(3), jnp.eye(3)
    for i in range(6):
        c, s = jnp.cos(angles[i]), jnp.sin(angles[i])
        turn = jnp.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
        frame = frame @ (turn if i % 2 else turn.T[::-1])
        at = at + frame @ jnp.array([1.0, 0.0, 0.5])
    return at


def plane_wave(point):
    """A sum over 64 waves."""
    return jnp.sum(jnp.cos(WAVES @ point))


WAVES = drawn(11, 64, 3)


def nearest(point):
    """The distance to the nearest of 64 sites."""
    return jnp.sqrt(jnp.min(jnp.sum((WAVES - point) ** 2, axis=-1)) + 1e-3)


def kernel_matrix(points):
    apart = points[:, None] - points[None]
    return jnp.exp(-0.5 * jnp.sum(apart**2, axis=-1))


def bicubic(block):
    basis = jnp.array([[1.0, 0, 0, 0], [0, 0, 1, 0], [-3, 3, -2, -1], [2, -2, 1, 1]])
    return basis @ block @ basis.T


def softened(logits, label):
    return jax.nn.logsumexp(logits) - jnp.sum(jax.nn.softmax(4 * label) * logits)


def normalised(x, scale):
    x = x - jnp.mean(x)
    return scale * x / jnp.sqrt(jnp.mean(x**2) + 1e-5)


def orbit(state):
    """Adaptive in nothing: a hundred steps of a map in the plane."""
    return lax.fori_loop(
        0, 100, lambda _, s: jnp.array([1 - 1.2 * s[0] ** 2 + s[1], 0.3 * s[0]]), 0.1 * state
    )


WIDE = [drawn(12 + i, 256, 256) / 16 for i in range(2)]


def wide(x):
    """A network whose matrices fill a cache."""
    return jnp.tanh(WIDE[1] @ jnp.tanh(WIDE[0] @ x))


def triples(x):
    return jnp.sum(jnp.sum((WIDE[0] @ x[:256]).reshape(-1, 4), axis=-1) ** 2)


def iterated(x):
    """A hundred steps on a vector of sums."""
    sums = jnp.sum(x.reshape(-1, 3), axis=-1)
    return jnp.sum(lax.fori_loop(0, 100, lambda _, y: jnp.sin(y), sums))


def shifted(x):
    """Fifty steps on a long vector."""
    return jnp.sum(lax.fori_loop(0, 50, lambda _, y: 0.9 * y + jnp.roll(y, 1) * jnp.cos(y[0]), x))


def outer(x, y):
    return jnp.sum(jnp.tanh(x[:, None] * y) ** 2)


TRAINING = [
    *CASES,
    Case("pendulum", pendulum, 2**15, ((2,),)),
    Case("three bodies", three_bodies, 2**13, ((3, 2), (3, 2))),
    Case("heat 64", heat, 2**14, ((64,),)),
    Case("torus 16x16", wave, 2**13, ((16, 16),)),
    Case("smoothed 128", smoothed, 2**14, ((128,),)),
    Case("features 20x20", features, 2**13, ((20, 20),)),
    Case("quantiles 32", quantiles, 2**14, ((32,),)),
    Case("spearman 16", spearman, 2**13, ((16,), (16,))),
    Case("loudest of 64", loudest, 2**13, ((64,),)),
    Case("periodogram 128", periodogram, 2**13, ((128,),)),
    Case("autocorrelation 32", autocorrelation, 2**14, ((32,),)),
    Case("gaussian 5", gaussian, 2**14, ((5,), (5, 5))),
    Case("solve 8", solved, 2**13, ((8, 8), (8,))),
    Case("eigenvalues 6", levels, 2**13, ((6, 6),)),
    Case("inverse 3x3", inverse3, 2**17, ((3, 3),)),
    Case("volume", volume, 2**17, ((4, 3),)),
    Case("strain", strain, 2**16, ((3, 3),)),
    Case("attention 8x8", attention, 2**13, ((8, 8),) * 3),
    Case("deep 4-32-32-1", deep, 2**15, ((4,),)),
    Case("laplacian", laplacian, 2**14, ((4,),)),
    Case("recurrent 16x4", recurrent, 2**13, ((16, 4),)),
    Case("chebyshev", chebyshev, 2**19, ((),)),
    Case("hermite", hermite, 2**16, ((),)),
    Case("smoothing 100", smoothing, 2**14, ((100,),)),
    Case("lookup", lookup, 2**18, ((),)),
    Case("bilinear 8", bilinear, 2**15, ((8, 2),)),
    Case("soft histogram 32", histogram, 2**14, ((32,),)),
    Case("counts 32", counts, 2**14, ((32,),)),
    Case("gamma", gamma_density, 2**17, ((), (), ())),
    Case("option price", option_price, 2**18, ((), (), ())),
    Case("bessel", bessel, 2**17, ((),)),
    Case("quaternions", multiplied, 2**17, ((4,), (4,))),
    Case("arm of six", kinematics, 2**15, ((6,),)),
    Case("waves 64", plane_wave, 2**16, ((3,),)),
    Case("nearest of 64", nearest, 2**16, ((3,),)),
    Case("kernel matrix 12x2", kernel_matrix, 2**14, ((12, 2),)),
    Case("bicubic", bicubic, 2**16, ((4, 4),)),
    Case("cross-entropy 10", softened, 2**16, ((10,), (10,))),
    Case("layer norm 64", normalised, 2**15, ((64,), (64,))),
    Case("orbit 100", orbit, 2**16, ((2,),)),
    Case("wide 256-256-256", wide, 2**13, ((256,),)),
    Case("sums of four", triples, 2**13, ((256,),)),
    Case("iterated 300", iterated, 2**13, ((300,),)),
    Case("shifted 300", shifted, 2**13, ((300,),)),
    Case("outer 64", outer, 2**13, ((64,), (64,))),
]
