# SPDX-License-Identifier: MIT
"""The operations of JAX, with the arguments of one item: what `test_ops.py` maps.

A sample is a call. A name such as ``f23`` in it is an array of the item, here of shape (2, 3); its
letter says what is in it (`VALUES`), and names that differ in ``_`` at the end are two arrays.
"""

import importlib
from collections.abc import Callable

import jax
import numpy as np

# How a sample names the modules.
MODULES = {
    alias: importlib.import_module(name)
    for alias, name in {
        "lax": "jax.lax",
        "jnp": "jax.numpy",
        "linalg": "jax.numpy.linalg",
        "fft": "jax.numpy.fft",
        "nn": "jax.nn",
        "random": "jax.random",
        "special": "jax.scipy.special",
        "slinalg": "jax.scipy.linalg",
        "sparse": "jax.scipy.sparse.linalg",
        "optimize": "jax.scipy.optimize",
    }.items()
}


def _definite(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    a = rng.uniform(-1, 1, shape)
    return a @ np.swapaxes(a, -1, -2) + 3 * np.eye(shape[-1])


# The values of many items at once, whose shape is the batch axis and that of the item.
VALUES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray | jax.Array]] = {
    "f": lambda rng, shape: rng.uniform(-2, 2, shape).astype("float32"),
    "p": lambda rng, shape: rng.uniform(0.1, 0.9, shape).astype("float32"),
    "g": lambda rng, shape: rng.uniform(1.1, 3, shape).astype("float32"),
    "s": lambda rng, shape: _definite(rng, shape).astype("float32"),
    "c": lambda rng, shape: (rng.normal(size=(*shape, 2)) @ [1, 1j]).astype("complex64"),
    "b": lambda rng, shape: rng.integers(0, 2, shape).astype(bool),
    "i": lambda rng, shape: rng.integers(-5, 9, shape).astype("int32"),
    "q": lambda rng, shape: rng.integers(1, 8, shape).astype("int32"),
    "n": lambda rng, shape: rng.integers(0, 3, shape).astype("int32"),  # an index into three
    "u": lambda rng, shape: rng.integers(0, 256, shape).astype("uint8"),
    "k": lambda rng, shape: jax.random.wrap_key_data(
        rng.integers(0, 2**32, (*shape, 2)).astype("uint32")
    ),
}

