# SPDX-License-Identifier: MIT
"""Functions of JAX with a derivative rule, a loop or a constant inside, by module and name.

Each takes weights (3, 3), which all items share, and an item (3, 3). A `lambda` around a function
of JAX is there where JAX 0.10 has no such function: it looks for it when it is called.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax, nn
from jax.lax import linalg as lapack
from jax.scipy import linalg, special

ROW = np.array([0.5, -1.0, 2.0], np.float32)


def near_identity(w, x):
    return 3 * jnp.eye(3) + jnp.tanh(x @ w) / 3


def symmetric(w, x):
    m = near_identity(w, x)
    return (m + m.T) / 2 + jnp.diag(jnp.arange(3.0))


def positive(w, x):
    m = near_identity(w, x)
    return m @ m.T + jnp.eye(3)


def of(fun, matrix):
    """A function of one matrix."""
    return lambda w, x: fun(matrix(w, x))


def built(constant):
    """A function that makes a constant."""
    return lambda w, x: jnp.tanh(x @ w) @ jnp.asarray(constant(), x.dtype)


def fixed(fun):
    """A function that JAX cannot differentiate."""
    return lambda w, x: fun(lax.stop_gradient(w), lax.stop_gradient(x))


def each(fun):
    """A function of any number, for which arguments between -1 and 1 are right."""
    return lambda w, x: fun(jnp.tanh(x * w) * 0.9)


def each_positive(fun):
    return lambda w, x: fun(1.2 + jnp.tanh(x * w))


def of_two(fun):
    """A function of two positive numbers."""
    return lambda w, x: fun(1.2 + jnp.tanh(x * w), 1.3 + jnp.tanh(x))


LINALG = {
    "block_diag": lambda w, x: linalg.block_diag(x @ w, x),
    "cho_factor": of(lambda m: jnp.tril(linalg.cho_factor(m, lower=True)[0]), positive),
    "cho_solve": lambda w, x: linalg.cho_solve(linalg.cho_factor(positive(w, x)), x[0]),
    "cholesky": of(linalg.cholesky, positive),
    "circulant": lambda w, x: linalg.circulant((x @ w)[0]),
    "companion": lambda w, x: linalg.companion(2 + jnp.tanh(x @ w)[0]),
    "convolution_matrix": lambda w, x: linalg.convolution_matrix((x @ w)[0], 4),
    "det": of(linalg.det, near_identity),
    "dft": lambda w, x: jnp.abs(linalg.dft(3) @ (3 + jnp.tanh(x @ w))),
    "eigh": of(lambda m: linalg.eigh(m)[0], symmetric),
    "eigh_tridiagonal": fixed(
        lambda w, x: linalg.eigh_tridiagonal(x[0], (x @ w)[1, :2], eigvals_only=True)
    ),
    "expm": lambda w, x: linalg.expm(0.1 * x * w),
    "expm_frechet": lambda w, x: linalg.expm_frechet(0.1 * x * w, x, compute_expm=False),
    "fiedler": lambda w, x: linalg.fiedler((x @ w)[0]),
    "fiedler_companion": lambda w, x: linalg.fiedler_companion(2 + jnp.tanh(x @ w)[0]),
    "funm": fixed(lambda w, x: jnp.abs(linalg.funm(symmetric(w, x), jnp.sin))),
    "hadamard": lambda w, x: x[:, :2] @ linalg.hadamard(2) * w[0, 0],
    "hankel": lambda w, x: linalg.hankel((x @ w)[0]),
    "helmert": built(lambda: linalg.helmert(3, True)),
    "hessenberg": fixed(lambda w, x: jnp.abs(linalg.hessenberg(near_identity(w, x)))),
    "hilbert": built(lambda: linalg.hilbert(3)),
    "inv": of(linalg.inv, near_identity),
    "invhilbert": built(lambda: linalg.invhilbert(3)),
    "invpascal": built(lambda: linalg.invpascal(3)),
    "leslie": lambda w, x: linalg.leslie((x @ w)[0], x[1, :2]),
    "lu": of(lambda m: linalg.lu(m)[1:], near_identity),
    "lu_factor": of(lambda m: linalg.lu_factor(m)[0], near_identity),
    "lu_solve": lambda w, x: linalg.lu_solve(linalg.lu_factor(near_identity(w, x)), x[0]),
    "pascal": built(lambda: linalg.pascal(3)),
    "polar": fixed(lambda w, x: linalg.polar(near_identity(w, x))[0]),
    "qr": of(lambda m: jnp.abs(linalg.qr(m)[1]), near_identity),
    "qr_multiply": fixed(lambda w, x: jnp.abs(linalg.qr_multiply(near_identity(w, x), x)[0])),
    "rsf2csf": fixed(lambda w, x: jnp.abs(linalg.rsf2csf(*linalg.schur(symmetric(w, x)))[0])),
    "schur": fixed(lambda w, x: jnp.abs(linalg.schur(symmetric(w, x))[0])),
    "solve": lambda w, x: linalg.solve(near_identity(w, x), x[0]),
    "solve_sylvester": fixed(
        lambda w, x: jnp.real(linalg.solve_sylvester(near_identity(w, x), positive(w, x), x))
    ),
    "solve_triangular": lambda w, x: linalg.solve_triangular(near_identity(w, x), x[0]),
    "sqrtm": fixed(lambda w, x: jnp.real(linalg.sqrtm(positive(w, x)))),
    "svd": of(lambda m: linalg.svd(m, compute_uv=False), symmetric),
    "toeplitz": lambda w, x: linalg.toeplitz((x @ w)[0]),
}
LAPACK = {
    "cholesky": of(lapack.cholesky, positive),
    "eig": of(
        lambda m: jnp.abs(
            lapack.eig(m, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]
        ).sum(),
        symmetric,
    ),
    "eigh": of(lambda m: lapack.eigh(m)[1], symmetric),
    "hessenberg": fixed(lambda w, x: jnp.abs(lapack.hessenberg(near_identity(w, x))[0])),
    "householder_product": fixed(lambda w, x: lapack.householder_product(jnp.tanh(x @ w), x[0])),
    "lu": of(lambda m: lapack.lu(m)[0], near_identity),
    "lu_pivots_to_permutation": lambda w, x: x[
        lapack.lu_pivots_to_permutation(lapack.lu(near_identity(w, x))[1], 3)
    ],
    "ormqr": fixed(lambda w, x: lapack.ormqr(jnp.tanh(x @ w), x[0], x)),
    "qdwh": fixed(lambda w, x: lapack.qdwh(near_identity(w, x))[0]),
    "qr": of(lambda m: jnp.abs(lapack.qr(m)[1]), near_identity),
    "schur": fixed(lambda w, x: jnp.abs(lapack.schur(symmetric(w, x))[0])),
    "svd": of(lambda m: lapack.svd(m, compute_uv=False), symmetric),
    "symmetric_product": fixed(
        lambda w, x: jnp.tril(lapack.symmetric_product(x @ w, symmetric(w, x)))
    ),
    "triangular_solve": lambda w, x: lapack.triangular_solve(near_identity(w, x), x),
    "tridiagonal": fixed(lambda w, x: jnp.abs(lapack.tridiagonal(symmetric(w, x))[1])),
    "tridiagonal_solve": lambda w, x: lapack.tridiagonal_solve(
        x[0] / 9, 3 + jnp.tanh(x @ w)[0], x[1] / 9, x
    ),
}
SPECIAL = {
    "bernoulli": lambda w, x: x * w[0, 0] * special.bernoulli(4)[2],
    "bessel_jn": fixed(lambda w, x: special.bessel_jn(1.2 + jnp.tanh(x * w), v=2)),
    "beta": of_two(special.beta),
    "betainc": lambda w, x: special.betainc(2.0, 3.0, 0.5 + jnp.tanh(x * w) / 3),
    "betaln": of_two(special.betaln),
    "boxcox": of_two(lambda x, y: special.boxcox(x, y)),
    "boxcox1p": of_two(lambda x, y: special.boxcox1p(x, y)),
    "comb": of_two(lambda x, y: special.comb(x, y)),
    "dawsn": each(lambda x: special.dawsn(x)),
    "digamma": each_positive(special.digamma),
    "entr": each_positive(special.entr),
    "erf": each(special.erf),
    "erfc": each(special.erfc),
    "erfcinv": each_positive(lambda x: special.erfcinv(x / 2)),
    "erfcx": each(lambda x: special.erfcx(x)),
    "erfinv": each(special.erfinv),
    "exp1": each_positive(special.exp1),
    "expi": each_positive(special.expi),
    "expit": each(special.expit),
    "expn": each_positive(lambda x: special.expn(2, x)),
    "factorial": each_positive(special.factorial),
    "fresnel": each(special.fresnel),
    "gamma": each_positive(special.gamma),
    "gammainc": each_positive(lambda x: special.gammainc(2.0, x)),
    "gammaincc": each_positive(lambda x: special.gammaincc(2.0, x)),
    "gammaln": each_positive(special.gammaln),
    "gammasgn": each(special.gammasgn),
    "hyp1f1": each(lambda x: special.hyp1f1(1.5, 2.5, x)),
    "hyp2f1": fixed(lambda w, x: special.hyp2f1(1.5, 2.5, 3.5, jnp.tanh(x * w) / 2)),
    "i0": each(special.i0),
    "i0e": each(special.i0e),
    "i1": each(special.i1),
    "i1e": each(special.i1e),
    "kl_div": of_two(special.kl_div),
    "log_ndtr": each(special.log_ndtr),
    "log_softmax": each(special.log_softmax),
    "loggamma": each_positive(special.loggamma),
    "logit": each_positive(lambda x: special.logit(x / 3)),
    "logsumexp": each(special.logsumexp),
    "multigammaln": each_positive(lambda x: special.multigammaln(x + 2, 2)),
    "ndtr": each(special.ndtr),
    "ndtri": each_positive(lambda x: special.ndtri(x / 3)),
    "owens_t": of_two(lambda x, y: special.owens_t(x, y)),
    "poch": of_two(special.poch),
    "polygamma": each_positive(lambda x: special.polygamma(1, x)),
    "rel_entr": of_two(special.rel_entr),
    "sici": each_positive(special.sici),
    "softmax": each(special.softmax),
    "spence": each_positive(lambda x: special.spence(x / 3)),
    "sph_harm_y": lambda w, x: jnp.real(
        special.sph_harm_y(jnp.array([2]), jnp.array([1]), (x @ w)[0, :1], x[1, :1], n_max=2)
    ),
    "wofz": each(lambda x: jnp.real(special.wofz(x + 1j))),
    "xlog1py": of_two(special.xlog1py),
    "xlogy": of_two(special.xlogy),
    "zeta": each_positive(lambda x: special.zeta(x + 1, 1.5)),
}
NN = {
    **{
        name: each(getattr(nn, name))
        for name in (
            *("celu", "elu", "gelu", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh"),
            *("identity", "leaky_relu", "log_sigmoid", "log_softmax", "logmeanexp", "logsumexp"),
            *("mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_sign", "softmax"),
            *("softplus", "sparse_plus", "sparse_sigmoid", "squareplus", "standardize", "swish"),
            "tanh",
        )
        if hasattr(nn, name)
    },
    "dot_product_attention": lambda w, x: nn.dot_product_attention(
        (x @ w)[:, None], x[:, None], x[:, None]
    ),
    "glu": lambda w, x: nn.glu((x @ w)[:, :2]),
    "log1mexp": each_positive(nn.log1mexp),
    "one_hot": lambda w, x: x @ w @ nn.one_hot(jnp.argmax(x, 1), 3),
}
FUNCTIONS = {
    f"{home.__name__}.{name}": function
    for home, functions in (
        *((linalg, LINALG), (lapack, LAPACK), (special, SPECIAL)),
        (nn, NN),
    )
    for name, function in functions.items()
    if hasattr(home, name)
}
# With a constant, a loop or a branch inside.
SOME_FUNCTIONS = (
    *("jax.scipy.special.spence", "jax.scipy.special.rel_entr", "jax.scipy.linalg.expm"),
    *("jax.scipy.special.expi", "jax.lax.linalg.qdwh", "jax.nn.selu"),
)
HOMES = (linalg, lapack, special, nn)
# No functions of arrays; or, the others, none that `jax.vmap` maps on a CPU.
LEFT_OUT = {
    *("EigImplementation", "EighImplementation", "SvdAlgorithm", "get_scaled_dot_general_config"),
    *("cholesky_update", "scaled_dot_general", "scaled_matmul"),
}
