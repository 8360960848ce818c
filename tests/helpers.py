# SPDX-License-Identifier: MIT
"""Helpers of the tests: marks, comparisons, texts of errors, programs and the memory they need."""

import re
import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rankax
from rankax.core.trace.programs import name_and_params, subprograms


def at_each_run(
    names: Container[str], cases: Mapping[str, Any], others: pytest.MarkDecorator = pytest.mark.slow
) -> list[Any]:
    """Return ``cases`` for `parametrize`, with their names as identifiers; others are marked."""
    return [
        pytest.param(case, id=name, marks=() if name in names else others)
        for name, case in cases.items()
    ]


def slow(*values: Any) -> Any:
    """Mark one case of a parametrized test slow; with several parameters, pass a value of each."""
    return pytest.param(*values, marks=pytest.mark.slow)


def weekly(*values: Any) -> Any:
    """Mark one case of a parametrized test weekly."""
    return pytest.param(*values, marks=pytest.mark.weekly)


def assert_same(got: Any, want: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Assert equal structure, shapes, dtypes and values; only floats may differ by rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.shape(a) == jnp.shape(b)
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        elif a.dtype == jax.dtypes.float0:
            continue
        if jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
        else:
            np.testing.assert_array_equal(a, b)


def enable_x64() -> Any:
    """Return a context in which floats are double by default."""
    return jax.enable_x64(True)


def refusal(error: type[Exception], fun: Any, *args: Any, **kwargs: Any) -> str:
    """Return the text of the error that a call raises."""
    with pytest.raises(error) as info:
        fun(*args, **kwargs)
    return str(info.value)


def named_reductions(conjunction: str) -> str:
    """Return the names that ``reduce`` accepts, as errors list them."""
    names = "sum, mean, prod, max, min, argmax, argmin, any, all, logsumexp"
    return f"{names} {conjunction} gram"


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a program and of those that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in subprograms(equation):
            yield from equations(inner)


def primitives(fun: Any, *args: Any) -> Counter[str]:
    """Count the primitives in the program of ``fun(*args)``, at any depth."""
    return Counter(map(name_of, equations(jax.make_jaxpr(fun)(*args).jaxpr)))


# Whether `jax.checkpoint` is the new one, which JAX 0.12 has with ``JAX_REMAT3=1``.
REMAT3 = getattr(jax.config, "jax_remat3", False)


def name_of(equation: Any) -> str:
    """Return the primitive of an equation; for those of new JAX switches, what they stand for."""
    name, _ = name_and_params(equation)
    return {"RematTraced": "checkpoint", "HighLevelCall": "rankax_call"}.get(name, name)


def is_checkpoint(name: str) -> bool:
    """Whether a primitive is that of `jax.checkpoint`, under any of the names it has had."""
    return name in ("checkpoint", "remat", "remat2")


def operations_on(shape: tuple[int, ...], fun: Any, *args: Any) -> Counter[str]:
    """Count the operations of the compiled ``fun`` whose result has ``shape``, by their names.

    Only loops and fusions are searched, and operations that pass an array on do not count.
    """
    text = jax.jit(fun).lower(*args).compile().as_text()
    below = text[: text.index("\nENTRY ")]
    sides = ",".join(map(str, shape))
    names = Counter(re.findall(rf"= \w+\[{sides}\]\S* ([\w-]+)\(", below))
    for name in ("parameter", "get-tuple-element", "bitcast", "fusion"):
        del names[name]
    return names


def temporary_bytes(fun: Any, *args: Any) -> int:
    """Return the bytes that the compiled ``fun`` needs besides its arguments and results.

    The arguments may be `jax.ShapeDtypeStruct`.
    """
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


_compiled: list[str] = []


def _listen(event: str, _: float, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations(fun: Any, *args: Any) -> tuple[Any, int]:
    """Return the result of a call, and how many programs JAX compiled for it."""
    before = len(_compiled)
    with rankax.options(check=False):  # which would compile more
        out = jax.block_until_ready(fun(*args))
    return out, len(_compiled) - before


def codes_entered(fun: Any) -> list[CodeType]:
    """Return the code of each function of Python that a call enters, in order."""
    codes = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            codes.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        fun()
    finally:
        sys.setprofile(before)
    return codes


def python_calls(fun: Any) -> int:
    """Return how many functions of Python a call enters."""
    return len(codes_entered(fun))


class StepLog:
    """An observer that keeps what it was asked, and what its programs told."""

    def __init__(self):
        self.asked, self.told = [], []

    def of_parts(self, count):
        self.asked.append(count)
        return self

    def reports(self, length, size, steps):
        self.asked.append((length, size, steps))
        return self

    def step(self, done):
        jax.debug.callback(lambda done: self.told.append(int(done)), done)

    def end(self, done, outputs):
        leaf = jax.tree.leaves(outputs)[0]
        jax.debug.callback(lambda _: self.told.append("end"), leaf)

    def now(self):
        """Return what was told since the last time; a call has waited for it."""
        told, self.told = self.told, []
        return sorted(told, key=str)
