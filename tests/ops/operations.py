# SPDX-License-Identifier: MIT
"""The samples as functions of the arrays of one item, and which operations they cover."""

import ast
import os
import re
import textwrap
import types
import zlib

import jax
import numpy as np

from samples import ALIKE, CANNOT, MODULES, NOT_COMPARED, SAMPLES, VALUES

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
    return [call for call in calls if ALL or zlib.crc32(name_of(call).encode()) % 60 == 7]


def public_names():
    """Return the public functions of the modules, under the names that samples have."""
    functions = {
        f"{alias}.{name}"
        for alias, module in MODULES.items()
        for name in dir(module)
        if not name.startswith("_")
        and callable(value := getattr(module, name))
        and not isinstance(value, (type, types.ModuleType, jax.extend.core.Primitive))
    }
    return functions


def covered():
    """Return the operations that are mapped, those that are refused, and those not compared."""
    mapped, refused = set(map(name_of, MAPPED)), {name_of(call) for _, call in REFUSED}
    rest = {name for names in NOT_COMPARED.values() for name in names.split()}
    return mapped, refused - mapped, rest & public_names()
