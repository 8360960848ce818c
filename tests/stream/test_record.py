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
from rankax import auto_vmap
from rankax.ext.blocks.checksum import checksum
from rankax.reductions import Fold, Histogram, Several

X = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
A = np.arange(3, dtype="float32")
B = A.copy()
B[2] = 7
Z = np.zeros(3, "float32")


def of_item(fun):
    return auto_vmap(x=1)(fun)


def reduced(reduce):
    return auto_vmap(x=1, reduce=reduce)(lambda x: jnp.sum(x)), X


def wide(s):
    return s + jnp.zeros(3)


class Model(NamedTuple):
    """A class with fields, one of which is used in a loop only."""

    scale: float
    table: np.ndarray

    @auto_vmap(x=1)
    def near(self, x):
        return lax.fori_loop(0, 3, lambda _, c: c * self.scale + self.table, x)


def looped(x, table):
    """Add a table in a loop."""
    return lax.scan(lambda c, _: (c + table, None), x, None, length=2)[0]


def in_custom_rule(table):
    inner = jax.custom_jvp(lambda x: looped(x, table))
    inner.defjvp(lambda x, dx: (inner(*x), dx[0]))
    return of_item(inner), X


def called_back(host):
    """A kernel that calls a function on the host."""
    like = jax.ShapeDtypeStruct((3,), "float32")
    return of_item(lambda x: jax.pure_callback(host, like, x, vmap_method="sequential")), X


class Shifted:
    def __init__(self, by):
        self.by = by

    def __call__(self, x, *, sign):
        return np.asarray(x) + sign * self.by


def in_callable_object(table):
    return called_back(functools.partial(Shifted(table), sign=np.float32(1)))


def of_fold(identity=Z, lift=wide, merge=jnp.maximum, finish=None):
    return reduced(Fold(identity, lift, merge, finish))


def of_one_of_two_arrays(table):
    first, second = jnp.asarray(A), jnp.asarray(B)
    third = first if table is A else second

    def body(carry, _):
        return jax.jit(lambda c: c + first * second + jax.jit(lambda c: c + third)(c))(carry), None

    def finish(state):
        return lax.scan(body, state + third, None, length=2)[0]

    return of_fold(A, lambda s: body(wide(s), None)[0], finish=finish)


def drawn(keys):
    kernel = auto_vmap(x=1, key=0)(lambda x, key: x * jax.random.normal(key))
    return kernel, np.ones((len(keys), 1), "float32"), keys


def of_one_key_of_many(table):
    data = np.zeros((2000, 2), "uint32")
    data[1000, 1] = int(table[2])  # a text of these keys would leave it out
    return drawn(jax.random.wrap_key_data(data))


def of_keys_of_another_kind(table):
    data = np.arange(80, dtype="uint32").reshape(20, 4)
    return drawn(jax.random.wrap_key_data(data, impl="rbg" if table is A else "unsafe_rbg"))


def of_key_in_closure(table):
    keys = jax.random.split(jax.random.key(int(table[2])), 600)
    return auto_vmap(i=0)(lambda i: jax.random.normal(keys[i])), np.arange(20, dtype="int32")


def of_one_number_of_many(table):
    x = np.zeros((400_000, 1), "float32")  # 1.6 MB
    x[200_001] = table[2]
    return auto_vmap(x=1)(lambda x: jnp.sum(x)), x


add = auto_vmap(x=1, n=0)(lambda x, n: x + n)

# What differs between two calls: each is a kernel and its arguments, made from a value.
CASES = {
    "in a scan": lambda table: (of_item(lambda x: looped(x, table)), X),
    "in a branch": lambda table: (
        of_item(lambda x: lax.cond(x[0] > 0, lambda x: x * table, lambda x: x, x)),
        X,
    ),
    "in a custom rule": in_custom_rule,
    "a literal": lambda table: (of_item(lambda x: x * float(table[2]) + np.float32(2)), X),
    "the sign of zero": lambda table: (
        of_item(lambda x: x[0] / (0.0 if table[2] == 2 else -0.0)),
        X,
    ),
    "an array for all items": lambda table: (auto_vmap(x=1, table=None)(looped), X, table),
    "a field": lambda table: (Model(0.5, table).near, X),
    "in a callback": lambda table: called_back(lambda x: np.asarray(x) + (lambda: table)()),
    "in a callable object": in_callable_object,
    "the finish of a fold": lambda table: of_fold(finish=lambda s: s * table),
    "a merge in a loop": lambda table: of_fold(merge=lambda a, b: looped(a, jnp.abs(b) + table)),
    "a merge of one name": lambda table: of_fold(merge=jnp.add if table is A else jnp.maximum),
    "the edges of a histogram": lambda table: reduced(Histogram(table)),
    "one of two arrays": of_one_of_two_arrays,
    "the lift of a fold": lambda table: of_fold(lift=lambda s: looped(wide(s), table)),
    "the identity of a fold": lambda table: of_fold(table),
    "the second reduction": lambda table: reduced(
        Several("sum", Fold(Z, wide, jnp.maximum, lambda s: s * table))
    ),
    "one key of many": of_one_key_of_many,
    "keys of another kind": of_keys_of_another_kind,
    "a key in a closure": of_key_in_closure,
    "a number": lambda table: (add, X, float(table[2])),
    "one number of many": of_one_number_of_many,
}


def prepared(make, value, found):
    kernel, *args = make(value)
    return rankax.stream._job.prepared(kernel, tuple(args), {}, "50 MB", "here", found)


def record_of(make, value):
    return prepared(make, value, {}).record


@pytest.mark.parametrize("name", CASES)
def test_an_equal_call_resumes_and_another_is_refused(name):
    make = CASES[name]
    found = record_of(make, A)
    assert record_of(make, A) == found
    with pytest.raises(ValueError, match="here: out was written by another call: "):
        prepared(make, B, found)


def of_keys(_):
    return drawn(jax.random.wrap_key_data(np.zeros((20, 2), "uint32")))


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (of_keys, lambda: jax.threefry_partitionable(False)),
        (
            lambda _: (of_item(lambda x: x @ jnp.ones((3, 3))), X),
            lambda: jax.default_matmul_precision("highest"),
        ),
    ],
)
def test_settings_that_decide_a_result_are_recorded(make, setting):
    found = record_of(make, A)
    with setting(), pytest.raises(ValueError, match="written by another call: program was"):
        prepared(make, A, found)


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


def records():
    """Records of several kinds, for this process and another one."""
    names = "in a scan", "in a callable object", "the finish of a fold", "one key of many"
    return {name: str(record_of(CASES[name], A)) for name in names}


def test_records_are_equal_in_each_process():
    code = "import test_record; print(test_record.records())"
    folders = [os.path.dirname(__file__), os.path.join(os.path.dirname(__file__), "..")]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": path}
    env |= {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    text = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    assert eval(text) == records()
