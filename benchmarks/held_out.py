# SPDX-License-Identifier: MIT
"""Kernels that nobody chose the rule of tiles by, so that its speed for them says what it is worth.

Each has as many items as take `jax.vmap` 5 to 30 ms on one core. `NEWER` are some of them that are
unlike those before. A kernel that shows a fault of the rule moves to ``tile_kernels.py``.
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


def contact(centre, velocity, spin):
    """The force of a damped spring on a ball at a plane, with friction that can slip."""
    depth = jnp.maximum(0.6 - centre[2], 0)
    normal = jnp.maximum(200 * depth - 5 * velocity[2] * depth, 0)
    lever = 0.6 - depth / 2
    slip = velocity[:2] + lever * jnp.stack([-spin[1], spin[0]])
    grip = jnp.minimum(8, 0.4 * normal / jnp.sqrt(slip @ slip + 1e-4))
    force = jnp.concatenate([-grip * slip, normal[None]])
    return force, lever * jnp.stack([force[1], -force[0]])


def weno(cells):
    """What cells on a ring gain in energy, by Burgers' equation and WENO of order five."""
    u = jnp.concatenate([cells[-3:], cells, cells[:3]])
    speed = jnp.max(jnp.abs(cells))

    def edge(a, b, c, d, e):
        """A flux at edges, from the cells around them; `c` is upwind of the edge."""
        rough = (
            13 / 12 * (a - 2 * b + c) ** 2 + (a - 4 * b + 3 * c) ** 2 / 4,
            13 / 12 * (b - 2 * c + d) ** 2 + (b - d) ** 2 / 4,
            13 / 12 * (c - 2 * d + e) ** 2 + (3 * c - 4 * d + e) ** 2 / 4,
        )
        first, second, third = (w / (0.01 + r) ** 2 for w, r in zip((1, 6, 3), rough, strict=True))
        out = first * (2 * a - 7 * b + 11 * c) + second * (5 * c - b + 2 * d)
        return (out + third * (2 * c + 5 * d - e)) / (6 * (first + second + third))

    right, left = (u**2 / 2 + speed * u) / 2, (u**2 / 2 - speed * u) / 2
    flux = edge(*(right[i : i + 41] for i in range(5)))
    flux += edge(*(left[i : i + 41] for i in range(5, 0, -1)))
    return cells * (flux[:-1] - flux[1:])


NET = drawn(18, 12, 12, 3)
BASIS = jnp.array([[1.0, 4, 1, 0], [-3, 0, 3, 0], [3, -6, 3, 0], [-1, 3, -3, 1]]) / 6


def surface(place):
    """A point of a cubic B-spline surface, and the normal there."""
    at = jnp.clip(4.5 + 2 * place, 0, 8.99)
    low = jnp.floor(at).astype(jnp.int32)
    net = lax.dynamic_slice(NET, (low[0], low[1], 0), (4, 4, 3))
    (t, r), one = at - low, jnp.float32(1)
    across, along = (jnp.stack([one, x, x**2, x**3]) @ BASIS for x in (t, r))
    d_across, d_along = (jnp.stack([0 * one, one, 2 * x, 3 * x**2]) @ BASIS for x in (t, r))
    point = jnp.einsum("i,j,ijk", across, along, net)
    sides = [jnp.einsum("i,j,ijk", *w, net) for w in ((d_across, along), (across, d_along))]
    normal = jnp.cross(*sides)
    return point, normal / jnp.sqrt(normal @ normal + 1e-3)


RATES = jnp.array([0.04, 1e4, 3e7])
STEPS = 1e-4 * 1.4 ** jnp.arange(40)


def robertson(logs):
    """A stiff reaction of three species: linearly implicit steps that become longer."""
    a, b, c = RATES * jnp.exp(0.2 * logs)

    def step(state, h):
        x, y, z = state
        slope_x, slope_y = b * y * z - a * x, a * x - b * y * z - c * y**2
        # z = 1 - x - y, so that two equations are left.
        xx, xy = 1 + h * (a + b * y), h * b * (y - z)
        yx, yy = -h * (a + b * y), 1 + h * (b * (z - y) + 2 * c * y)
        det = xx * yy - xy * yx
        x += h * (yy * slope_x - xy * slope_y) / det
        y += h * (xx * slope_y - yx * slope_x) / det
        return (x, y, 1 - x - y), y

    start = jnp.float32(1), jnp.float32(0), jnp.float32(0)
    (x, _, z), middle = lax.scan(step, start, STEPS)
    return x, z, 1e5 * jnp.sum(middle)


GLASSES = ((0.0, 4.0, 1.5), (0.8, -6.0, 1 / 1.5), (1.3, -5.0, 1.7), (1.5, 9.0, 1 / 1.7))


