# SPDX-License-Identifier: MIT
"""The signatures of what takes options, for type checkers, and the scope that sets them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from jax.sharding import PartitionSpec

from rankax.core.base.messages import check_bool, listed
from rankax.core.options import DEFAULTS, OPTIONS, checked_options, entered


class Scoped(TypedDict, total=False):
    """The options that a scope can set."""

    chunk_size: int | Literal["auto"] | None
    memory_limit: int | str | None
    checkpoint: bool | None
    progress: bool | str | Callable[[int, int], object]
    devices: int | str | Sequence[Any] | PartitionSpec | None
    lockstep: bool
    cpu_math: bool
    xla_cpu: bool


class Entered(Scoped, total=False):
    """What a scope can set, options and more."""

    check: bool


class Given(Scoped, total=False):
    """All options of `auto_vmap`, as its caller passes them."""

    reduce: Any
    reduce_axis: int | Sequence[int] | None
    where: str | int | None
    batch_shape: int | Sequence[int] | None
    jit: bool
    compiler_options: Mapping[str, Any] | None
    bucket: bool | Sequence[int]
    batched: bool


def options(**values: Unpack[Entered]) -> contextlib.AbstractContextManager[None]:
    r"""Set options for every kernel that is called inside a ``with`` block.

    ``with options(chunk_size=100): fit(x)`` is equivalent to running ``fit`` with
    ``kernel.with_options(chunk_size=100)`` in place of each kernel of `auto_vmap` that sets no
    ``chunk_size``. An option that a kernel sets, in its decorator or by ``with_options``, takes
    precedence.

    Parameters
    ----------
    chunk_size, memory_limit, checkpoint, progress, devices, lockstep
        As in `auto_vmap`. The other options change what a kernel returns or takes, so they belong
        to the kernel.
    cpu_math, xla_cpu
        As in `auto_vmap`; also for `chunked_vmap`, `chunked_reduce` and the chunked Jacobians.
    check
        Whether an eager call that reuses the compiled program of an earlier call also evaluates a
        new one, and compares the results bit for bit. A difference is a ``RuntimeError`` that names
        the kernel: a fault of rankax. Calls take as long as first calls, and report their progress
        twice. The environment variable ``RANKAX_CHECK=1``, set before rankax is imported, makes
        that the default.

    Returns
    -------
    context manager
        Scopes nest: an inner one adds to the outer one. A scope applies to the thread (and the
        asyncio task) that entered it.

    Raises
    ------
    TypeError, ValueError
        Immediately, for an unknown option or a wrong value.

    Notes
    -----
    Kernels with ``jit=True`` keep one program for each set of options. Inside a `jax.jit` of your
    own, the scope counts while JAX traces: a function that was compiled outside the scope is not
    compiled again inside.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import rankax
    >>> norm = rankax.auto_vmap(1)(lambda v: jnp.sqrt(v @ v))
    >>> with rankax.options(chunk_size=10):
    ...     norm.plan(jnp.ones((100, 3))).in_flight
    10
    """
    given: dict[str, Any] = dict(values)
    checks = given.pop("check", None)
    if checks is not None:
        check_bool(checks, "rankax.options", "check")
    checked = checked_options(given, "rankax.options")
    scoped = [name for name, option in OPTIONS.items() if option.scoped]
    for name in checked:
        if not OPTIONS[name].scoped:
            raise TypeError(
                f"rankax.options: {name} belongs to a kernel; use "
                f"kernel.with_options({name}=...) (a scope can set {listed(scoped)})"
            )
    return entered(checked, checks)


# What `help` shows.
_kind = inspect.Parameter.KEYWORD_ONLY
_names = [name for name in Scoped.__annotations__ if name in DEFAULTS]
_shown = [inspect.Parameter(name, _kind, default=DEFAULTS[name]) for name in _names]
_shown.append(inspect.Parameter("check", _kind, default=False))
vars(options)["__signature__"] = inspect.Signature(_shown)
