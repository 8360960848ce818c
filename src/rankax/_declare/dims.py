# SPDX-License-Identifier: MIT
"""Core dimensions: how a rank is written, and which sizes it allows."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

from rankax._declare.expressions import (
    CannotComputeError,
    evaluated,
    free_names,
    why_never_checked,
)

__all__ = ["Dim", "Rank", "check_comparable", "parse_dims"]


@dataclasses.dataclass(frozen=True)
class Dim:
    """One core dimension: of a fixed size, of a named one, an expression of names, or free."""

    text: str
    size: int | None = None
    name: str | None = None
    expression: str | None = None
    stretches: bool = False  # "#n": length 1 is as good as n

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names that its expression is made of."""
        return () if self.expression is None else free_names(self.expression)

    def expected(self, sizes: Mapping[str, int]) -> Any:
        """Return the size this dimension must have, or None where nothing says so.

        That of an expression is compared by ``==``, as jaxtyping does, so that ``n/2`` is 2 for
        n = 4. Nothing says so where this call does not bind all names of an expression.

        Raises
        ------
        CannotComputeError
            If the expression fails for these sizes.
        """
        if self.name is not None:
            return sizes.get(self.name)
        if self.expression is None:
            return self.size
        if any(name not in sizes for name in self.names):
            return None
        return evaluated(self.expression, sizes)

    def fits(self, size: int, sizes: Mapping[str, int]) -> bool:
        """Whether this dimension may have this size, as far as the other sizes say."""
        try:
            return self.expected(sizes) in (None, size)
        except CannotComputeError:
            return False


@dataclasses.dataclass(frozen=True)
class Rank:
    """What is declared for one leaf: how many core dimensions, and which where that is known."""

    rank: int
    dims: tuple[Dim, ...] | None = None
    is_key: bool = False  # of typed PRNG keys
    is_split: bool = False  # a key of which each item gets its own

    def __str__(self) -> str:
        if self.is_split:
            return "SplitKey"
        if self.dims is None:
            return str(self.rank)
        return f'"{" ".join(dim.text for dim in self.dims)}"'


_ANY_SHAPE = ("...", "*_")
_FIXED = re.compile(r"(?:[A-Za-z_]\w*=)?(\d+)")


@functools.lru_cache(maxsize=1024)  # pure, and the same few strings come again and again
def parse_dims(text: str) -> Rank | None:
    """Read a dimension string: ``"n 3"``, ``""``, ``"*batch n 3"``, ``"... 3"``.

    The words are jaxtyping's. A leading variadic stands for the batch axes and counts for nothing,
    so that ``"*batch"`` is a scalar. ``"..."`` alone means that no rank is declared (``None``).

    Raises
    ------
    ValueError
        If a word cannot be a dimension, or a variadic does not come first.
    """
    words = text.split()
    if len(words) == 1 and words[0] in _ANY_SHAPE:
        return None
    if words and _is_variadic(words[0]):
        words = words[1:]
    if any(_is_variadic(word) for word in words):
        raise ValueError(
            f"the dimensions {text!r} have a variadic that is not the first word; batch axes lead, "
            f"so write it first and name the core dimensions after it, as in '*batch n 3'"
        )
    return Rank(len(words), tuple(_parse_dim(word, text) for word in words))


def _is_variadic(word: str) -> bool:
    marks = word[: len(word) - len(word.lstrip("#?_*"))]
    return word == "..." or "*" in marks


def _parse_dim(word: str, text: str) -> Dim:
    bare = word.lstrip("#?")
    marks = word[: len(word) - len(bare)]
    stretches = "#" in marks
    if bare.startswith("_"):
        return Dim(word)
    if fixed := _FIXED.fullmatch(bare):
        return Dim(word, size=int(fixed[1]), stretches=stretches)
    if bare.isidentifier():
        # "?n" differs from leaf to leaf of a pytree, so nothing can be compared across leaves.
        return Dim(word) if "?" in marks else Dim(word, name=bare, stretches=stretches)
    if ("," in bare and "(" not in bare) or not bare:
        raise ValueError(
            f"the dimensions {text!r} cannot be read at {word!r}: separate names and sizes by "
            "spaces, as in 'n 3'"
        )
    expression = bare.split("=", 1)[1] if re.match(r"[A-Za-z_]\w*=[^=]", bare) else bare
    if re.fullmatch(r"-\d+", expression):
        raise ValueError(
            f"the dimensions {text!r} cannot be read at {word!r}: a size is not negative"
        )
    # jaxtyping puts the value of an argument in place of "{k}" and "{self.k}". Those are values,
    # not sizes, so the dimension is left to it.
    by_value = "{" in expression
    try:
        ast.parse(expression.replace("{", "(").replace("}", ")"), mode="eval")
    except SyntaxError:
        raise ValueError(
            f"the dimensions {text!r} cannot be read at {word!r}: a dimension is a name, a size, "
            "'_', or an expression of names without spaces such as 'n+1'"
        ) from None
    if by_value:
        return Dim(word)
    return Dim(word, expression=expression, stretches=stretches)


def check_comparable(rank: Rank, bound: Collection[str]) -> None:
    """Refuse a dimension of an explicit string that no call could compare with a size.

    Annotations are not held to this: jaxtyping evaluates any Python there, with names that it may
    know from elsewhere.

    Parameters
    ----------
    rank : Rank
    bound : collection of str
        The names that some argument of the kernel binds.

    Raises
    ------
    ValueError
        If an expression is an integer for no sizes, or has a name that no argument binds.
    """
    for dim in rank.dims or ():
        problem = None
        if "{" in dim.text:
            problem = "the value of an argument is not looked up; name the size, or write '_'"
        elif dim.expression is not None:
            problem = why_never_checked(dim.expression, bound)
        if problem is not None:
            raise ValueError(f"the dimension {dim.text!r} could never be checked: {problem}")