# Operations that are called alike: the call, and their names.
ALIKE = {
    "jnp.{}(f3)": """
        abs absolute all any amax amin angle arcsinh arctan argmax argmin argsort around array
        asarray asinh atan atleast_1d atleast_2d atleast_3d cbrt ceil conj conjugate copy cos cosh
        count_nonzero cumprod cumsum cumulative_prod cumulative_sum deg2rad degrees diag diagflat
        diff ediff1d empty_like exp exp2 expm1 fabs fix flip floor frexp gradient i0 imag iscomplex
        iscomplexobj isfinite isinf isnan isneginf isposinf isreal isrealobj isscalar max mean
        median min minmax modf nan_to_num nanargmax nanargmin nancumprod nancumsum nanmax nanmean
        nanmedian nanmin nanprod nanstd nansum nanvar ndim negative ones_like positive
        prod ptp rad2deg radians ravel real rint round shape sign signbit sin sinc sinh size sort
        sort_complex spacing square squeeze std sum tan tanh transpose trapezoid trunc unstack
        unwrap vander var zeros_like poly polyder polyint ix_ iterable block meshgrid
        broadcast_arrays""",
    "jnp.{}(p3)": "acos arccos arcsin arctanh asin atanh log log10 log1p log2 reciprocal sqrt",
    "jnp.{}(i3)": "bitwise_count bitwise_invert bitwise_not invert",
    "jnp.{}(g3)": "acosh arccosh",
    "jnp.{}(f3, f3_)": """
        add allclose append arctan2 array_equal array_equiv atan2 convolve copysign corrcoef
        correlate cov cross digitize divide divmod dot equal floor_divide fmax fmin fmod greater
        greater_equal heaviside histogram_bin_edges hypot inner isclose isin kron less less_equal
        logaddexp logaddexp2 logical_and logical_or logical_xor matmul maximum minimum mod multiply
        nextafter not_equal outer polyadd polydiv polymul polysub polyval remainder searchsorted
        subtract true_divide vdot vecdot""",
    "jnp.{}(p3, f3)": "float_power pow power",
    "jnp.{}(i3, i3_)": "bitwise_and bitwise_or bitwise_xor",
    "jnp.{}(q3, n3)": "bitwise_left_shift bitwise_right_shift left_shift right_shift",
    "jnp.{}(q3, q3_)": "gcd lcm",
    "jnp.{}(b3)": "logical_not",
    "jnp.{}([f3, f3_])": """
        column_stack concat concatenate dstack hstack stack vstack lexsort""",
    "jnp.{}(f23)": """
        fliplr flipud matrix_transpose rot90 trace tril triu diagonal tril_indices_from
        triu_indices_from""",
    "jnp.{}(f33)": "diag_indices_from",
    "jnp.{}(f3, size=3)": """
        argwhere flatnonzero nonzero unique unique_all unique_counts unique_inverse
        unique_values""",
    "jnp.{}(i3, i3_, size=3)": "intersect1d setdiff1d setxor1d union1d",
    "jnp.{}(b3, f3, size=3)": "compress extract",
    "jnp.{}(f3, p)": "nanpercentile nanquantile percentile quantile",
    "jnp.{}(f24, 2)": "array_split hsplit split vsplit",
    "lax.{}(f3)": """
        abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh cumlogsumexp
        cummax cummin cumprod cumsum digamma erf erfc exp exp2 expm1 floor is_finite lgamma logistic
        neg one_minus_square optimization_barrier round sign sin sinh sort square
        stop_gradient tan tanh stage zeros_like_array""",
    "lax.{}(p3)": "acos asin atanh erf_inv log log1p log2 reciprocal rsqrt sqrt",
    "lax.{}(g3)": "acosh",
    "lax.{}(f3, f3_)": """
        add atan2 div dot eq ge gt le lt max min mul ne nextafter rem sub""",
    "lax.{}(p3, f3)": "pow",
    "lax.{}(p3, p3_)": "igamma igamma_grad_a igammac random_gamma_grad",
    "lax.{}(c3)": "conj imag real",
    "lax.{}(i3)": "bitwise_not clz population_count",
    "lax.{}(i3, i3_)": "bitwise_and bitwise_or bitwise_xor mulhi",
    "lax.{}(q3, n3)": "shift_left shift_right_arithmetic shift_right_logical",
    "lax.{}(f23, (0,))": "reduce_max reduce_min reduce_prod reduce_sum",
    "lax.{}(b23, (0,))": "reduce_and reduce_or reduce_xor",
    "linalg.{}(s33)": """
        cholesky cond det eig eigh eigvals eigvalsh inv matrix_norm matrix_rank norm pinv qr slogdet
        svd svdvals diagonal matrix_transpose trace vector_norm""",
    "linalg.{}(f33, f33_)": "matmul tensordot vecdot",
    "linalg.{}(f3, f3_)": "cross outer",
    "fft.{}(c4)": "fft fftn fftshift hfft ifft ifftn ifftshift irfft irfftn",
    "fft.{}(c24)": "fft2 ifft2 irfft2",
    "fft.{}(f4)": "ihfft rfft rfftn",
    "fft.{}(f24)": "rfft2",
    "nn.{}(f3)": """
        celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid
        log_softmax logmeanexp logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax
        softplus sparse_plus sparse_sigmoid squareplus standardize swish tanh""",
    "nn.{}(p3)": "log1mexp",
    "nn.{}(f4)": "glu",
    "random.{}(k, (3,))": """
        bits cauchy exponential gumbel laplace logistic maxwell normal
        rademacher uniform""",
    "random.{}(k)": "clone key_data split",
    "random.{}(k, p)": """
        bernoulli chisquare gamma geometric loggamma pareto poisson rayleigh t wald""",
    "special.{}(f3)": """
        dawsn digamma erf erfc erfcx expit fresnel gamma gammaln gammasgn i0 i0e i1 i1e
        log_ndtr log_softmax loggamma logsumexp ndtr sici softmax wofz expi""",
    "special.{}(p3)": "entr erfinv logit ndtri exp1 spence erfcinv",
    "special.{}(p3, p3_)": """
        beta betaln boxcox boxcox1p gammainc gammaincc kl_div poch rel_entr xlog1py xlogy
        owens_t comb""",
    "slinalg.{}(s33)": """
        cho_factor cholesky det eigh expm inv lu lu_factor qr schur sqrtm svd hessenberg polar""",
    "slinalg.{}(f3)": "circulant companion fiedler fiedler_companion hankel toeplitz",
    "slinalg.{}(s33, f3)": "solve solve_triangular",
    "jnp.{}(f3, 1)": "argpartition delete partition",
    "jnp.{}(f, f_, 3)": "linspace logspace",
    "jnp.{}(f23, 0, 1)": "moveaxis swapaxes",
    "lax.{}(f3, 2)": "approx_max_k approx_min_k full_like top_k",
    'lax.{}(f3, 0, "int32")': "argmax argmin",
    "lax.{}(f3, (2,))": "broadcast tile",
    "lax.{}(f3, (0,))": "expand_dims rev",
    "lax.{}(f3, n11, f1, lax.ScatterDimensionNumbers((), (0,), (0,)))": "scatter scatter_mul",
    "lax.{}(f3, n21, f2, lax.ScatterDimensionNumbers((), (0,), (0,)))": """
        scatter_add scatter_max scatter_min scatter_sub""",
    "random.{}(k, p, p_)": "beta weibull_min",
    "random.{}(k, f3)": "categorical choice permutation",
    "random.{}(n)": "key PRNGKey",
    "slinalg.{}(f3, f2)": "eigh_tridiagonal leslie",
    "sparse.{}(lambda x: s33 @ x, f3)": "bicgstab cg gmres",
}

