# SPDX-License-Identifier: MIT
"""The exception classes."""


class RankError(ValueError):
    """A leaf has fewer axes than the rank declared for it."""


class BatchShapeError(ValueError):
    """The batch axes of the arguments do not broadcast together."""


class CoreDimensionError(ValueError):
    """A named or fixed core dimension has two different sizes."""
