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
        "signal": "jax.scipy.signal",
        "sfft": "jax.scipy.fft",
        "integrate": "jax.scipy.integrate",
        "ndimage": "jax.scipy.ndimage",
        "stats": "jax.scipy.stats",
        "norm": "jax.scipy.stats.norm",
        "vq": "jax.scipy.cluster.vq",
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
    "jnp.{}(b3)": "logical_not packbits",
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
        add atan2 complex div dot eq ge gt le lt max min mul ne nextafter polynomial rem
        sort_key_val sub""",
    "lax.{}(p3, f3)": "pow",
    "lax.{}(p3, p3_)": "igamma igamma_grad_a igammac random_gamma_grad",
    "lax.{}(g3, p3)": "polygamma zeta",
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
        bernoulli chisquare gamma geometric loggamma lognormal pareto poisson rayleigh t wald""",
    "special.{}(f3)": """
        dawsn digamma erf erfc erfcx expit fresnel gamma gammaln gammasgn i0 i0e i1 i1e
        log_ndtr log_softmax loggamma logsumexp ndtr sici softmax wofz expi""",
    "special.{}(p3)": "entr erfinv logit ndtri exp1 spence erfcinv",
    "special.{}(p3, p3_)": """
        beta betaln boxcox boxcox1p gammainc gammaincc kl_div poch rel_entr xlog1py xlogy
        owens_t comb""",
    "special.{}(2, p3)": "expn polygamma",
    "slinalg.{}(s33)": """
        cho_factor cholesky det eigh expm inv lu lu_factor qr schur sqrtm svd hessenberg polar""",
    "slinalg.{}(f3)": "circulant companion fiedler fiedler_companion hankel toeplitz",
    "slinalg.{}(s33, f3)": "qr_multiply solve solve_triangular",
    "signal.{}(f4, f3)": "convolve correlate fftconvolve",
    "signal.{}(f34, f23)": "convolve2d correlate2d",
    "sfft.{}(f4)": "dct dctn idct idctn",
    "stats.{}(f3)": "mode rankdata sem",
    "norm.{}(f3)": "cdf logcdf logpdf logsf pdf sf",
    "norm.{}(p3)": "isf ppf",
    "jnp.{}(f3, 1)": "argpartition delete partition",
    "jnp.{}(f3, 2)": "histogram tile top_k",
    "jnp.{}(f, f_, 3)": "linspace logspace",
    "jnp.{}(f23, 0, 1)": "moveaxis swapaxes",
    "lax.{}(f3, 2)": "approx_max_k approx_min_k broadcast_to_rank full_like top_k",
    'lax.{}(f3, "int32")': "bitcast_convert_type convert_element_type",
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
    "signal.{}(f8, nperseg=4)": "stft welch",
    "sparse.{}(lambda x: s33 @ x, f3)": "bicgstab cg gmres",
}

