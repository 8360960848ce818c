# SPDX-License-Identifier: MIT
"""The samples as functions of the arrays of one item, how they are transformed and compared."""

import ast
import os
import re
import textwrap
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from ops.samples import ALIKE, CANNOT, MODULES, SAMPLES, VALUES

ARRAY = re.compile(f"[{''.join(VALUES)}]\\d*_*")
NAMESPACE = {**MODULES, "jax": jax}
ALL = os.environ.get("RANKAX_OPS") == "all"


class Operation:
    """A sample: a function of the arrays of one item."""

    def __init__(self, call):
        tree = ast.parse(call, mode="eval")
        bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        self.names = [n for n in dict.fromkeys(names) if ARRAY.fullmatch(n) and n not in bound]
        self.code = compile(tree, call, "eval")
        self.seed = zlib.crc32(call.encode())

    def __call__(self, *arrays):
        return eval(self.code, NAMESPACE | dict(zip(self.names, arrays, strict=True)))

    def arrays(self, length):
        """Draw the arrays of all items, with the batch axis in front."""
        rng = np.random.default_rng(self.seed)
        shapes = [(length, *map(int, name[1:].strip("_"))) for name in self.names]
        return [VALUES[n[0]](rng, shape) for n, shape in zip(self.names, shapes, strict=True)]


def calls_in(text):
    """Return the calls in a text, of which each begins a line of the least indentation."""
    calls = re.split(r"\n(?=\S)", textwrap.dedent(text).strip())
    return [" ".join(call.split()) for call in calls]


def name_of(call):
    return re.match(r"\w+\.\w+", call)[0]


def is_here(call):
    """Whether this JAX has the operation."""
    module, name = name_of(call).split(".")
    return hasattr(MODULES[module], name)


MAPPED = [call.format(name) for call, names in ALIKE.items() for name in names.split()]
MAPPED = list(filter(is_here, MAPPED + calls_in(SAMPLES)))
REFUSED = [(w, call) for w, text in CANNOT.items() for call in calls_in(text) if is_here(call)]


def chosen(calls):
    """Return all samples, or those of a sixtieth of the operations."""
    return [call for call in calls if ALL or zlib.crc32(name_of(call).encode()) % 60 == 39]


def is_inexact(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def of_inexact(f, arrays):
    """Leave out the inputs and outputs of a function that have no derivative."""

    def reduced(primals):
        rest = iter(primals)
        out = f(*(next(rest) if is_inexact(x) else x for x in arrays))
        return list(filter(is_inexact, jax.tree.leaves(out)))

    return reduced, list(filter(is_inexact, arrays))


def value(f, arrays):
    return f(*arrays)


def jvp(f, arrays):
    f, primals = of_inexact(f, arrays)
    return jax.jvp(f, (primals,), (jax.tree.map(jnp.cos, primals),))[1]


def vjp(f, arrays):
    f, primals = of_inexact(f, arrays)
    out, pull = jax.vjp(f, primals)
    return pull(jax.tree.map(jnp.cos, out))[0]


def possible(f, arrays):
    """Return the transformations that JAX has for the function, and the errors of the others."""
    modes, errors = [], {}
    for mode in (value, jvp, vjp):
        try:
            jax.eval_shape(lambda arrays, mode=mode: mode(f, arrays), arrays)
        except Exception as error:
            errors[mode] = type(error)
        else:
            modes.append(mode)
    return modes, errors


def data(x):
    """Return what can be compared of an output: of keys, their data."""
    x = jnp.asarray(x)
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def assert_close(got, want):
    """Assert equality up to rounding, relative to the largest number of an array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        rounding = 1e-4 if is_inexact(a) else 0
        scale = np.max(np.abs(b), initial=1, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rounding, rounding * scale, err_msg=str(path))
