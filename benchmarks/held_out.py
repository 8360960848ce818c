# SPDX-License-Identifier: MIT
"""Kernels that the model of tiles is checked on, and was not fitted to.

Each has as many items as take `jax.vmap` 5 to 30 ms on one core. Nobody chose what the model does
by the times of these: a kernel that shows a fault of the model belongs to those it is fitted to.
"""

import jax
import jax.numpy as jnp
from jax import lax

from tile_kernels import Case, drawn

LAPLACIAN = ((0, 1, 0), (1, -4, 1), (0, 1, 0))


def edges(image):
    """The norm of an image after a filter by shifts."""
    out = jnp.zeros((14, 14))
    for i, row in enumerate(LAPLACIAN):
        for j, weight in enumerate(row):
            out += weight * image[i : i + 14, j : j + 14]
    return jnp.sqrt(jnp.sum(out**2) + 1e-6)


FILTERS = drawn(11, 2, 3, 3) / 3


def filtered(image):
    """The norms of a patch after two filters, by a convolution."""
    out = lax.conv(image[None, None], FILTERS[:, None], (1, 1), "SAME")
    return jnp.sqrt(jnp.sum(out**2, axis=(0, 2, 3)) + 1e-6)


def blurred(image):
    """A total variation after a blur by shifts."""
    x = (image[:-2] + 2 * image[1:-1] + image[2:]) / 4
    x = (x[:, :-2] + 2 * x[:, 1:-1] + x[:, 2:]) / 4
    across, down = x[:-1, 1:] - x[:-1, :-1], x[1:, :-1] - x[:-1, :-1]
    return jnp.sum(jnp.sqrt(across**2 + down**2 + 1e-4))


def arc(a, b):
    """The angle between two directions."""
    return jnp.arctan2(jnp.sqrt(jnp.sum(jnp.cross(a, b) ** 2) + 1e-6), a @ b)


def haversine(start, end):
    (lat, lon), (to_lat, to_lon) = jnp.tanh(start), jnp.tanh(end)
    half = jnp.sin((to_lat - lat) / 2) ** 2
    half += jnp.cos(lat) * jnp.cos(to_lat) * jnp.sin((to_lon - lon) / 2) ** 2
    return 2 * 6371 * jnp.arcsin(jnp.sqrt(jnp.clip(half, 1e-6, 0.99)))


def nearest_rotation(matrix):
    """The Newton iteration of the polar decomposition."""
    x = jnp.eye(3) + 0.2 * jnp.tanh(matrix)
    for _ in range(6):
        a, b, c = x
        cofactors = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)])
        x = (x + cofactors / (a @ cofactors[0])) / 2
    return x


def legendre(x):
    """The sum of the polynomials of degrees 1 to 40, each over its degree."""
    x = jnp.tanh(x)
    before, now, total = jnp.ones_like(x), x, x
    for n in range(2, 41):
        before, now = now, ((2 * n - 1) * x * now - (n - 1) * before) / n
        total += now / n
    return total


def median(values):
    return jnp.mean(jnp.sort(values)[11:13])


WINDOW = 0.5 - 0.5 * jnp.cos(2 * jnp.pi * jnp.arange(64) / 64)


def power_spectrum(signal):
    out = jnp.fft.rfft(WINDOW * (signal - jnp.mean(signal)))
    return jnp.log(out.real**2 + out.imag**2 + 1e-3)


def log_density(x, factor):
    """Of a Gaussian, by the Cholesky factor of its covariance."""
    root = jnp.linalg.cholesky(factor @ factor.T + jnp.eye(6))
    z = lax.linalg.triangular_solve(root, x[:, None], left_side=True, lower=True)
    return -0.5 * jnp.sum(z**2) - jnp.sum(jnp.log(jnp.diagonal(root)))


def forward_substitution(matrix, right):
    out = []
    for i in range(8):
        known = sum((0.2 * matrix[i, j] * out[j] for j in range(i)), jnp.float32(0))
        out.append((right[i] - known) / (1 + matrix[i, i] ** 2))
    return jnp.stack(out)


