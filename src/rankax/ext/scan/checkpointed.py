# SPDX-License-Identifier: MIT
"""``checkpoint_chunked_scan``: a scan whose reverse pass stores some of its carries."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from rankax.core.plan.schedule import split_into_chunks
from rankax.core.trace.programs import ItemProgram
from rankax.ext.memory.budget import checked_limit, limit_in_bytes, shown_bytes
from rankax.ext.memory.limit import fit_once, free_bytes, gradient_bytes
from rankax.ext.progress import ProgressOption
from rankax.ext.scan.loops import Loop, Schedule, Step, chunk_sizes, run_scan, scan_call

_MOST_LEVELS = 3  # of checkpoints that a memory limit may choose

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


def checkpoint_chunked_scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X | None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    chunk_size: int | Sequence[int] | Literal["sqrt"] | None = None,
    memory_limit: int | str | None = None,
    policy: Callable[..., bool] | None = None,
    progress: ProgressOption = False,
) -> tuple[Carry, Y]:
    r"""Scan, and let the reverse pass store one carry per chunk instead of every step.

    Equivalent to ::

        carry, ys = jax.lax.scan(f, init, xs, length, reverse, unroll)

    in values and in derivatives of every order. The reverse pass recomputes each chunk from its
    first carry (Griewank and Walther, *Algorithm 799: revolve*, 2000, discuss the best choice).

    Parameters
    ----------
    f, init, xs, length, reverse, unroll
        As in `sliced_scan` and `jax.lax.scan`.
    chunk_size : int, sequence of int or "sqrt", optional
        The largest number of steps between two checkpoints. A smaller chunk is used where it
        divides the length (down to 4/5 of the bound) or makes the chunks equal in size; the last
        one may be shorter. A sequence nests checkpoints, outermost first: ``(1000, 30)`` puts one
        every 1000 steps, and while such a chunk is recomputed, one every 30. ``"sqrt"``: the square
        root of the length. ``None`` puts one checkpoint around the whole scan.
    memory_limit : int or str, optional
        Choose the checkpoints instead: as few levels as keep the temporaries of the gradient within
        this limit, measured by compiling it; no checkpoint, if it fits without. Bytes, ``"2 GB"``,
        or ``"50%"`` of the free memory.
    policy : callable, optional
        What a chunk may store nevertheless, as in `jax.checkpoint` (see `jax.checkpoint_policies`).
        Default: nothing.
    progress : bool, str, callable or observer, default False
        Show a bar of the steps (a string is its label), or call a function with ``(done, total)``,
        as in `auto_vmap`. Counting takes at least a quarter of a microsecond per step. Ignored
        under `jax.disable_jit`.

    Returns
    -------
    carry, ys : pytree
        Those of `jax.lax.scan`.

    Raises
    ------
    TypeError
        An argument has the wrong type, or both ``chunk_size`` and ``memory_limit`` are given.
    TypeError
        ``f`` does not return a pair, or the carry it returns differs from ``init`` in structure,
        shape or dtype.
    ValueError
        A chunk size is not positive, or the sequence of them is empty.
    ValueError
        ``memory_limit`` cannot be read, or three levels of checkpoints need more.
    ValueError
        ``length`` is negative, missing or contradicts ``xs``.
    ValueError
        The leaves of ``xs`` differ in length, or have no axis.

    See Also
    --------
    sliced_scan : Also leaves out some of the ``ys``.

    Notes
    -----
    *Traces.* ``f`` is traced once, however the length divides, also under `jax.grad`; twice where
    `jax.lax.scan` does so, to give a weakly typed ``init`` the dtype that ``f`` returns.

    *Memory.* For ``n`` steps in chunks of ``c``, the reverse pass stores ``n / c`` carries and what
    ``f`` needs at ``c`` steps: least near ``c = sqrt(n)``. With ``d`` nested levels, it is about
    ``n ** (1 / (d + 1))`` of each. If a step stores ``r`` carries, the least is near
    ``c = sqrt(n / r)``; ``memory_limit`` measures ``r``. Where the chunks do not divide the length,
    ``ys`` are copied once, and a derivative copies ``xs`` once.

    *Time.* The reverse pass evaluates ``f`` once more per level of nesting.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from rankax import checkpoint_chunked_scan
    >>> def logistic(x, rate):
    ...     return rate * x * (1 - x), None
    >>> def end(x0, **options):
    ...     return checkpoint_chunked_scan(logistic, x0, jnp.full(101, 1.5), **options)[0]
    >>> plain = jax.grad(lambda x0: jax.lax.scan(logistic, x0, jnp.full(101, 1.5))[0])(0.2)
    >>> bool(jnp.isclose(jax.grad(lambda x0: end(x0, chunk_size=10))(0.2), plain, rtol=1e-5))
    True
    """
    call = scan_call("checkpoint_chunked_scan", f, init, xs, length, reverse, unroll, progress)
    limit = checked_limit(memory_limit, call.site)
    given = chunk_sizes(call.site, chunk_size, call.length)
    if limit is not None and chunk_size is not None:
        raise TypeError(f"{call.site}: memory_limit chooses chunk_size, so give only one of them")
    if policy is not None and not callable(policy):
        came = type(policy).__name__
        raise TypeError(f"{call.site}: policy must be callable or None, got {came}")

    def choose(loop: Loop, body: ItemProgram, arrays: Any) -> tuple[Schedule, bool, Hashable]:
        steps, sizes = loop.length, given
        if limit is not None:
            sizes = _fit(call.site, limit, loop, body.closed, arrays, policy)

        def schedule(loop: Loop, carry: Any, items: Any) -> tuple[Any, Any]:
            carry, ys = scan_checkpointed(loop, carry, items, steps, sizes, policy)
            return carry, loop.y_tree.unflatten(ys)

        is_even = not sizes or steps <= sizes[0] or split_into_chunks(steps, sizes[0]).even
        return schedule, not is_even, None if policy else sizes

    return run_scan(call, choose)


def _fit(
    site: str, limit: int | str, loop: Loop, body: ClosedJaxpr, arrays: Any, policy: Any
) -> tuple[int, ...]:
    """Return the chunk sizes of the fewest levels with which a gradient stays within a limit.

    Without levels, the reverse pass stores ``b`` bytes for each of the ``n`` steps, as measured.
    With ``d`` levels and ``q`` checkpoints of ``s`` bytes in each, the innermost chunk has
    ``c = n / q**d`` steps. What it stores is as much as the checkpoints of a level, ``b * c = s *
    q``, if ``q`` is the ``d + 1``-th root of ``n * b / s``.
    """

    def measure(sizes: tuple[int, ...]) -> int:
        def scan(consts: list[Any], start: tuple[Any, Any]) -> list[Any]:
            stepping = loop.on(body.jaxpr, consts)
            return jax.tree.leaves(scan_checkpointed(stepping, *start, loop.length, sizes, policy))

        return gradient_bytes(scan, body.consts, arrays, site)

    def fit() -> tuple[int, ...]:
        most = limit_in_bytes(limit, free_bytes)
        carry = max(1, sum(leaf.size * leaf.dtype.itemsize for leaf in arrays[0]))
        needed: list[int] = []
        for levels in range(_MOST_LEVELS + 1):
            q = max(2.0, (needed[0] / carry) ** (1 / (levels + 1))) if levels else 1.0
            sizes = tuple(max(1, round(loop.length / q**level)) for level in range(1, levels + 1))
            needed.append(measure(sizes))
            if needed[-1] <= most:
                return sizes
        raise ValueError(
            f"{site}: with up to {_MOST_LEVELS} levels of checkpoints, the gradient needs at least "
            f"{shown_bytes(min(needed))} beyond inputs and outputs, and memory_limit is "
            f"{shown_bytes(most)}; raise it to at least {min(needed)} bytes"
        )

    return fit_once(site, body, (body.consts, *arrays), (limit, policy, loop), fit)


def scan_checkpointed(
    loop: Loop, carry: Any, items: Any, length: int, sizes: tuple[int, ...], policy: Any = None
) -> tuple[Any, Any]:
    """Checkpoint chunks of ``sizes[0]`` steps and, inside each, chunks of ``sizes[1:]``."""
    if not sizes:
        return loop.run(carry, items, length)

    def chunk(size: int) -> Step:
        # A checkpoint around all of another would only add a recomputation.
        inner = tuple(s for s in sizes[1:] if s < size)
        return jax.checkpoint(
            lambda carry, items: scan_checkpointed(loop, carry, items, size, inner, policy),
            policy=policy,
        )

    if length <= sizes[0]:
        return chunk(length)(carry, items)
    size = split_into_chunks(length, sizes[0]).size
    return loop.in_chunks(chunk, carry, items, length, size)