def lens(height, slope):
    """Where a ray meets the sensor behind two lenses, and how long its way was."""
    point = jnp.stack([0.3 * height[0], 0.3 * height[1], jnp.float32(-1)])
    ray = jnp.stack([0.1 * slope[0], 0.1 * slope[1], jnp.float32(1)])
    ray, way, index = ray / jnp.sqrt(ray @ ray), jnp.float32(0), 1.0
    for vertex, radius, ratio in GLASSES:
        away = point - jnp.array([0, 0, vertex + radius])
        half = away @ ray
        root = jnp.sqrt(jnp.maximum(half**2 - away @ away + radius**2, 1e-2))
        length = -half - root if radius > 0 else -half + root
        point, way, index = point + length * ray, way + index * length, index * ratio
        normal = (away + length * ray) / radius
        cosine = -normal @ ray
        passed = jnp.sqrt(jnp.maximum(1 - (1 - cosine**2) / ratio**2, 1e-2))
        ray = ray / ratio + (cosine / ratio - passed) * normal
    length = (6 - point[2]) / ray[2]
    return (point + length * ray)[:2], way + index * length


COEFFICIENTS = drawn(19, 49)


def harmonics(place):
    """A potential: the sum of the solid harmonics of degrees 0 to 6, without their norms."""
    x, y, z = place / jnp.sqrt(1 + place @ place)
    square = x**2 + y**2 + z**2
    total, terms = jnp.float32(0), iter(COEFFICIENTS)
    cosine, sine = jnp.float32(1), jnp.float32(0)  # of m times the longitude, times a radius
    first = 1.0
    for m in range(7):
        before, now = jnp.float32(0), jnp.float32(first)
        for n in range(m, 7):
            total += now * cosine * next(terms)
            if m:
                total += now * sine * next(terms)
            after = ((2 * n + 1) * z * now - (n + m) * square * before) / (n + 1 - m)
            before, now = now, after
        cosine, sine = x * cosine - y * sine, x * sine + y * cosine
        first *= (2 * m + 1) / (2 * m + 2)
    return total


def warping(a, b):
    """The cost of the best alignment of two series, cell by cell of the table."""

    def cell(carry, column):
        left, corner = carry
        up, apart = column
        out = apart + jnp.minimum(jnp.minimum(left, up), corner)
        return (out, up), out

    def row(above, x):
        start = jnp.float32(1e6), above[0]
        cells = lax.scan(cell, start, (above[1:], (x - b) ** 2))[1]
        return jnp.concatenate([jnp.full(1, 1e6), cells]), None

    return lax.scan(row, jnp.full(len(b) + 1, 1e6).at[0].set(0), a)[0][-1]


def fit(matrix, right):
    """Least squares by a QR factorisation: the solution, and the norm of what is left."""
    q, r = jnp.linalg.qr(matrix)
    x = lax.linalg.triangular_solve(r, (right @ q)[:, None], left_side=True)[:, 0]
    rest = right - matrix @ x
    return x, jnp.sqrt(rest @ rest + 1e-6)


def thin_film(thickness, index):
    """How much light six layers on glass reflect, by the product of their matrices."""
    index = 1.8 + 0.4 * jnp.tanh(index)
    phase = index * (1 + 0.3 * jnp.tanh(thickness))
    cosine, sine = jnp.cos(phase), 1j * jnp.sin(phase)
    layers = jnp.stack([cosine, sine / index, sine * index, cosine], axis=-1).reshape(6, 2, 2)
    field = jnp.array([1, 1.5], jnp.complex64)
    for layer in layers[::-1]:
        field = layer @ field
    reflected = (field[0] - field[1]) / (field[0] + field[1])
    return reflected.real**2 + reflected.imag**2


def shallow_water(height, east, north):
    """One step of Lax and Friedrichs on 12x12 cells, with those around them."""
    h = 1 + 0.2 * jnp.tanh(height)
    pressure = 5 * h**2
    state = jnp.stack([h, east, north])
    right = jnp.stack([east, east**2 / h + pressure, east * north / h])
    up = jnp.stack([north, east * north / h, north**2 / h + pressure])
    around = state[:, 2:, 1:-1] + state[:, :-2, 1:-1] + state[:, 1:-1, 2:] + state[:, 1:-1, :-2]
    slope = right[:, 1:-1, 2:] - right[:, 1:-1, :-2] + up[:, 2:, 1:-1] - up[:, :-2, 1:-1]
    return around / 4 - 0.01 * slope


# Added on 26 November 2026: chosen before the rule of a paragraph was measured.
NEWER: list[Case] = [
    Case("contact", contact, 1 << 19, ((3,), (3,), (3,))),
    Case("WENO of 40", weno, 1 << 14, ((40,),)),
    Case("B-spline surface", surface, 1 << 16, ((2,),)),
    Case("Robertson, 40 steps", robertson, 1 << 16, ((3,),)),
    Case("lens", lens, 1 << 17, ((2,), (2,))),
    Case("harmonics to 6", harmonics, 1 << 19, ((3,),)),
    Case("warping 16x12", warping, 1 << 14, ((16,), (12,))),
    Case("QR fit 12x4", fit, 1 << 13, ((12, 4), (12,))),
    Case("thin film of six", thin_film, 1 << 14, ((6,), (6,))),
    Case("shallow water 12x12", shallow_water, 1 << 12, ((14, 14),) * 3),
]

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
    *NEWER,
]