def attention(queries, keys, values):
    weights = jax.nn.softmax(queries @ keys.T / jnp.sqrt(8.0), axis=-1)
    return weights @ values


FIRST, SECOND, LAST = drawn(12, 32, 8) / 3, drawn(13, 32, 32) / 6, drawn(14, 2, 32) / 6
BIAS = drawn(15, 32) / 4


def relu_network(x):
    x = jax.nn.relu(FIRST @ x + BIAS)
    return LAST @ jax.nn.relu(SECOND @ x - BIAS)


BINS = jnp.linspace(-2.5, 2.5, 16)


def soft_histogram(values):
    near = jnp.exp(-0.5 * ((values[:, None] - BINS) / 0.3) ** 2)
    return jnp.mean(near / (jnp.sum(near, axis=-1, keepdims=True) + 1e-3), axis=0)


def student_t(x, freedom):
    """A log-density."""
    nu = 1 + jnp.exp(freedom)
    out = lax.lgamma((nu + 1) / 2) - lax.lgamma(nu / 2) - 0.5 * jnp.log(jnp.pi * nu)
    return out - (nu + 1) / 2 * jnp.log1p(x**2 / nu)


def von_mises(angle, kappa):
    """A log-density."""
    kappa = jnp.exp(kappa)
    return kappa * (jnp.cos(angle) - 1) - jnp.log(2 * jnp.pi * lax.bessel_i0e(kappa))


def slerp(a, b, part):
    a, b = a / jnp.sqrt(a @ a + 1e-6), b / jnp.sqrt(b @ b + 1e-6)
    cosine = a @ b
    b = jnp.where(cosine < 0, -b, b)
    angle = jnp.arccos(jnp.clip(jnp.abs(cosine), 0, 0.9995))
    part = jax.nn.sigmoid(part)
    return (jnp.sin((1 - part) * angle) * a + jnp.sin(part * angle) * b) / jnp.sin(angle)


def lorenz(state):
    def step(state, _):
        x, y, z = state
        slope = jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])
        return state + 0.005 * slope, None

    return lax.scan(step, state, None, length=100)[0]


def epidemic(rates):
    """Euler's steps of susceptible, infected and recovered; the most infected at a time."""
    catch, heal = 0.6 * jax.nn.sigmoid(rates[0]), 0.2 * jax.nn.sigmoid(rates[1])

    def step(state, _):
        well, ill = state
        new, over = catch * well * ill, heal * ill
        return (well - new, ill + new - over), ill

    return jnp.max(lax.scan(step, (jnp.float32(0.99), jnp.float32(0.01)), None, length=60)[1])


KNOTS = jnp.sort(drawn(16, 64))
HEIGHTS, SLOPES = jnp.sin(2 * KNOTS), 2 * jnp.cos(2 * KNOTS)


def spline(x):
    """A cubic through a table of values and slopes."""
    at = jnp.clip(jnp.searchsorted(KNOTS, x) - 1, 0, 62)
    width = KNOTS[at + 1] - KNOTS[at]
    t = jnp.clip((x - KNOTS[at]) / width, 0, 1)
    low = (1 + 2 * t) * (1 - t) ** 2 * HEIGHTS[at] + t * (1 - t) ** 2 * width * SLOPES[at]
    return low + t**2 * ((3 - 2 * t) * HEIGHTS[at + 1] - (1 - t) * width * SLOPES[at + 1])


WAVES = jnp.array([[i, j, k] for i in range(3) for j in (-1, 0, 1) for k in (-1, 0, 1)])[5:]
DAMPING = jnp.exp(-0.1 * jnp.sum(WAVES**2, axis=-1)) / jnp.sum(WAVES**2, axis=-1)


def ewald(points, charges):
    """The sum over waves."""
    phase = points @ WAVES.T.astype(jnp.float32)
    real, imaginary = charges @ jnp.cos(phase), charges @ jnp.sin(phase)
    return jnp.sum(DAMPING * (real**2 + imaginary**2))


def cross_entropy(logits, targets):
    return -jnp.sum(jax.nn.softmax(targets) * jax.nn.log_softmax(logits))


