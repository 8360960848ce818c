# SPDX-License-Identifier: MIT
"""``memory_limit``: the chunk that keeps to it, as the compiled program itself says."""

import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rankax
from helpers import assert_same, at_each_run, compilations, refusal, slow, temporary_bytes
from rankax import auto_vmap, chunked_reduce, chunked_vmap
from rankax.ext.memory.budget import MemoryFit, fit_chunk
from rankax.ext.memory.limit import free_bytes

pytestmark = pytest.mark.optimized

MB = 10**6
W = jnp.asarray(np.linspace(-1.0, 1.0, 32 * 32).reshape(32, 32))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


FEW = shape(5, 4)  # whose programs are the fastest to measure


def chain(x):
    return jnp.tanh(jnp.tanh(x @ W) @ W) @ W


def energy(x):
    return jnp.mean(jnp.sort(jnp.sin(x), axis=0)[7] ** 2)


def scanned(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(w @ c), c.sum()), x, length=30)


def spread(a, b):
    return jnp.sort(jnp.sum((a[:, None] - b[None]) ** 2, axis=-1), axis=None)[3]


def gradient(kernel):
    def pull_back(args, cotangents):
        return jax.vjp(kernel, *args)[1](cotangents)

    return pull_back


KERNELS = {
    "matmul chain": (auto_vmap(2)(chain), [shape(3000, 32, 32)]),
    "scan inside": (auto_vmap(1, 2)(scanned), [shape(6000, 32), shape(32, 32)]),
    "distances": (auto_vmap(2, 2)(spread), [shape(400, 1, 8, 3), shape(300, 8, 3)]),
}


@pytest.mark.parametrize("case", at_each_run(["matmul chain"], KERNELS))
def test_the_chunk_keeps_to_the_limit_and_uses_it(case):
    # In tiles, a chunk of any size needs little.
    kernel, args = case
    in_tiles = kernel is KERNELS["distances"][0]
    kernel = kernel.with_options(memory_limit=MB, xla_cpu=in_tiles)
    plan = kernel.plan(*args)
    memory = plan.memory
    pulled = temporary_bytes(gradient(kernel), tuple(args), jax.eval_shape(kernel, *args))
    assert memory.forward == temporary_bytes(kernel, *args)
    assert max(memory.forward, memory.gradient, pulled) <= MB
    if plan.in_flight == memory.chunk_size:
        assert max(memory.forward, memory.gradient) >= MB / 2
    else:
        assert in_tiles


def test_the_plan_says_what_was_chosen_and_measured():
    plan = LIMITED.plan(X)
    memory = plan.memory
    assert 1 <= plan.in_flight <= memory.chunk_size  # the cache may ask for a smaller tile
    assert memory.limit == 300_000
    found = r"\n  memory limit 300 kB: allows \d+ in flight, forward [\d.]+ kB, gradient \d+ kB$"
    assert re.search(found, str(plan))


def test_a_batch_that_fits_is_mapped_as_a_whole():
    kernel = auto_vmap(1, memory_limit="1 GB")(jnp.sin)
    plan = kernel.plan(FEW)
    assert (plan.in_flight, plan.memory.chunk_size) == (5, 5)
    assert "scan" not in str(jax.make_jaxpr(kernel)(FEW))


def test_without_a_batch_nothing_is_measured():
    kernel = auto_vmap(1, memory_limit=1)(jnp.sin)
    assert kernel.plan(shape(4)).memory is None
    assert kernel.plan(shape(0, 4)).memory is None
    assert kernel(jnp.zeros((0, 4))).shape == (0, 4)


def test_with_chunk_size_the_smaller_counts():
    kernel = auto_vmap(1, memory_limit=8000, checkpoint=False)(jnp.sort)
    by_limit = kernel.plan(shape(3000, 64)).in_flight
    assert 2 < by_limit < 2999
    assert kernel.with_options(chunk_size=2).plan(shape(3000, 64)).in_flight == 2
    assert kernel.with_options(chunk_size=2999).plan(shape(3000, 64)).in_flight == by_limit


