# SPDX-License-Identifier: MIT
"""Core dimensions: how a rank is written, and which sizes it allows.

``"*batch"`` alone is rank 0, ``"..."`` is no rank. A named variadic means the batch axes. If it
meant "no rank", ``m: Float[Array, "*batch"]`` beside ``x: Float[Array, "*batch n 3"]`` would be
passed whole.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

_FUNCTIONS = {"abs": abs, "int": int, "max": max, "min": min, "round": round}


@dataclasses.dataclass(frozen=True)
class NoSize:
    """The reason why an expression of dimensions has no value for the sizes of one call."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Dim:
    """One core dimension: a fixed size, a name, an expression of names, or free."""

    text: str
    size: int | None = None
    name: str | None = None
    expression: str | None = None
    stretches: bool = False  # "#n": length 1 is as good as n

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names in its expression."""
        nodes = ast.walk(ast.parse(self.expression or "0", mode="eval"))
        names = (node.id for node in nodes if isinstance(node, ast.Name))
        return tuple(dict.fromkeys(name for name in names if name not in _FUNCTIONS))

    def expected(self, sizes: Mapping[str, int]) -> Any:
        """Return the size that this dimension must have, or None if any size will do.

        The value of an expression is compared by ``==``, as in jaxtyping, so that ``n/2`` is 2 for
        n = 4. An expression is not checked if the call does not bind all of its names. If it fails,
        the result is a `NoSize`, which equals no size.
        """
        if self.name is not None:
            return sizes.get(self.name)
        if self.expression is None:
            return self.size
        if any(name not in sizes for name in self.names):
            return None
        try:
            # The kernel's author wrote the text, and jaxtyping evaluates it in the same way.
            return eval(self.expression, {"__builtins__": _FUNCTIONS}, dict(sizes))
        except Exception as error:
            return NoSize(f"{type(error).__name__}: {error}")

    def fits(self, size: int, sizes: Mapping[str, int]) -> bool:
        """Return whether the other sizes allow this size."""
        return self.expected(sizes) in (None, size)


@dataclasses.dataclass(frozen=True)
class Rank:
    """The declaration of one leaf: the number of core dimensions, and the dimensions if known."""

    rank: int
    dims: tuple[Dim, ...] | None = None
    is_key: bool = False  # of typed PRNG keys
    is_split: bool = False  # a key that is split, one for each item
    is_mask: bool = False  # says which rows are real; not passed by callers
    batch: tuple[str, ...] = ()  # the names of the batch axes next to the core axes

    def __str__(self) -> str:
        if self.dims is None:
            return str(self.rank)
        text = " ".join([*self.batch, *["|"] * bool(self.batch), *(dim.text for dim in self.dims)])
        if self.is_split:
            return f'SplitKey("{text}")' if text else "SplitKey"
        return f'Mask("{text}")' if self.is_mask else f'"{text}"'


_ANY_SHAPE = ("...", "*_")
_FIXED = re.compile(r"(?:[A-Za-z_]\w*=)?(\d+)")


@functools.lru_cache(maxsize=1024)  # pure, and called again and again with the same few strings
def parse_dims(text: str) -> Rank | None:
    """Read a dimension string: ``"n 3"``, ``""``, ``"*batch n 3"``, ``"... 3"``.

    The syntax is jaxtyping's. A leading variadic means the batch axes and adds nothing to the rank,
    so that ``"*batch"`` is a scalar. ``"..."`` alone means that no rank is declared (``None``).

    Raises
    ------
    ValueError
        If a word is not a dimension, or a variadic does not come first.
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


def parse_axes(text: str) -> tuple[tuple[str, ...], str]:
    """Split a dimension string at its bar: the names of batch axes, and the core dimensions.

    Raises
    ------
    ValueError
        If something other than different names is left of the bar, or there is a second bar.
    """
    front, bar, core = text.partition("|")
    words = front.split()
    words = words[1:] if words[:1] == ["..."] else words
    if not bar:
        return (), text
    # "_" is any size in core dimensions, so it would look like an axis of no name.
    no_names = (word for word in words if not word.isidentifier() or word.startswith("_"))
    problem = next(no_names, None)
    if problem is not None:
        problem = f"{problem!r} is not a name"
    elif twice := [word for word in words if words.count(word) > 1]:
        problem = f"{twice[0]!r} is there twice"
    elif "|" in core:
        problem = "there is more than one bar"
    elif _is_variadic((core.split() or [""])[0]):
        problem = "batch axes without a name need no '...'"
    if problem is None:
        return tuple(words), core
    raise ValueError(
        f"the rank {text!r} cannot be read: {problem}; left of the bar are the names of batch "
        "axes, right of it the core dimensions, as in 'i | 3', 'i j | n 3' or 'i |'"
    )


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
        # "?n" may differ between the leaves of a pytree, so it is not compared between leaves.
        return Dim(word) if "?" in marks else Dim(word, name=bare, stretches=stretches)
    unreadable = f"the dimensions {text!r} cannot be read at {word!r}:"
    if ("," in bare and "(" not in bare) or not bare:
        raise ValueError(f"{unreadable} separate names and sizes with spaces, as in 'n 3'")
    expression = bare.split("=", 1)[1] if re.match(r"[A-Za-z_]\w*=[^=]", bare) else bare
    if re.fullmatch(r"-\d+", expression):
        raise ValueError(f"{unreadable} a size must not be negative")
    try:
        ast.parse(expression.replace("{", "(").replace("}", ")"), mode="eval")
    except SyntaxError:
        raise ValueError(
            f"{unreadable} a dimension is a name, a size, '_', or an expression of names without "
            "spaces such as 'n+1'"
        ) from None
    # jaxtyping replaces "{k}" and "{self.k}" by the values of arguments. Only jaxtyping can check
    # such a dimension.
    return Dim(word) if "{" in expression else Dim(word, expression=expression, stretches=stretches)
