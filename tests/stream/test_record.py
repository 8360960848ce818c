# SPDX-License-Identifier: MIT
"""Everything that decides a result is recorded: a store resumes with an equal call only."""

import functools
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rankax.stream
from helpers import at_each_run
from rankax import auto_vmap
from rankax.ext.blocks.checksum import checksum
from rankax.reductions import Fold, Several, Sum

X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
A = np.arange(3, dtype="float32")
B = A.copy()
B[2] = 7


def of_item(fun):
    return auto_vmap(x=1)(fun)


def reduced(reduce):
    return auto_vmap(x=1, reduce=reduce)(lambda x: jnp.sum(x))


class Model(NamedTuple):
    """A class with fields, one of which is used in a loop only."""

    scale: float
    table: np.ndarray

    @auto_vmap(x=1)
    def near(self, x):
        return lax.fori_loop(0, 3, lambda _, c: c * self.scale + self.table, x)


# What differs between two calls: each is a kernel and its arguments, made from a value.


def in_scan(table):
    def body(carry, _):
        return carry * 0.5 + table, None

    return of_item(lambda x: lax.scan(body, x, None, length=3)[0]), X


def second_in_scan(table):
    def body(carry, row):
        return carry + row * jnp.asarray(A) + jnp.asarray(table), None

    return of_item(lambda x: lax.scan(body, x, jnp.ones((2, 3)))[0]), X


def in_jitted_scan(table):
    @jax.jit
    def inner(x):
        return lax.scan(lambda c, _: (jax.jit(lambda c: c + table)(c), None), x, None, length=3)[0]

    return of_item(inner), X


def in_nested_loops(table):
    def outer(_, carry):
        return lax.while_loop(lambda c: c[0] < 9, lambda c: jnp.abs(c + table) + 1, carry)

    return of_item(lambda x: lax.fori_loop(0, 2, outer, x)), X


def in_branch(table):
    return of_item(lambda x: lax.cond(x[0] > 0, lambda x: x * table, lambda x: x, x)), X


def in_checkpoint(table):
    @jax.checkpoint
    def inner(x):
        return lax.scan(lambda c, _: (c + table, None), x, None, length=2)[0]

    return of_item(inner), X


def in_custom_rule(table):
    @jax.custom_jvp
    def inner(x):
        return lax.scan(lambda c, _: (c + table, None), x, None, length=2)[0]

    inner.defjvp(lambda x, dx: (inner(*x), dx[0]))
    return of_item(inner), X


def as_literal(table):
    return of_item(lambda x: x * float(table[2]) + np.float32(table[1])), X


def sign_of_zero(table):
    return of_item(lambda x: x[0] / (0.0 if table[2] == 2 else -0.0)), X


def of_whole_array(table):
    kernel = auto_vmap(x=1, table=None)
    return kernel(lambda x, table: lax.fori_loop(0, 2, lambda _, c: c + table, x)), X, table


def of_field(table):
    return Model(0.5, table).near, X


def in_callback(table):
    like = jax.ShapeDtypeStruct((3,), "float32")

    def host(x):
        return np.asarray(x) + (lambda: table)()

    return of_item(lambda x: jax.pure_callback(host, like, x, vmap_method="sequential")), X


class Shifted:
    def __init__(self, by):
        self.by = by

    def __call__(self, x, *, sign):
        return np.asarray(x) + sign * self.by


def in_callable_object(table):
    host = functools.partial(Shifted(table), sign=np.float32(1))
    like = jax.ShapeDtypeStruct((3,), "float32")
    return of_item(lambda x: jax.pure_callback(host, like, x, vmap_method="sequential")), X


def of_finish(table):
    return reduced(Fold(np.float32(0), jnp.abs, jnp.maximum, lambda s: s * table)), X


def of_finish_in_scan(table):
    def finish(state):
        return lax.scan(lambda c, _: (c + table, None), state + jnp.zeros(3), None, length=2)[0]

    return reduced(Fold(np.float32(0), jnp.abs, jnp.maximum, finish)), X


def of_added_finish(table):
    finish = None if table is A else jnp.negative
    return reduced(Fold(np.float32(0), jnp.abs, jnp.maximum, finish)), X