def test_it_is_measured_once():
    kernel = auto_vmap(1, chunk_size=8, memory_limit=100_000)(lambda x: jnp.sin(x) * 3)
    args = shape(3000, 64)
    kernel.plan(args)
    assert compilations(kernel.plan, args)[1] == 0
    assert compilations(kernel.with_options(checkpoint=None).plan, args)[1] == 0
    assert compilations(kernel.plan, shape(3000, 65))[1] > 0


@pytest.mark.slow
def test_what_the_kernel_closes_over_counts():
    size = [8]

    @auto_vmap(0, memory_limit=MB)
    def kernel(x):
        return jnp.sort(jnp.sin(jnp.linspace(0.0, 1.0, size[0]) * x))[3]

    few = kernel.plan(shape(100_000)).in_flight
    size[0] = 800
    many = kernel.plan(shape(100_000)).in_flight
    assert few > 20 * many


X = jnp.asarray(np.linspace(-1.0, 1.0, 40 * 32 * 32).reshape(40, 32, 32))
PLAIN = jax.jit(jax.vmap(chain))
LIMITED = auto_vmap(2, memory_limit="300 kB")(chain)  # the first chunk that is measured will do


def test_keys_statics_and_arguments_without_a_rank():
    @auto_vmap(key=0, x=1, memory_limit=MB)
    def kernel(key, x, table, power=2, kind="sin"):
        return getattr(jnp, kind)(x * table["scale"]) ** power + jax.random.normal(key)

    args = jax.random.split(jax.random.key(0), 5), jnp.ones((5, 4)), {"scale": jnp.float32(0.5)}
    assert kernel.plan(*jax.eval_shape(lambda *args: args, *args)) == kernel.plan(*args)
    want = kernel.with_options(memory_limit=None)(*args, power=3, kind="cos")
    assert_same(kernel(*args, power=3, kind="cos"), want)


def test_under_transformations():
    assert LIMITED.plan(X).steps > 1
    want = PLAIN(X)
    assert_same(LIMITED(X), want, rtol=1e-3, atol=1e-5)
    assert_same(jax.vmap(LIMITED)(X[None]), want[None])
    loss, plain = (lambda x: jnp.sum(LIMITED(x) ** 2)), (lambda x: jnp.sum(PLAIN(x) ** 2))
    want = jax.jit(jax.grad(plain))(X)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        assert_same(transform(loss)(X), want, rtol=1e-4, atol=1e-4)


def test_closed_over_tracers():
    def loss(w, scale, limit):
        kernel = auto_vmap(2, 0, memory_limit=limit)(lambda x, s: jnp.tanh(x @ w) @ w * s)
        return jnp.sum(kernel(X, scale) ** 2)

    @jax.jit
    def gradients(w, scale):
        return [jax.grad(loss, (0, 1))(w, scale, limit) for limit in (None, "200 kB")]

    want, got = gradients(W, jnp.float32(2))
    assert_same(got, want, rtol=1e-4, atol=1e-4)


def numpy_sine(x):
    return jax.pure_callback(np.sin, x, x, vmap_method="expand_dims")


sine = jax.custom_vjp(jnp.sin)
sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cosine(x),))


@jax.custom_jvp
def closed(x):
    """As Equinox and Diffrax close what must not be differentiated."""
    return x


@closed.defjvp
def _(*_):
    raise RuntimeError("Unexpected tangent. This operation cannot be autodifferentiated.")


LOOP = "Reverse-mode differentiation does not work for lax.while_loop"


@pytest.mark.parametrize(
    ("fun", "why"),
    [
        (
            lambda x: jax.lax.while_loop(lambda y: y[0] < 3, lambda y: jnp.sort(y) + 1, x),
            f"{LOOP} or lax.fori_loop with dynamic start/stop values",
        ),
        (numpy_sine, "Pure callbacks do not support JVP"),
        (
            lambda x: jax.lax.reduce_window(x, 0.0, lambda a, b: a + 2 * b, (2,), (1,), "VALID"),
            "Linearization failed to produce known values for all output primals",
        ),
        (
            lambda x: jax.lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2),
            "transpose_solve required for backwards mode automatic differentiation of "
            "custom_linear_solve",
        ),
        slow(
            lambda x: jnp.sum(jax.scipy.special.betainc(x, x, x)),
            "Betainc gradient with respect to a and b not supported",
        ),
        slow(
            lambda x: jnp.sum(jax.scipy.linalg.schur(x.reshape(8, 8))[0]),
            "Differentiation rule for 'schur' not implemented",
        ),
        (closed, "This operation cannot be autodifferentiated"),
        (jnp.argsort, "no output holds floating-point numbers"),
        (lambda x: x.at[0].apply(jnp.sin), "scatter_apply JVP not implemented"),
    ],
)
def test_the_plan_says_why_there_is_no_gradient(fun, why):
    plan = auto_vmap(1, memory_limit=MB)(fun).plan(shape(200, 64))
    assert (plan.memory.gradient, plan.memory.no_gradient) == (None, why)
    assert str(plan.memory).endswith(f", gradient: none ({why})")


