# SPDX-License-Identifier: MIT
"""A fault of one version of JAX, which `plan` warns of."""

import warnings

import jax

from rankax.core.base.messages import caller_level
from rankax.core.plan.schedule import Plan

# In JAX 0.11.1, the time of a map in small chunks is quadratic in their number (jax issue 40101).
_IS_SLOW = jax.__version_info__[:3] == (0, 11, 1)
_NOT_SMALL = 256  # items; measured


def warn_of_small_chunks(plan: Plan, on_cpu: bool) -> None:
    """Warn of a map whose time grows with the square of its steps, in one version of JAX."""
    is_map = on_cpu and not plan.reduced and not any(level.walker for level in plan.levels)
    if _IS_SLOW and is_map and plan.in_flight < _NOT_SMALL < plan.steps:
        warnings.warn(
            f"{plan.kernel}: JAX 0.11.1 is slow in many small chunks (here {plan.steps} of "
            f"{plan.in_flight}); use a chunk_size of {_NOT_SMALL} or more, or another JAX",
            stacklevel=caller_level(),
        )
