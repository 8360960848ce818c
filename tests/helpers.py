# SPDX-License-Identifier: MIT
"""What the tests look at besides values: trees with dtypes, programs, and the memory they need."""

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rankax._trace.programs import name_and_params, subprograms


def at_each_run(names: Container[str], cases: Mapping[str, Any]) -> list[Any]:
    """Parametrize by the values of ``cases``; those of other names are marked slow."""
    return [
        pytest.param(case, id=name, marks=() if name in names else pytest.mark.slow)
        for name, case in cases.items()
    ]


def slow(*values: Any) -> Any:
    """Mark one case of a parametrized test slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def weekly(*values: Any) -> Any:
    """Mark one case of a parametrized test weekly."""
    return pytest.param(*values, marks=pytest.mark.weekly)


def assert_same(got: Any, want: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Assert equal structure, shapes, dtypes and values; the last exactly where not inexact."""
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
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()


def refusal(error: type[Exception], fun: Any, *args: Any, **kwargs: Any) -> str:
    """Return what the error says that a call raises."""
    with pytest.raises(error) as info:
        fun(*args, **kwargs)
    return str(info.value)


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
    """What an equation calls; of a new checkpoint, what it stands for."""
    name, _ = name_and_params(equation)
    return {"RematTraced": "checkpoint", "HighLevelCall": "rankax_call"}.get(name, name)


def is_checkpoint(name: str) -> bool:
    """Whether a primitive is that of `jax.checkpoint`, under any of the names it has had."""
    return name in ("checkpoint", "remat", "remat2")


def operations_on(shape: tuple[int, ...], fun: Any, *args: Any) -> Counter[str]:
    """Count what the compiled ``fun`` computes with arrays of ``shape`` in loops and in fusions.

    Left out is what only hands them on.
    """
    text = jax.jit(fun).lower(*args).compile().as_text()
    below = text[: text.index("\nENTRY ")]
    sides = ",".join(map(str, shape))
    names = Counter(re.findall(rf"= \w+\[{sides}\]\S* ([\w-]+)\(", below))
    for name in ("parameter", "get-tuple-element", "bitcast", "fusion"):
        del names[name]
    return names


def temporary_bytes(fun: Any, *args: Any) -> int:
    """Bytes the compiled ``fun`` needs besides its arguments and results, which may be shapes."""
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


_compiled: list[str] = []


def _listen(event: str, _: float, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations(fun: Any, *args: Any) -> tuple[Any, int]:
    """Return the result of a call, and how many programs JAX compiled for it."""
    before = len(_compiled)
    out = jax.block_until_ready(fun(*args))
    return out, len(_compiled) - before