def test_items_that_end_by_themselves_have_a_gradient():
    def counted(x):
        return jax.lax.while_loop(lambda y: y[0] < 3, lambda y: jnp.sin(y) + 2 * y, x)

    kernel = auto_vmap(1, memory_limit=MB, chunk_size=2, lockstep=False)(counted)
    memory = kernel.plan(FEW).memory
    assert 0 < memory.gradient <= MB
    assert memory.no_gradient == ""


WRONG_SHAPE = jax.custom_vjp(jnp.sin)
WRONG_SHAPE.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g[:1],))


@pytest.mark.parametrize(
    ("fun", "error", "text"),
    [
        (sine, AttributeError, "has no attribute 'cosine'"),
        (WRONG_SHAPE, ValueError, "must produce an output with the same"),
    ],
)
def test_a_fault_in_a_rule_is_no_lack_of_a_gradient(fun, error, text):
    """It was hidden, and the limit then held for the call alone."""
    kernel = auto_vmap(1, memory_limit=MB)(lambda x: fun(jnp.sort(x)))
    with pytest.raises(error, match=text):
        kernel.plan(FEW)
    assert kernel.with_options(checkpoint=False).plan(FEW).memory.gradient is None


def test_without_checkpoint_only_the_call_counts():
    kernel = auto_vmap(2, memory_limit=MB, checkpoint=False, xla_cpu=False)(chain)
    memory = kernel.plan(shape(3000, 32, 32)).memory
    assert (memory.gradient, memory.no_gradient) == (None, "")
    assert "gradient" not in str(memory)
    assert MB / 2 <= memory.forward <= MB


def test_more_than_one_item_needs():
    kernel = auto_vmap(2, memory_limit=2000)(chain)
    message = (
        r"chain\(\): one item alone needs [\d.]+ kB forward and [\d.]+ kB in the gradient beyond "
        r"inputs and outputs, and memory_limit is 2 kB; raise it to at least (\d+) bytes, or split "
        r"the item itself, such as with chunked_vmap inside the kernel"
    )
    with pytest.raises(ValueError, match=f"^{message}$") as caught:
        kernel(X)
    least = int(re.search(message, str(caught.value))[1])
    one = kernel.with_options(chunk_size=1)  # to measure no other
    assert one.with_options(memory_limit=least).plan(X).memory.chunk_size == 1
    few = one.with_options(memory_limit=9000)
    with pytest.raises(ValueError, match="or split the item itself, such as with chunked_vmap"):
        few(X)
    assert few.with_options(checkpoint=False).plan(X).memory.chunk_size == 1


def residual(x, y, draw):
    return (y - draw * x) ** 2


def test_cotangents_of_large_arguments_are_left_out():
    kernel = auto_vmap(0, 0, 0, reduce="sum", reduce_axis=-1, memory_limit="1 MB")(residual)
    arguments = shape(1_000_000), shape(1_000_000), shape(50, 1)
    of_all = kernel.plan(*arguments).memory
    assert of_all.cotangents == 0
    assert max(of_all.forward, of_all.gradient) < MB

    kernel = kernel.with_options(hoist=False)  # in tiles of one row
    plan = kernel.plan(*arguments)
    assert max(plan.memory.forward, plan.memory.gradient) < 50_000
    assert plan.memory.cotangents > 7 * MB
    text = f"(with cotangents of large arguments, {plan.memory.cotangents / 1e6:.3g} MB more)"
    assert text in str(plan)

    def loss(draws, x, y):
        return jnp.sum(kernel(x, y, draws))

    x, y, draws = arguments
    assert temporary_bytes(jax.grad(loss), draws, x, y) < 50_000
    # Another limit has room for all of them, as before.
    assert not kernel.with_options(memory_limit="20 MB").plan(*arguments).memory.cotangents