SAMPLES = """
    jnp.apply_along_axis(lambda x: x.sum(), 0, f23)
    jnp.bincount(n3, length=3)
    jnp.choose(n3, [f3, f3_, f3__], mode="clip")
    jnp.einsum("ij,jk->ik", f23, f34)
    jnp.frompyfunc(lambda x, y: x * y, 2, 1, identity=1)(f3, f3_)
    jnp.interp(f3, jnp.arange(3.), f3_)
    jnp.packbits(b3)
    jnp.piecewise(f3, [f3 < 0, f3 > 1], [lambda x: -x, jnp.sin, 2.])
    jnp.repeat(f3, n3, total_repeat_length=5)
    jnp.roll(f3, n)
    jnp.roots(f4, strip_zeros=False)
    jnp.select([b3, b3_], [f3, f3_], 1.)
    jnp.take(f3, n2)
    jnp.vectorize(jnp.dot, signature="(n),(n)->()")(f23, f23_)
    jnp.where(b3, f3, f3_)

    lax.associative_scan(lax.mul, f3)
    lax.betainc(p3, p3_, p3__)
    lax.bitcast_convert_type(f3, "int32")
    lax.broadcast_in_dim(f3, (2, 3), (1,))
    lax.clamp(-1., f3, 1.)
    lax.complex(f3, f3_)
    lax.concatenate([f3, f3_], 0)
    lax.cond(b, jnp.sin, lambda x: x * x, f3)
    lax.conv_general_dilated(f1144, f1122, (2, 1), "VALID", rhs_dilation=(1, 2))
    lax.conv_general_dilated(f1441, f2211, (2, 1), "SAME",
                             dimension_numbers=("NHWC", "HWIO", "NHWC"))
    lax.conv_general_dilated_local(f1133, f1422, (1, 1), "VALID", (2, 2))
    lax.conv_general_dilated_patches(f1144, (2, 2), (1, 1), "VALID")
    lax.conv_transpose(f1331, f2211, (2, 2), "SAME")
    lax.convert_element_type(f3, "int32")
    lax.custom_linear_solve(lambda x: s33 @ x, f3, lambda _, b: jnp.linalg.solve(s33, b),
                            lambda _, b: jnp.linalg.solve(s33.T, b))
    lax.custom_root(lambda x: x**3 - p, p_,
                    lambda f, x: lax.fori_loop(0, 9, lambda i, x: x - f(x) / (3 * x**2), x),
                    lambda g, y: y / g(1.))
    lax.dot_general(f223, f234, (((2,), (1,)), ((0,), (0,))))
    lax.dynamic_slice(f3, (n,), (2,))
    lax.dynamic_update_slice(f3, f2, (n,))
    lax.fft(c4, "FFT", (4,))
    lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) * f3, f3_)
    lax.fori_loop(0, n, lambda i, x: jnp.sin(x), f3)
    lax.gather(f33, n21, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 3))
    lax.index_take(f33, (n2, n2_), (0, 1))
    lax.integer_pow(f3, 3)
    lax.map(jnp.sin, f23)
    lax.map(jnp.sin, f53, batch_size=2)
    lax.pad(f3, f, [(1, 2, 1)])
    lax.platform_dependent(f3, default=jnp.sin)
    lax.polygamma(g3, p3)
    lax.polynomial(f3, f3_)
    lax.reduce(f23, jnp.float32(0), lax.add, (0,))
    lax.reduce((f3, i3), (jnp.float32(0), jnp.int32(0)),
               lambda x, y: (x[0] + y[0], x[1] * y[1]), (0,))
    lax.reduce_precision(f3, 5, 4)
    lax.reduce_window(f4, jnp.float32(0), lax.add, (2,), (1,), "VALID")
    lax.reduce_window(f4, -jnp.float32(jnp.inf), lax.max, (2,), (2,), "VALID")
    lax.reshape(f23, (3, 2))
    lax.scaled_dot(f23, f34)
    lax.scan(lambda a, b: (jnp.sin(a) * b, a * b), f, f3)
    lax.scatter_apply(f3, n11, jnp.sin, lax.ScatterDimensionNumbers((), (0,), (0,)),
                      update_shape=(1,))
    lax.select(b3, f3, f3_)
    lax.select_n(n3, f3, f3_, f3__)
    lax.slice(f4, (1,), (4,), (2,))
    lax.sort((n3, f3), num_keys=1)
    lax.split(f3, (1, 2))
    lax.squeeze(f31, (1,))
    lax.switch(n, [jnp.sin, jnp.cos, lambda x: x * x], f3)
    lax.transpose(f23, (1, 0))
    lax.while_loop(lambda x: x[0] < 3, lambda x: (x[0] + 1, jnp.sin(x[1])), (n, f3))
    lax.with_sharding_constraint(f3, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    lax.zeta(g3, p3)

    linalg.lstsq(f32, f3)
    linalg.matrix_power(f22, 3)
    linalg.solve(s33, f3)

    nn.dot_product_attention(f322, f322_, f322__)
    nn.one_hot(n3, 3)

    random.ball(k, 2)
    random.binomial(k, 5, p)
    random.dirichlet(k, p3)
    random.fold_in(k, n)
    random.multinomial(k, 5, p3)
    random.multivariate_normal(k, f3, s33)
    random.randint(k, (3,), 0, q)
    random.truncated_normal(k, -p, p_)

    special.bessel_jn(p, v=2)
    special.expn(2, p3)
    special.hyp1f1(p, g, p_)
    special.hyp2f1(p, p_, g, p__)
    special.sph_harm_y(n1, n1_, p1, p1_, n_max=2)

    slinalg.cho_solve((s33, True), f3)
    slinalg.funm(s33, jnp.exp, disp=False)
    optimize.minimize(lambda x: ((x - f3)**2).sum(), f3_, method="BFGS")
"""