SAMPLES = """
    jnp.apply_along_axis(lambda x: x.sum(), 0, f23)
    jnp.apply_over_axes(jnp.sum, f23, [0])
    jnp.astype(f3, int)
    jnp.average(f3, weights=p3)
    jnp.bincount(n3, length=3)
    jnp.broadcast_to(f3, (2, 3))
    jnp.choose(n3, [f3, f3_, f3__], mode="clip")
    jnp.clip(f3, -1, f3_)
    jnp.einsum("ij,jk->ik", f23, f34)
    jnp.expand_dims(f3, 0)
    jnp.fill_diagonal(f33, f, inplace=False)
    jnp.fromfunction(lambda x: x * f, (3,))
    jnp.frompyfunc(lambda x, y: x * y, 2, 1, identity=1)(f3, f3_)
    jnp.full((3,), f)
    jnp.full_like(f3, f)
    jnp.dsplit(f232, 2)
    jnp.geomspace(p, g, 3)
    jnp.histogram2d(f3, f3_, 2)
    jnp.histogramdd(f32, 2)
    jnp.insert(f3, 1, f)
    jnp.interp(f3, jnp.arange(3.), f3_)
    jnp.kaiser(3, f)
    jnp.ldexp(f3, n3)
    jnp.matvec(f23, f3)
    jnp.pad(f3, 1, mode="edge")
    jnp.permute_dims(f23, (1, 0))
    jnp.piecewise(f3, [f3 < 0, f3 > 1], [lambda x: -x, jnp.sin, 2.])
    jnp.place(f3, b3, f3_, inplace=False)
    jnp.polyfit(f3, f3_, 1)
    jnp.put(f3, n2, f2, inplace=False)
    jnp.put_along_axis(f3, n2, f2, 0, inplace=False)
    jnp.ravel_multi_index((n3, n3_), (3, 3), mode="clip")
    jnp.repeat(f3, n3, total_repeat_length=5)
    jnp.reshape(f23, (3, 2))
    jnp.resize(f3, (4,))
    jnp.roll(f3, n)
    jnp.rollaxis(f23, 1)
    jnp.roots(f4, strip_zeros=False)
    jnp.select([b3, b3_], [f3, f3_], 1.)
    jnp.take(f3, n2)
    jnp.take_along_axis(f3, n2, 0)
    jnp.tensordot(f23, f34, 1)
    jnp.unpackbits(u2)
    jnp.unravel_index(q3, (3, 3))
    jnp.vecmat(f2, f23)
    jnp.vectorize(jnp.dot, signature="(n),(n)->()")(f23, f23_)
    jnp.where(b3, f3, f3_)

    lax.associative_scan(lax.mul, f3)
    lax.batch_matmul(f223, f232)
    lax.betainc(p3, p3_, p3__)
    lax.broadcast_in_dim(f3, (2, 3), (1,))
    lax.broadcast_like(f3, f23)
    lax.clamp(-1., f3, 1.)
    lax.collapse(f23, 0)
    lax.concatenate([f3, f3_], 0)
    lax.cond(b, jnp.sin, lambda x: x * x, f3)
    lax.conv(f1144, f1122, (1, 1), "SAME")
    lax.conv_general_dilated(f1144, f1122, (2, 1), "VALID", rhs_dilation=(1, 2))
    lax.conv_general_dilated(f1441, f2211, (2, 1), "SAME",
                             dimension_numbers=("NHWC", "HWIO", "NHWC"))
    lax.conv_general_dilated_local(f1133, f1422, (1, 1), "VALID", (2, 2))
    lax.conv_general_dilated_patches(f1144, (2, 2), (1, 1), "VALID")
    lax.conv_transpose(f1331, f2211, (2, 2), "SAME")
    lax.conv_with_general_padding(f1144, f1122, (1, 1), "SAME", None, None)
    lax.custom_linear_solve(lambda x: s33 @ x, f3, lambda _, b: jnp.linalg.solve(s33, b),
                            lambda _, b: jnp.linalg.solve(s33.T, b))
    lax.custom_root(lambda x: x**3 - p, p_,
                    lambda f, x: lax.fori_loop(0, 9, lambda i, x: x - f(x) / (3 * x**2), x),
                    lambda g, y: y / g(1.))
    lax.dot_general(f223, f234, (((2,), (1,)), ((0,), (0,))))
    lax.dynamic_index_in_dim(f3, n)
    lax.dynamic_slice(f3, (n,), (2,))
    lax.dynamic_slice_in_dim(f3, n, 2)
    lax.dynamic_update_index_in_dim(f3, f, n, 0)
    lax.dynamic_update_slice(f3, f2, (n,))
    lax.dynamic_update_slice_in_dim(f3, f2, n, 0)
    lax.fft(c4, "FFT", (4,))
    lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) * f3, f3_)
    lax.fori_loop(0, n, lambda i, x: jnp.sin(x), f3)
    lax.full((3,), f)
    lax.gather(f33, n21, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 3))
    lax.index_in_dim(f3, 1)
    lax.index_take(f33, (n2, n2_), (0, 1))
    lax.integer_pow(f3, 3)
    lax.map(jnp.sin, f23)
    lax.map(jnp.sin, f53, batch_size=2)
    lax.pad(f3, f, [(1, 2, 1)])
    lax.platform_dependent(f3, default=jnp.sin)
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
    lax.slice_in_dim(f4, 1, 3)
    lax.sort((n3, f3), num_keys=1)
    lax.split(f3, (1, 2))
    lax.squeeze(f31, (1,))
    lax.stack([f3, f3_])
    lax.switch(n, [jnp.sin, jnp.cos, lambda x: x * x], f3)
    lax.transpose(f23, (1, 0))
    lax.unstack(f23)
    lax.while_loop(lambda x: x[0] < 3, lambda x: (x[0] + 1, jnp.sin(x[1])), (n, f3))
    lax.with_sharding_constraint(f3, jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    linalg.lstsq(f32, f3)
    linalg.matrix_power(f22, 3)
    linalg.multi_dot([f23, f32, f22])
    linalg.solve(s33, f3)
    linalg.tensorinv(f1212, 2)
    linalg.tensorsolve(f1212, f12)

    nn.dot_product_attention(f322, f322_, f322__)
    nn.one_hot(n3, 3)
    nn.scaled_dot_general(f23, f34, (((1,), (0,)), ((), ())))

    random.ball(k, 2)
    random.binomial(k, 5, p)
    random.dirichlet(k, p3)
    random.double_sided_maxwell(k, f, p)
    random.f(k, g, g_)
    random.fold_in(k, n)
    random.generalized_normal(k, 2., (3,))
    random.multinomial(k, 5, p3)
    random.multivariate_normal(k, f3, s33)
    random.orthogonal(k, 3)
    random.randint(k, (3,), 0, q)
    random.triangular(k, 0., p, 1.)
    random.truncated_normal(k, -p, p_)
    random.wrap_key_data(jax.random.key_data(k))

    special.bessel_jn(p, v=2)
    special.betainc(p3, p3_, p3__)
    special.factorial(n3)
    special.hyp1f1(p, g, p_)
    special.hyp2f1(p, p_, g, p__)
    special.multigammaln(g3, 2)
    special.sph_harm_y(n1, n1_, p1, p1_, n_max=2)
    special.zeta(g3, p3)

    slinalg.block_diag(f22, f12)
    slinalg.cho_solve((s33, True), f3)
    slinalg.convolution_matrix(f3, 2)
    slinalg.expm_frechet(f22, f22_)
    slinalg.funm(s33, jnp.exp, disp=False)
    slinalg.lu_solve(jax.scipy.linalg.lu_factor(s33), f3)
    slinalg.rsf2csf(f33, s33)
    slinalg.solve_sylvester(s33, s33_, f33)

    signal.csd(f8, f8_, nperseg=4)
    signal.detrend(f4)
    signal.istft(jnp.ones((3, 1)) * c33, nperseg=4)
    integrate.trapezoid(f3, f3_)
    ndimage.map_coordinates(f33, [p3, p3_], 1)
    vq.vq(f32, f22)
    optimize.minimize(lambda x: ((x - f3)**2).sum(), f3_, method="BFGS")
"""