@pytest.mark.slow
def test_what_is_in_flight_counts_beside_cotangents():
    """A large array of which each item takes much: more items need more."""

    def kernel(rows, shift):
        return jnp.sum(jnp.sin(jnp.outer(rows, rows) + shift))

    mapped = auto_vmap(1, 0, memory_limit="1 MB", xla_cpu=False)(kernel)
    memory = mapped.plan(shape(20_000, 100), shape(20, 1)).memory
    assert memory.cotangents > MB
    assert memory.chunk_size < 100
    words = r"kB forward and .* kB in the gradient \(and .* MB for cotangents of large arguments\)"
    with pytest.raises(ValueError, match=words):
        mapped.with_options(memory_limit="10 kB").plan(shape(20_000, 100), shape(20, 1))


def test_the_limit_advised_is_the_least_that_fits():
    # The compiler fuses all five items into one loop, which needs less memory than one item.
    kernel = auto_vmap(1)(lambda x: jnp.sqrt(x @ x))
    with pytest.raises(ValueError, match=r"raise it to at least \d+ bytes") as caught:
        kernel.with_options(memory_limit=1).plan(shape(5, 3))
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    assert kernel.with_options(memory_limit=least).plan(shape(5, 3)).memory.chunk_size == 5
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        kernel.with_options(memory_limit=least - 1).plan(shape(5, 3))


def test_chunked_vmap_keeps_to_it():
    """No chunk divides the axis, and the copies of the outputs are of such a size."""

    def kernel(x):
        return jnp.sort(jnp.sin(x), axis=0)

    mapped = chunked_vmap(kernel, None, in_axes=1, out_axes=2, memory_limit=600_000)
    x = jnp.sin(jnp.arange(43 * 32 * 32.0)).reshape(32, 43, 32)
    like = jax.eval_shape(mapped, x)
    measured = [temporary_bytes(mapped, x), temporary_bytes(gradient(mapped), (x,), like)]
    assert 300_000 <= max(measured) <= 600_000
    assert_same(mapped(x), jax.jit(jax.vmap(kernel, 1, 2))(x))


@pytest.mark.parametrize("reduction", ["sum", slow("logsumexp")])
def test_chunked_reduce_keeps_to_it(reduction):
    mapped = chunked_reduce(energy, reduction, None, memory_limit=105_000)
    measured = [temporary_bytes(mapped, X), temporary_bytes(gradient(mapped), (X,), shape())]
    assert 52_500 <= max(measured) <= 105_000
    plain = jax.jit(chunked_reduce(energy, reduction, None))
    assert_same(mapped(X), plain(X), rtol=1e-3, atol=1e-4)


def test_a_collective_over_an_outer_axis_is_refused():
    kernel = auto_vmap(1, memory_limit=MB)(lambda x: jax.lax.psum(x, "outer"))
    message = "cannot measure a kernel with a collective over an outer axis; give chunk_size"
    with pytest.raises(ValueError, match=message):
        jax.vmap(kernel, axis_name="outer")(X[:, :2])


def test_options_of_the_compiler_are_those_of_the_call():
    options = {"xla_embed_ir_in_executable": True}
    kernel = auto_vmap(1, memory_limit=MB, jit=True, compiler_options=options)(jnp.sin)
    assert kernel.plan(FEW).memory.limit == MB
    with pytest.raises(Exception, match="no_such_option"):
        kernel.with_options(compiler_options={"no_such_option": 1}).plan(FEW)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda limit: chunked_vmap(chain, 1, memory_limit=limit)(X), "chunked_vmap(chain)"),
        (lambda limit: chunked_reduce(chain, "sum", 1, memory_limit=limit)(X), "chunked_reduce"),
    ],
)
def test_functions_name_what_is_wrong(call, text):
    assert refusal(ValueError, call, "much").startswith(text)
    assert ": one item alone needs" in refusal(ValueError, call, 10)