ROOT = drawn(17, 12, 12) / 4
PRECISION = ROOT @ ROOT.T + jnp.eye(12)


def mahalanobis(x, y):
    return jnp.sqrt((x - y) @ PRECISION @ (x - y) + 1e-6)


def tridiagonal(lower, upper, right):
    """Thomas's algorithm: a scan there and a scan back."""
    lower, upper = jnp.tanh(lower), jnp.tanh(upper)

    def down(carry, row):
        a, c, d = row
        pivot = 3 - a * carry[0]
        out = c / pivot, (d - a * carry[1]) / pivot
        return out, out

    rows = lax.scan(down, (jnp.float32(0), jnp.float32(0)), (lower, upper, right))[1]

    def up(after, row):
        return (out := row[1] - row[0] * after), out

    return lax.scan(up, jnp.float32(0), rows, reverse=True)[1]


def autocorrelation(signal):
    """At eight lags."""
    signal = signal - jnp.mean(signal)
    return jnp.stack([signal[lag:] @ signal[: 48 - lag] for lag in range(8)]) / 48


def gyration(points):
    """The squared radius of a molecule, and its anisotropy."""
    centred = points - jnp.mean(points, axis=0)
    tensor = centred.T @ centred / len(points)
    radius = jnp.trace(tensor)
    minors = (radius**2 - jnp.sum(tensor**2)) / 2
    return radius, 1 - 3 * minors / radius**2


def hidden_markov(evidence):
    """The log-likelihood of 24 observations, in four states."""
    stay = jax.nn.log_softmax(2 * jnp.eye(4), axis=-1)

    def step(belief, seen):
        return jax.nn.logsumexp(belief[:, None] + stay, axis=0) + seen, None

    return jax.nn.logsumexp(lax.scan(step, jnp.zeros(4), evidence)[0])


HELD_OUT: list[Case] = [
    Case("edges 16x16", edges, 1 << 12, ((16, 16),)),
    Case("filters 6x6", filtered, 1 << 12, ((6, 6),)),
    Case("total variation 24x24", blurred, 1 << 12, ((24, 24),)),
    Case("arc", arc, 1 << 18, ((3,), (3,))),
    Case("haversine", haversine, 1 << 18, ((2,), (2,))),
    Case("nearest rotation", nearest_rotation, 1 << 14, ((3, 3),)),
    Case("Legendre", legendre, 1 << 19, ((),)),
    Case("median of 24", median, 1 << 12, ((24,),)),
    Case("spectrum of 64", power_spectrum, 1 << 15, ((64,),)),
    Case("log-density of 6", log_density, 1 << 13, ((6,), (6, 6))),
    Case("substitution 8x8", forward_substitution, 1 << 17, ((8, 8), (8,))),
    Case("attention 16x8", attention, 1 << 13, ((16, 8),) * 3),
    Case("ReLU 8-32-32-2", relu_network, 1 << 16, ((8,),)),
    Case("soft histogram", soft_histogram, 1 << 13, ((32,),)),
    Case("Student's t", student_t, 1 << 18, ((), ())),
    Case("von Mises", von_mises, 1 << 19, ((), ())),
    Case("slerp", slerp, 1 << 17, ((4,), (4,), ())),
    Case("Lorenz, 100 steps", lorenz, 1 << 16, ((3,),)),
    Case("epidemic", epidemic, 1 << 15, ((2,),)),
    Case("spline", spline, 1 << 19, ((),)),
    Case("Ewald 8", ewald, 1 << 12, ((8, 3), (8,))),
    Case("cross-entropy of 10", cross_entropy, 1 << 17, ((10,), (10,))),
    Case("Mahalanobis", mahalanobis, 1 << 19, ((12,), (12,))),
    Case("tridiagonal 32", tridiagonal, 1 << 15, ((32,),) * 3),
    Case("autocorrelation of 48", autocorrelation, 1 << 13, ((48,),)),
    Case("gyration", gyration, 1 << 16, ((8, 3),)),
    Case("hidden Markov", hidden_markov, 1 << 13, ((24, 4),)),
]