def of_merge(table):
    def merge(first, second):
        return lax.fori_loop(0, 1, lambda _, c: jnp.maximum(c, second + table), first)

    return reduced(Fold(np.zeros(3, "float32"), lambda s: s + jnp.zeros(3), merge)), X


def of_one_of_two_arrays(table):
    first, second = jnp.asarray(A), jnp.asarray(B)
    third = first if table is A else second

    def body(carry, _):
        return jax.jit(lambda c: c + first * second + jax.jit(lambda c: c + third)(c))(carry), None

    def finish(state):
        return lax.scan(body, state + third, None, length=2)[0]

    lift = functools.partial(body, _=None)
    return reduced(Fold(A, lambda s: lift(s + jnp.zeros(3))[0], jnp.maximum, finish)), X


def of_lift(table):
    def lift(out):
        return lax.fori_loop(0, 2, lambda _, c: c + table, out + jnp.zeros(3))

    return reduced(Fold(np.zeros(3, "float32"), lift, jnp.add)), X


def of_identity(table):
    return reduced(Fold(table, lambda s: s + jnp.zeros(3), jnp.maximum)), X


def of_second_reduction(table):
    finish = Fold(np.float32(0), jnp.abs, jnp.maximum, lambda s: s * table)
    return reduced(Several("sum", finish)), X


class Scaled(Sum):
    """A reduction that is defined elsewhere."""

    def __init__(self, by):
        super().__init__()
        object.__setattr__(self, "by", by)

    def result(self, state, aval, size):
        return super().result(state, aval, size) * self.by.sum()


def of_own_reduction(table):
    return reduced(Scaled(table)), X


def drawn(keys):
    kernel = auto_vmap(x=1, key=0)(lambda x, key: x * jax.random.normal(key))
    return kernel, np.ones((len(keys), 1), "float32"), keys


def of_one_key_of_many(table):
    data = np.zeros((2000, 2), "uint32")
    data[1000, 1] = int(table[2])  # a text of these keys would leave it out
    return drawn(jax.random.wrap_key_data(data))


def of_one_leaf_of_keys(table):
    keys = {"a": jax.random.split(jax.random.key(0), 600)}
    keys["b"] = jax.random.split(jax.random.key(int(table[2])), 600)
    kernel = auto_vmap(x=1, keys=0)(
        lambda x, keys: x + jax.random.normal(keys["a"]) + jax.random.normal(keys["b"])
    )
    return kernel, np.ones((600, 1), "float32"), keys


def of_keys_of_another_kind(table):
    data = np.arange(80, dtype="uint32").reshape(20, 4)
    impl = "rbg" if table is A else "unsafe_rbg"
    return drawn(jax.random.wrap_key_data(data, impl=impl))


def of_key_in_closure(table):
    keys = jax.random.split(jax.random.key(int(table[2])), 600)
    kernel = auto_vmap(i=0)(lambda i: jax.random.normal(keys[i]))
    return kernel, np.arange(20, dtype="int32")


class Wrapped:
    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return jnp.asarray(self.array)


def of_wrapped_array(table):
    return auto_vmap(x=1, y=1)(lambda x, y: x + y), X, Wrapped(table)


def of_number(table):
    return auto_vmap(x=1, n=0)(lambda x, n: x + n), X, float(table[2])


def of_number_of_jax(table):
    return auto_vmap(x=1, n=0)(lambda x, n: x + n), X, jnp.float32(table[2])


def of_one_number_of_many(table):
    x = np.zeros((400_000, 1), "float32")  # 1.6 MB
    x[200_001] = table[2]
    return auto_vmap(x=1)(lambda x: jnp.sum(x)), x


CASES = [
    *(in_scan, second_in_scan, in_jitted_scan, in_nested_loops, in_branch, in_checkpoint),
    *(in_custom_rule, as_literal, sign_of_zero, of_whole_array, of_field),
    *(in_callback, in_callable_object),
    *(
        of_finish,
        of_finish_in_scan,
        of_added_finish,
        of_merge,
        of_one_of_two_arrays,
        of_lift,
        of_identity,
    ),
    *(of_one_of_two_arrays, of_second_reduction, of_own_reduction),
    *(of_one_key_of_many, of_one_leaf_of_keys, of_keys_of_another_kind, of_key_in_closure),
    *(of_wrapped_array, of_number, of_number_of_jax, of_one_number_of_many),
]