def test_the_scope_sets_it():
    kernel = auto_vmap(1, checkpoint=False)(jnp.sin)
    with rankax.options(memory_limit="300 kB"):
        assert kernel.plan(FEW).memory.limit == 300_000
    assert kernel.plan(FEW).memory is None


# How a limit is written.


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (1_500_000, 1_500_000),
        (np.int64(1_500_000), 1_500_000),
        ("1500000 B", 1_500_000),
        ("1.5 MB", 1_500_000),
        ("1500kB", 1_500_000),
        (" 1.5 mib ", 1_572_864),
        ("0.002GiB", 2_147_483),
    ],
)
def test_units(given, count):
    kernel = auto_vmap(2)(chain)
    assert kernel.with_options(memory_limit=given) is kernel.with_options(memory_limit=count)


def test_a_share_is_one_of_what_is_free():
    kernel = auto_vmap(1, chunk_size=1, checkpoint=False)(jnp.sin)
    half, small = (
        kernel.with_options(memory_limit=share).plan(FEW).memory.limit for share in ("50%", "0.5 %")
    )
    assert 1e6 < half < 1e13
    assert small < half / 20


def test_a_device_says_what_is_free(monkeypatch):
    stats = {"bytes_limit": 10 * MB, "bytes_in_use": 4 * MB}
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert free_bytes() == 6 * MB


def test_a_program_that_cannot_be_compared_is_measured():
    def told(x):
        jax.debug.callback(lambda _: None, x)
        return jnp.sin(x)

    assert auto_vmap(1, memory_limit=MB)(told).plan(FEW).memory.chunk_size == 5


UNDERSTOOD = (
    "memory_limit must be a positive number of bytes as an int, a string with a unit "
    '("500 MB", "1.5 GiB"; B, kB, MB, GB, TB, KiB, MiB, GiB, TiB), or a share of the free memory '
    '("50%"), got '
)


@pytest.mark.parametrize(
    ("given", "error", "came"),
    [
        ("2 GBs", ValueError, "'2 GBs'"),
        ("150%", ValueError, "'150%'"),
        ("0%", ValueError, "'0%'"),
        ("2000", ValueError, "'2000'"),
        ("0.1 B", ValueError, "'0.1 B'"),
        (0, ValueError, "0"),
        (-1, ValueError, "-1"),
        (True, TypeError, "True"),
        (2e9, TypeError, "float 2000000000.0"),
    ],
)
def test_nonsense_is_refused_at_once(given, error, came):
    with pytest.raises(error) as caught:
        auto_vmap(2, memory_limit=given)(chain)
    assert str(caught.value) == f"auto_vmap(chain): {UNDERSTOOD}{came}"


