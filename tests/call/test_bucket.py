# SPDX-License-Identifier: MIT
"""``bucket=`` with ``jit=True``: against the same kernel without it, and how much is compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import assert_same as assert_equal
from helpers import at_each_run, compilations, python_calls, refusal
from rankax import auto_vmap
from rankax.call.kernels import KernelCall
from rankax.reductions import Best, BottomK, Fold, Moments, Several, TopK

assert_same = functools.partial(assert_equal, rtol=1e-4, atol=1e-5)

DRAW = np.random.default_rng(5).normal
X = jnp.asarray(DRAW(size=(7, 3)))  # filled up to 8
Y = jnp.asarray(DRAW(size=(11, 1, 3)))  # filled up to 12
W = jnp.asarray(DRAW(size=3))
ARGS = X, Y, W


def pair(x, y, w):
    return {"d": jnp.sum(jnp.sin(x * w - y) ** 2), "v": x * y, "ok": x[0] > y[0]}


PAIRS = auto_vmap(x=1, y=1, w=1, jit=True)(pair)


@jax.jit
def value(outs):
    """Return a number that has a derivative with respect to all arrays."""
    floats = [x for x in jax.tree.leaves(outs) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.sum(jnp.log1p(x**2)) for x in floats), jnp.float32(0))


def compiled(fun):
    """Return how many programs XLA compiles in a call."""
    return compilations(fun)[1]


SUMS = Several("sum", "prod", "logsumexp", "gram", Moments())
EXTREMES = Several("min", "max", "argmin", TopK(4))
PRODUCT = Fold(jnp.float32(1), lambda d: 1 + d, lambda a, b: a * b, jnp.log)
OPTIONS = {
    "maps": {},
    "a mask": {"reduce": Several("sum", "argmax"), "where": "ok"},
    "one axis": {"reduce": {"d": "logsumexp", "v": "max", "ok": None}, "reduce_axis": 0},
    "indices of both": {"reduce": {"d": Several("argmin", BottomK(3)), "v": "argmax", "ok": "any"}},
    "a fold": {"reduce": {"d": PRODUCT, "v": "gram", "ok": "all"}},
    "sums": {"reduce": {"d": SUMS, "v": SUMS, "ok": None}},
    "sums in one": {"reduce": {"d": SUMS, "v": SUMS, "ok": None}, "chunk_size": None},
    "extremes": {"reduce": {"d": EXTREMES, "v": EXTREMES, "ok": None}},
    "the best": {"reduce": Best("d", largest=True)},
}


@pytest.mark.parametrize("options", at_each_run(["maps", "a mask"], OPTIONS, pytest.mark.weekly))
def test_values_and_gradients_are_those_without_a_bucket(options):
    kernel = PAIRS.with_options(**{"chunk_size": 20, **options})

    def with_outputs(*args):
        outs = kernel(*args)
        return value(outs), outs

    gradients, outs = jax.jit(jax.grad(with_outputs, (0, 1, 2), has_aux=True))(*ARGS)
    filled = kernel.with_options(bucket=True)
    assert_same(filled(*ARGS), outs)
    assert_same(jax.grad(lambda *args: value(filled(*args)), (0, 1, 2))(*ARGS), gradients)


def test_many_lengths_need_no_more_programs_than_buckets():
    kernel = auto_vmap(x=1, w=1, jit=True, bucket=True, chunk_size=300)(lambda x, w: jnp.sum(x * w))
    kernel = kernel.with_options(reduce="sum")
    arrays = [jax.device_put(np.ones((n, 3), np.float32)) for n in range(100, 800, 17)]

    def calls():
        for x in arrays:
            kernel(x, W)

    assert compiled(calls) <= 11
    assert compiled(calls) == 0


def test_gradients_of_one_bucket_compile_two_programs():
    kernel = auto_vmap(x=1, w=1, jit=True, bucket=(64,))(lambda x, w: jnp.sin(x) @ w)
    pairs = [(np.ones((n, 3), np.float32), np.ones(n, np.float32)) for n in (20, 41, 63, 64)]
    pairs = jax.tree.map(jax.device_put, pairs)

    def gradients():
        for x, cotangent in pairs:
            _, pull = jax.vjp(kernel, x, W)
            of_x, _ = pull(cotangent)
            assert of_x.shape == x.shape

    assert compiled(gradients) == 2


def test_arrays_of_numpy_and_keys_are_filled_without_a_program():
    kernel = auto_vmap(x=1, key=0, jit=True, bucket=(8,))(
        lambda x, key: (key, x * jax.random.uniform(key))
    )
    plain = kernel.with_options(bucket=False)
    x = np.asarray(X)
    few, more = (jax.random.split(jax.random.key(1), n) for n in (5, 7))
    assert_same(kernel(x[:5], few), plain(x[:5], few))
    assert compiled(lambda: kernel(x, more)) == 0
    assert_same(kernel(x, more), plain(x, more))


@pytest.mark.parametrize(
    "args",
    [
        pytest.param((X[0], Y[0, 0], W), id="no batch"),
        pytest.param((X[:0], Y, W), id="no item"),
        pytest.param((X[:, None, None], Y, W), id="three axes", marks=pytest.mark.slow),
        pytest.param((X, 2 * X, X - 1), id="one axis"),
    ],
)
def test_other_batches(args):
    for kernel in (PAIRS, PAIRS.with_options(reduce="sum")):
        assert_same(kernel.with_options(bucket=(8, 16))(*args), kernel(*args))


def test_copies_send_nothing_back():
    """Neither to shared arguments nor NaN: the last item has an infinite derivative."""
    x = jnp.array([1.0, 4.0, 0.0])

    def loss(kernel, x, w):
        return jnp.sum(kernel(x, w))

    for reduce in (None, "sum"):
        kernel = auto_vmap(0, 0, jit=True, reduce=reduce)(lambda x, w: w * jnp.sqrt(x))
        filled = kernel.with_options(bucket=(8,))
        got, want = (jax.grad(functools.partial(loss, k), (0, 1))(x, 2.0) for k in (filled, kernel))
        assert_same(got, want)


TRANSFORMATIONS = {
    "vmap of what is shared": lambda k: jax.vmap(k, (None, None, 0))(X, Y, jnp.stack([W, 2 * W])),
    "vmap of an axis": lambda k: jax.vmap(k, (2, None, None))(jnp.stack([X, -X], 2), Y, W),
    "jvp": lambda k: jax.jvp(k, ARGS, ARGS),
    "jit of vjp": lambda k: jax.jit(jax.vjp(lambda x: k(x, Y, W)["v"], X)[1])(jnp.ones((11, 7, 3))),
    "hessian": lambda k: jax.hessian(lambda w: jnp.sum(k(X, Y, w)["d"]))(W),
}


@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_transformations(transform):
    assert_same(transform(PAIRS.with_options(bucket=True)), jax.jit(lambda: transform(PAIRS))())


def test_weak_types_are_promoted_as_without_a_bucket():
    kernel = auto_vmap(1, jit=True)(lambda x: x * jnp.ones(3, jnp.bfloat16))
    x = jnp.full((7, 3), 2.0)
    assert_same(kernel.with_options(bucket=(8,))(x), kernel(x))


def test_inside_jit_nothing_is_filled():
    double = auto_vmap(0, jit=True, bucket=True, chunk_size=4)(lambda x: 2 * x)
    assert "f32[8]" not in str(jax.make_jaxpr(double)(jnp.ones(7)))


def test_a_plan_shows_the_bucket():
    kernel = PAIRS.with_options(bucket=(10, 20), reduce="sum", reduce_axis=0)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARGS]
    for args in (ARGS, like):
        plan = kernel.plan(*args)
        assert (plan.batch_shape, plan.filled) == ((20, 10), ((0, 11), (1, 7)))
        lines = str(plan).split("\n")
        assert [line for line in lines if line[:6] in ("  axis", "  redu")][-3:] == [
            "  axis 0: 11 items, in a bucket of 20",
            "  axis 1: 7 items, in a bucket of 10",
            "  reduced by sum, to (10,)",
        ]
    assert PAIRS.with_options(bucket=True).plan(X[0], Y[0, 0], W).filled == ()
    assert kernel.lower(*like).compile().memory_analysis().argument_size_in_bytes > 12 * 30


def test_a_committed_array_stays_on_its_device():
    x = jax.device_put(X, jax.local_devices()[0])
    kernel = auto_vmap(1, jit=True, bucket=True)(jnp.sum)
    assert kernel(x).committed
    assert not kernel(X).committed


LENGTHS = "bucket must be True, False or lengths such as (128, 1024, 8192), got"
REFUSED = [
    (
        {"bucket": True, "jit": False},
        TypeError,
        "bucket=True is for programs that jit=True compiles, so it needs jit=True; if you call "
        "jax.jit yourself, pad the arrays first",
    ),
    ({"bucket": 128}, TypeError, f"{LENGTHS} int 128"),
    ({"bucket": ()}, ValueError, f"{LENGTHS} no length"),
    ({"bucket": (0, 8)}, ValueError, "the lengths of bucket must be positive ints, got 0"),
]


@pytest.mark.parametrize(("options", "error", "text"), REFUSED)
def test_what_is_no_bucket(options, error, text):
    assert refusal(error, PAIRS.with_options, **options) == f"pair.with_options: {text}"


def test_errors_of_a_call():
    assert refusal(ValueError, PAIRS.with_options(bucket=(8, 4)), *ARGS) == (
        "pair(): y has 11 items along batch axis 0, but the largest bucket is 8; add a larger one, "
        "or use bucket=True, which has no end"
    )
    most = PAIRS.with_options(reduce={"d": BottomK(78), "v": None, "ok": None})
    texts = (refusal(ValueError, k, *ARGS) for k in (most, most.with_options(bucket=True)))
    assert len({text.split("\n")[0] for text in texts}) == 1


def counted(monkeypatch):
    """Return a list that grows by the number of arrays that are transferred together."""
    transfers = []

    def device_put(x, *args, put=jax.device_put):
        transfers.append(len(jax.tree.leaves(x)))
        return put(x, *args)

    monkeypatch.setattr(jax, "device_put", device_put)
    return transfers


def several(x, y):
    return x * y, x - y, jnp.sum(x)


def test_a_warm_call_transfers_results_together(monkeypatch):
    """Each transfer takes as long as the program of a small batch."""
    mapped = auto_vmap(1, 1, jit=True, bucket=(8,))(several)
    x = jnp.ones((5, 3))
    mapped(x, x)
    transfers = counted(monkeypatch)
    mapped(x, 2 * x)
    assert transfers == [3]  # the outputs
    transfers.clear()
    with jax.transfer_guard("disallow"):
        mapped(x, x)
    assert transfers == [2, 1, 3]  # the arguments, the length, the outputs


def test_a_warm_call_is_not_planned_again(monkeypatch):
    plans, plan = [], KernelCall.plan

    def planned(*args, **kwargs):
        plans.append(args)
        return plan(*args, **kwargs)

    kernel = auto_vmap(1, 1, jit=True, bucket=(8,))(lambda x, w: jnp.sum(x) * w)
    call = functools.partial(kernel, jnp.ones((5, 3)), W)
    call()
    monkeypatch.setattr(KernelCall, "plan", planned)
    assert python_calls(call) <= 260
    assert plans == []


def test_results_of_a_frequent_length_need_no_transfer(monkeypatch):
    mapped = auto_vmap(1, 1, jit=True, bucket=(8,))(several)
    plain = jax.jit(jax.vmap(several))
    rows = jnp.arange(42.0).reshape(14, 3)
    often, once = (rows[:6], rows[6:12]), (rows[:7], rows[7:])
    programs = [compiled(lambda: mapped(*often)) for _ in range(34)]
    assert (sum(programs), programs[0], programs[32]) == (2, 1, 1)
    assert compiled(lambda: mapped(*once)) == 0
    assert_same(mapped(*once), plain(*once))
    weak = jax.tree.map(lambda x: x.weak_type, mapped(*once))
    transfers = counted(monkeypatch)
    got = mapped(*often)
    assert transfers == []
    assert_same(got, plain(*often))
    assert jax.tree.map(lambda x: x.weak_type, got) == weak


@pytest.mark.parametrize("reduce_axis", [None, 0])
def test_an_axis_of_length_1_broadcasts(reduce_axis):
    options = {} if reduce_axis is None else {"reduce": "sum", "reduce_axis": reduce_axis}
    kernel = auto_vmap(x=1, w=1, jit=True, **options)(lambda x, w: x * w)
    for x, w in ((X, W[None]), (X[:, None], W[None]), (X[None], W[None, None])):
        assert_same(kernel.with_options(bucket=True)(x, w), kernel(x, w))
