# SPDX-License-Identifier: MIT
"""Whether a call becomes part of a program, or is evaluated now."""

from __future__ import annotations

from typing import Any

import jax.extend

__all__ = ["is_staged"]


class _StagedError(Exception):
    """Raised in place of adding a step to a program that is being traced."""


_probe = jax.extend.core.Primitive("rankax_probe")
_probe.multiple_results = True  # none at all, which other tracers (those of Quax, say) rely on
_probe.def_impl(list)


@_probe.def_abstract_eval
def _() -> Any:
    raise _StagedError


def is_staged() -> bool:
    """Whether what is called now becomes part of an outer program, as inside `jax.jit`.

    It does not under a bare `jax.vmap` or `jax.grad`. The abstract value of a primitive is asked
    for only where it would become a step of a program; everywhere else it is simply run.
    (``jax.jit(inline=True)`` would do, if every version of JAX inlined while it traces.)
    """
    try:
        _probe.bind()
    except _StagedError:
        return True
    return False