def record_of(make, value):
    kernel, *args = make(value)
    return rankax.stream._job.prepared(kernel, tuple(args), {}, "50 MB", "here", {}).record


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_an_equal_call_resumes_and_another_is_refused(make):
    found = record_of(make, A)
    assert record_of(make, A) == found
    kernel, *args = make(B)
    with pytest.raises(ValueError, match="here: out was written by another call: "):
        rankax.stream._job.prepared(kernel, tuple(args), {}, "50 MB", "here", found)


RUN = at_each_run(
    ("in_scan", "of_added_finish", "of_one_key_of_many"), {make.__name__: make for make in CASES}
)


@pytest.mark.parametrize("make", RUN)
def test_a_store_of_another_call_is_not_resumed(make, tmp_path):
    def run(value):
        kernel, *args = make(value)
        return rankax.stream.run(kernel, *args, out=tmp_path / "a.zarr", progress=False)

    run(A)
    run(A)
    with pytest.raises(ValueError, match="out was written by another call: "):
        run(B)


def test_what_numbers_a_key_draws_is_recorded():
    kernel, *args = drawn(jax.random.split(jax.random.key(0), 20))
    call = kernel, tuple(args), {}, "50 MB", "here"
    found = rankax.stream._job.prepared(*call, {}).record
    with (
        jax.threefry_partitionable(False),
        pytest.raises(ValueError, match="here: out was written by another call: program was"),
    ):
        rankax.stream._job.prepared(*call, found)


def test_arguments_may_have_the_names_of_what_is_recorded(tmp_path):
    def of(factor):
        return auto_vmap(program=1, limit=0)(lambda program, limit: program * factor + limit)

    def run(kernel, limit):
        return rankax.stream.run(kernel, X, limit, out=tmp_path / "a.zarr", progress=False)

    run(of(2), 3.0)
    run(of(2), 3.0)
    with pytest.raises(ValueError, match="another call: argument limit was "):
        run(of(2), 4.0)
    with pytest.raises(ValueError, match="another call: program was "):
        run(of(3), 3.0)


def test_what_only_shows_values_is_not_recorded():
    def seen_by(words):
        def fun(x):
            jax.debug.callback(lambda x: words.append(x), x)
            return 2 * x

        return of_item(fun), X

    assert record_of(seen_by, []) == record_of(seen_by, ["another"])


def test_equal_arrays_are_equal_wherever_they_are():
    first, second = A.copy(), [A.copy()]
    assert checksum([A, A, [A]]) == checksum([A, first, second])
    assert checksum([A, B, A]) != checksum([A, B, B])
    ring = []
    ring.append(ring)
    assert checksum([second, ring, second]) != checksum([second, ring, ring])


def test_kernels_that_a_callback_calls_are_recorded():
    def of(factor, rank=1, **options):
        kernel = auto_vmap(x=rank, **options)(lambda x: factor * jnp.sum(x))
        return kernel, lambda x: np.asarray(kernel(x))

    kernel, fun = of(2)
    before = checksum(fun)
    fun(X), kernel.with_options(chunk_size=2)  # what a kernel keeps of its calls does not count
    assert checksum(fun) == before == checksum(of(2)[1])
    others = of(3), of(2, 2), of(2, chunk_size=2)
    assert len({before, *(checksum(fun) for _, fun in others)}) == 4


def test_the_precision_of_products_is_recorded():
    call = of_item(lambda x: x @ jnp.ones((3, 3))), (X,), {}, "50 MB", "here"
    found = rankax.stream._job.prepared(*call, {}).record
    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(ValueError, match="here: out was written by another call: program was"),
    ):
        rankax.stream._job.prepared(*call, found)


def records():
    """Records of several kinds, for this process and another one."""
    kinds = in_jitted_scan, in_callable_object, of_finish_in_scan, of_one_leaf_of_keys
    return {make.__name__: str(record_of(make, A)) for make in kinds}


def test_records_are_equal_in_each_process():
    code = "import test_record; print(test_record.records())"
    folders = [os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "..")]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path}
    env |= {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    text = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    assert eval(text) == records()
