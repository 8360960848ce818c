# SPDX-License-Identifier: MIT
"""Kernels of one vector of three numbers, one for each kind of program that JAX can trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax import auto_vmap, chunked_vmap

# Closed over, and on no mesh.
WEIGHTS = jnp.asarray(np.cos(np.arange(9.0)).reshape(3, 3))
SHIFT = np.array([0.5, -1.0, 2.0], np.float32)


@jax.custom_jvp
def sine(v):
    return jnp.sin(v)


sine.defjvp(lambda primals, tangents: (sine(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def cosine(v):
    return jnp.cos(v)


cosine.defvjp(lambda v: (cosine(v), v), lambda v, g: (-g * jnp.sin(v),))


def scanned(v):
    return lax.scan(lambda s, a: (jnp.tanh(WEIGHTS @ s) + a, s * a), v, v)


def looped(v):
    return lax.while_loop(lambda s: s[1] < 5, lambda s: (s[0] * v, s[1] + 1), (v, 0))[0]


def drawn(v):
    return v * jax.random.normal(jax.random.fold_in(jax.random.key(3), v[0].astype(int)), (3,))


def matrix(v):
    return jnp.outer(v, v) + 2 * jnp.eye(3)


KINDS = {
    "arithmetic": lambda v: jnp.sin(v) * 2 + v / (1 + v**2),
    "jit": lambda v: jax.jit(lambda v: jnp.sin(v) @ WEIGHTS)(v),
    "scan": scanned,
    "fori_loop": lambda v: lax.fori_loop(0, 4, lambda _, s: jnp.sin(s) + v, v),
    "while_loop": looped,
    "cond": lambda v: lax.cond(v[0] > 1.5, jnp.sin, jnp.square, v),
    "switch": lambda v: lax.switch(v[0].astype(int), [jnp.sin, jnp.cos, jnp.square], v),
    "map": lambda v: lax.map(lambda a: jnp.sin(a) * v[0], v),
    "nested auto_vmap": lambda v: auto_vmap(0, 1, chunk_size=2)(lambda a, u: a * u.sum())(v, v),
    "nested chunked_vmap": lambda v: chunked_vmap(lambda a: jnp.sin(a) * v, 2)(v),
    "hessian": jax.hessian(lambda v: jnp.sin(v).prod()),
    "grad": jax.grad(lambda v: jnp.sin(v).sum() ** 2),
    "custom_jvp": lambda v: sine(v) ** 2,
    "custom_vjp": lambda v: cosine(v) ** 2,
    "checkpoint": jax.checkpoint(lambda v: jnp.sin(WEIGHTS @ v)),
    # Without `inv`, which JAX (0.12) cannot map over an explicit axis.
    "linalg": lambda v: (jnp.linalg.solve(matrix(v), v), jnp.linalg.eigvalsh(matrix(v))),
    "fft": lambda v: jnp.abs(jnp.fft.fft(v)),
    "sort": lambda v: jnp.sort(v * SHIFT),
    "index": lambda v: v[jnp.array([2, 0, 1, 1])] * v[jnp.argmax(v)],
    "key": drawn,
    "associative_scan": functools.partial(lax.associative_scan, jnp.multiply),
    "cumsum": lambda v: jnp.cumsum(v * v),
    "einsum": lambda v: jnp.einsum("i,ij,j->", v, WEIGHTS, v) + jnp.dot(v, v),
    "pytree": lambda v: {"a": (v[0], jnp.sin(v)), "b": [v[1:].sum()]},
    "integer": lambda v: jnp.round(v * 10).astype(jnp.int32),
    "bool": lambda v: v > 1.2,
    "constant": lambda v: v * SHIFT + WEIGHTS[0],
}
WITHOUT_GRADIENT = ("while_loop", "integer", "bool")

# Operations of weights (3, 3), which all items share, and an item (6, 6), for a sweep.

LAYOUTS = [
    (("NCHW", "OIHW", "NCHW"), lambda w: w[None, None], lambda x: x[None, None]),
    (("NHWC", "HWIO", "NHWC"), lambda w: w[..., None, None], lambda x: x[None, ..., None]),
    (("NHWC", "OHWI", "NHWC"), lambda w: w[None, ..., None], lambda x: x[None, ..., None]),
    (("CHWN", "IHWO", "CHWN"), lambda w: w[None, ..., None], lambda x: x[None, ..., None]),
    (("HWNC", "HWIO", "HWNC"), lambda w: w[..., None, None], lambda x: x[..., None, None]),
    (("NCHW", "HWIO", "NHWC"), lambda w: w[..., None, None], lambda x: x[None, None]),
]
WAYS = {
    "same": {"window_strides": (1, 1), "padding": "SAME"},
    "strided": {"window_strides": (2, 1), "padding": "VALID"},
    "dilated": {"window_strides": (1, 1), "padding": "SAME", "rhs_dilation": (2, 2)},
    "transposed": {"window_strides": (1, 1), "padding": [(1, 1)] * 2, "lhs_dilation": (2, 1)},
}


def convolution(layout, way):
    names, of_weights, of_item = layout

    def convolved(w, x):
        image = of_item(x)
        return lax.conv_general_dilated(image, of_weights(w), **way, dimension_numbers=names)

    return convolved


def positive(w, x):
    return w @ w.T + jnp.outer(x[0, :3], x[0, :3]) + 3 * jnp.eye(3)


def windows(init, fold, size, strides, padding="VALID"):
    return lambda w, x: lax.reduce_window(x * w[0, 0], init, fold, size, strides, padding)


def called_back(w, x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = jax.pure_callback(np.sin, shape, lax.stop_gradient(x), vmap_method="expand_dims")
    return w[0, 0] * out


OPERATIONS = {
    **{
        f"convolution {layout[0]}, {way}": convolution(layout, WAYS[way])
        for number, layout in enumerate(LAYOUTS)
        for way in (WAYS if number < 2 else ("same",))
    },
    "fft": lambda w, x: jnp.abs(jnp.fft.fft(x * w[0, 0] + 1)),
    "rfft": lambda w, x: jnp.abs(jnp.fft.rfft(x[:3] @ x * w[0, 1] + 1)),
    "fft2": lambda w, x: jnp.real(jnp.fft.fft2(x) * jnp.fft.fft2(w, (6, 6))),
    "ifft": lambda w, x: jnp.real(jnp.fft.ifft(x * w[1, 1])),
    "sort": lambda w, x: jnp.sort(x * w[0, 0], 0),
    "argsort": lambda w, x: x[jnp.argsort(x[:, 0])] * w[0, 0],
    "top_k": lambda w, x: lax.top_k(x * w[0, 0], 2)[0],
    "median": lambda w, x: jnp.median(x * w[0, 0], 1),
    "unique order": lambda w, x: lax.sort((x, x * w[0, 0]), num_keys=1)[1],
    "scatter add": lambda w, x: jnp.zeros(4).at[jnp.array([0, 1, 1])].add(w @ x[0, :3]),
    "scatter set": lambda w, x: x.at[1:4, :3].set(w),
    "scatter by item": lambda w, x: x.at[jnp.argmax(x[0])].multiply(w[0, 0]),
    "scatter max": lambda w, x: jnp.zeros(4).at[jnp.array([0, 1, 1])].max(w @ x[0, :3]),
    "segment_sum": lambda w, x: jax.ops.segment_sum(x * w[0, 0], jnp.array([0, 1, 0, 2, 2, 1]), 3),
    "gather": lambda w, x: w[jnp.argsort(x[0, :3])],
    "take_along_axis": lambda w, x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1) * w[0, 0],
    "dynamic_slice": lambda w, x: lax.dynamic_slice(x * w[0, 0], (jnp.argmax(x[0]), 0), (2, 2)),
    "cholesky": lambda w, x: jnp.linalg.cholesky(positive(w, x)),
    "solve": lambda w, x: jnp.linalg.solve(positive(w, x), x[0, :3]),
    "triangular": lambda w, x: jax.scipy.linalg.solve_triangular(positive(w, x), x[0, :3]),
    "inv": lambda w, x: jnp.linalg.inv(positive(w, x)),
    "det": lambda w, x: jnp.linalg.det(positive(w, x)),
    "slogdet": lambda w, x: jnp.linalg.slogdet(positive(w, x))[1],
    "qr": lambda w, x: jnp.abs(jnp.linalg.qr(positive(w, x))[1]),
    "svd": lambda w, x: jnp.linalg.svd(positive(w, x), compute_uv=False),
    "eigvalsh": lambda w, x: jnp.linalg.eigvalsh(positive(w, x)),
    "expm": lambda w, x: jax.scipy.linalg.expm(positive(w, x) / 9),
    "random bits": lambda w, x: (
        w
        * jax.random.normal(
            jax.random.fold_in(jax.random.key(1), (9 * x[0, 0]).astype(int)), (3, 3)
        )
    ),
    "permutation": lambda w, x: jax.random.permutation(jax.random.key(2), x) * w[0, 0],
    "reduce_window add": windows(0.0, lax.add, (2, 2), (1, 2)),
    "reduce_window max": windows(-np.inf, lax.max, (3, 3), (2, 2), "SAME"),
    "reduce_window min": windows(np.inf, lax.min, (2, 3), (1, 1)),
    "cumsum": lambda w, x: jnp.cumsum(x * w[0, 0], 0),
    "cumprod": lambda w, x: jnp.cumprod(1 + x * w[0, 0] / 9, 1),
    "cummax": lambda w, x: lax.cummax(x * w[0, 0], 0),
    "cumlogsumexp": lambda w, x: lax.cumlogsumexp(x * w[0, 0], 0),
    "associative_scan": lambda w, x: lax.associative_scan(jnp.multiply, 1 + x * w[0, 0] / 9),
    "scan": lambda w, x: lax.scan(lambda s, a: (jnp.tanh(w @ s) + a, s), x[0, :3], x[:, :3])[1],
    "map": lambda w, x: lax.map(lambda a: jnp.tanh(w @ a), x[:, :3]),
    "fori_loop": lambda w, x: lax.fori_loop(0, 3, lambda _, s: jnp.tanh(w @ s), x[:3]),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.square, x * w[0, 0]),
    "while_loop": lambda w, x: (
        w[0, 0]
        * lax.stop_gradient(
            lax.while_loop(
                lambda s: s[0] < 3, lambda s: (s[0] + jnp.abs(s[1]) + 1, s[1]), (x[0, 0], x[0, 1])
            )[0]
        )
    ),
    "einsum": lambda w, x: jnp.einsum("ij,jk,kl->il", x[:3, :3], w, x[:3, :3]),
    "dot of integers": lambda w, x: w[0, 0] * (jnp.round(9 * x).astype(int) @ jnp.ones(6, int)),
    "pad": lambda w, x: jnp.pad(x * w[0, 0], 1, mode="reflect"),
    "roll": lambda w, x: jnp.roll(x, 2, 0) * jnp.roll(w, 1)[0, 0],
    "logsumexp": lambda w, x: jax.nn.logsumexp(x[:, :3] @ w, 1),
    "softmax": lambda w, x: jax.nn.softmax(x[:, :3] @ w),
    "argmax": lambda w, x: w[jnp.argmax(x[0]) % 3],
    "interp": lambda w, x: jnp.interp(x[0], jnp.linspace(-2, 2, 3), w[0]),
    "searchsorted": lambda w, x: w[0, 0] * jnp.searchsorted(jnp.linspace(-1, 1, 5), x[0]),
    "polyval": lambda w, x: jnp.polyval(w[0], x),
    "erf_inv": lambda w, x: lax.erf_inv(jnp.tanh(x * w[0, 0]) / 2),
    "gamma": lambda w, x: lax.lgamma(1 + jnp.abs(x * w[0, 0])),
    "resize": lambda w, x: jax.image.resize(x * w[0, 0], (4, 5), "linear"),
    "callback": called_back,
}
# Of each kind of operation that XLA could divide, one.
SOME_OPERATIONS = (
    *("convolution ('NHWC', 'HWIO', 'NHWC'), strided", "fft", "sort", "top_k", "scatter add"),
    *("scatter by item", "gather", "dynamic_slice", "cholesky", "solve", "random bits"),
    *("reduce_window max", "cumsum", "associative_scan", "scan", "cond", "while_loop", "einsum"),
    *("argmax", "callback"),
)