COLLECTIVE = "would see the items of one chunk only"

# What cannot be mapped, and words of the error. `jax.vmap` maps collectives only.
CANNOT = {
    COLLECTIVE: """
        lax.psum(f3, "x")
        lax.all_gather(f3, "x")
        lax.all_to_all(f5, "x", 0, 0)
        lax.axis_index("x") + n
        lax.pcast(f3, "x", to="varying")
        lax.ppermute(f3, "x", [(0, 1)])
        lax.psum_scatter(f5, "x")
        lax.ragged_all_to_all(f3, f3, i5, i5, i5, i5, axis_name="x")
    """,
    # The shape, or the branch, would depend on values.
    "depends on the value of the argument": """
        jnp.array_repr(f3)
        jnp.array_str(f3)
        jnp.nonzero(f3)
        jnp.repeat(f3, n3)
        jnp.trim_zeros(f3)
    """,
    # JAX has no rule.
    "Batching rule for .* not implemented": """
        lax.composite(lambda x: jnp.sin(x) * x, "my.sine")(f3)
        lax.rng_uniform(f, f_, (3,))
    """,
    "vmap over any dim but 0": """
        lax.ragged_dot(f43, f232, jnp.array([1, 3]))
        lax.ragged_dot_general(f43, f232, jnp.array([1, 3]),
                               lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]))
    """,
    # A bug of JAX before 0.12, and no derivative after.
    r"foreach\(\) argument 2|'int' object is not iterable|returned None": """
        lax.dce_sink(f3)
    """,
    "returned a str at output, but outputs must be arrays or numbers": "random.key_impl(k)",
}