PEAK = """
import jax.numpy as jnp
import rankax

def peak():
    with open("/proc/self/status") as lines:
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1000

w = jnp.linspace(-1.0, 1.0, 150 * 150).reshape(150, 150)

@rankax.auto_vmap(0, jit=True, memory_limit=LIMIT)
def kernel(x):
    return jnp.sort(jnp.sin(w * x), axis=0)[7].sum()

x = jnp.linspace(0.0, 1.0, 4000)
kernel.lower(x).compile()
before = peak()
kernel(x).block_until_ready()
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for the peak")
def test_a_real_run_keeps_to_it():
    """The compiler and its threads get 100 MB besides; what is compiled first takes as much."""

    def megabytes(limit):
        command = [sys.executable, "-c", PEAK.replace("LIMIT", repr(limit))]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert megabytes(None) > 300
    assert megabytes("100 MB") < 100 + 100


def scaled(a, v):
    return a * jnp.dot(v, v)


@pytest.mark.parametrize(
    ("shapes", "reduce"), [([(5, 1, 1), (1, 6, 3)], "sum"), ([(7,), (1, 3)], None)], ids=str
)
def test_batch_axes_of_length_1(shapes, reduce):
    args = [np.sin(np.arange(np.prod(s), dtype=np.float32)).reshape(s) for s in shapes]
    want = auto_vmap(a=0, v=1, reduce=reduce, jit=True)(scaled)(*args)
    mapped = auto_vmap(a=0, v=1, memory_limit="1 MB", reduce=reduce)(scaled)
    assert_same(mapped(*args), want)
    stand_ins = [shape(*x.shape) for x in args]
    assert mapped.plan(*stand_ins) == mapped.plan(*args)


def test_stretched_axes_do_not_change_what_is_measured():
    kernel = auto_vmap(a=0, v=1, memory_limit=5000)(lambda a, v: a * jnp.sum(jnp.sort(v)))
    plan = kernel.plan(shape(300), shape(100))
    assert plan.steps > 1
    assert kernel.plan(shape(300), shape(1, 100)).memory == plan.memory


# The search, with memory that is a formula: no program is compiled.


SEARCHES = {
    "proportional": (lambda n: 10 * n, 1000, [8, 97]),
    "a constant part": (lambda n: 400 + 5 * n, 1000, [8, 17, 114]),
    "most of it constant": (lambda n: 600 + n, 1000, [8, 12, 370]),
    "more than proportional": (lambda n: n**2, 1000, [8, 121, 15, 20, 24]),
    "all fits": (lambda n: 3 * n + 5, 10**6, [8, 997]),
    "tiles, whose memory is that of any chunk": (
        lambda n: min(n, 20) if n < 997 else 10**6,
        1000,
        [8, 970, 997],
    ),
    "a step": (lambda n: 100 if n < 700 else 2000, 1000, [8, 77, 997, 537]),
    "the first is too large": (lambda n: 300 * n, 1000, [8, 3]),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_few_chunk_sizes_are_measured(name):
    memory, limit, expected = SEARCHES[name]
    measured = []

    def measure(size):
        measured.append(size)
        return MemoryFit(limit, size, size, memory(size))

    fit = fit_chunk(measure, (997,), 997, limit, "kernel()")
    assert measured == expected
    assert fit.chunk_size == max(size for size in measured if memory(size) <= limit)


# What is stored, and what is computed again.


def costly(m):
    """Eigenvalues of a matrix: few numbers, many operations."""
    return jnp.sum(jnp.sqrt(jnp.linalg.eigvalsh(m @ m.T + jnp.eye(4))))


MATRICES = jnp.asarray(np.sin(np.arange(2000 * 16, dtype=np.float32)).reshape(2000, 4, 4))


def evaluations_of(fun, x):
    """How many operations of the library a gradient calls."""
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(fun(x))))(x))
    return len(re.findall(r"\beigh\[", text))


def test_within_a_limit_what_is_costly_is_stored():
    kernel = auto_vmap(2, chunk_size=8)(costly)
    small, large = (kernel.with_options(memory_limit=limit) for limit in ("20 kB", "1 MB"))
    plans = [small.plan(MATRICES), large.plan(MATRICES)]
    assert [plan.memory.stored for plan in plans] == [False, True]
    assert plans[0].memory.gradient <= 20_000 < plans[1].memory.gradient <= MB
    assert str(plans[1]).endswith("nothing recomputed")

    again = evaluations_of(kernel, MATRICES)
    assert evaluations_of(small, MATRICES) == again
    assert evaluations_of(large, MATRICES) < again
    forced = large.with_options(checkpoint=True).plan(MATRICES).memory
    assert (forced.stored, forced.gradient < 20_000) == (False, True)
    unbounded = large.with_options(checkpoint=False).plan(MATRICES).memory
    assert (unbounded.stored, unbounded.gradient) == (False, None)


def test_a_limit_inside_shard_map_is_refused():
    """The types of arrays name the mesh there, so that no program of them can be compiled alone."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def kernel(x):
        return jnp.sum(jnp.outer(x, x))

    def step(carry, x):
        return carry + jnp.sum(x), None

    def scan(x):
        return rankax.checkpoint_chunked_scan(step, x[0, 0], x, memory_limit="1 kB")[0][None]

    mapped = rankax.auto_vmap(1, memory_limit="1 kB")(kernel)
    size = (
        " (one item computes 80 B, and its gradient about as much again, so chunk_size=6 should do)"
    )
    for call, name, also in (
        (mapped, "kernel()", size),
        (scan, "checkpoint_chunked_scan(step)", ""),
    ):
        on_devices = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
        text = (
            f"{name}: memory_limit cannot measure a kernel inside jax.shard_map, where the types "
            f"of arrays name its mesh; give chunk_size{also}"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(text)}(\n|$)"):
            jax.jit(on_devices)(jnp.ones((8, 3)))
