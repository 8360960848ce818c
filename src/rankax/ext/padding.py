# SPDX-License-Identifier: MIT
"""Buckets: the few lengths to which `bucket=` fills the axes of a batch up."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from rankax.core.base.messages import checked_int

Bucket = bool | tuple[int, ...]

_RATIO = 1.25  # of one length to the next, so that at most a fifth of the items are copies


def checked_bucket(value: Any, site: str) -> Bucket:
    """Return a valid value of the option ``bucket``, or raise."""
    if isinstance(value, bool):
        return value
    refusal = f"{site}: bucket must be True, False or lengths such as (128, 1024, 8192), got"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{refusal} {type(value).__name__} {value!r}")
    if not value:
        raise ValueError(f"{refusal} no length")
    refusal = f"{site}: the lengths of bucket must be positive ints, got"
    return tuple(sorted({checked_int(length, refusal, least=1) for length in value}))  # pyright: ignore


def bucket_of(length: int, bucket: Bucket) -> int | None:
    """Return the length to which an axis is padded; None if it is longer than all of them."""
    series = (math.ceil(_RATIO**k) for k in itertools.count()) if bucket is True else bucket or ()
    return next((size for size in series if size >= length), None)