# What is not compared, by the reason.
NOT_COMPARED = {
    "makes arrays of numbers that shapes depend on": """
        jnp.arange jnp.bartlett jnp.blackman jnp.diag_indices jnp.empty jnp.eye jnp.hamming
        jnp.hanning jnp.identity jnp.indices jnp.mask_indices jnp.ones jnp.tri jnp.tril_indices
        jnp.triu_indices jnp.zeros lax.broadcasted_iota lax.empty lax.iota fft.fftfreq fft.rfftfreq
        special.bernoulli slinalg.dft slinalg.hadamard slinalg.helmert slinalg.hilbert
        slinalg.invhilbert slinalg.invpascal slinalg.pascal""",
    "asks about shapes, dtypes or axes": """
        jnp.broadcast_shapes jnp.can_cast jnp.einsum_path jnp.isdtype jnp.issubdtype
        jnp.promote_types jnp.result_type lax.broadcast_shapes lax.conv_dimension_numbers
        lax.conv_general_permutations lax.conv_general_shape_tuple lax.conv_shape_tuple
        lax.conv_transpose_shape_tuple lax.dtype lax.padtype_to_pads lax.reduce_window_shape_tuple
        lax.shape_as_value lax.ConvGeneralDilatedDimensionNumbers lax.DotDimensionNumbers
        lax.PrecisionLike lax.axis_size nn.get_scaled_dot_general_config random.key_dtype
        random.Key""",
    "reads, writes or prints": """
        jnp.from_dlpack jnp.frombuffer jnp.fromfile jnp.fromiter jnp.fromstring jnp.load
        jnp.save jnp.savez jnp.get_printoptions jnp.printoptions jnp.set_printoptions""",
    "jax.vmap draws other numbers than a loop": "lax.rng_bit_generator",
    "runs on GPUs only": "nn.scaled_matmul",
    "is refused as other collectives are": """
        lax.all_gather_invariant lax.pbroadcast lax.pmax lax.pmean lax.pmin lax.pshuffle
        lax.psum_scatter_start lax.pswapaxes""",
    "is about effects or devices": """
        lax.after_all lax.create_token lax.precv lax.psend lax.pvary""",
}

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
