# SPDX-License-Identifier: MIT
"""The result of `tune`: a table that can be saved in a file of JSON and looked up there."""

import dataclasses
import inspect
import json
import os
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import jax

from rankax.core.base.messages import table
from rankax.core.base.trees import leaves_with_names
from rankax.ext.memory.budget import shown_bytes

NOT_TRIED = "not tried"  # the note of a candidate for which there was no time
_FORMAT = "rankax tunings, 1"
_HEADER = ("items at once", "options", "time per item", "temporaries", "")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One set of options, and its measurements.

    Attributes
    ----------
    options : dict
        For ``with_options``.
    tile : int
        The number of items evaluated at once.
    seconds : float or None
        The measured time per item: the median of its last runs; None if it was not run.
    temporaries : int or None
        The bytes that a call with all items needs besides arguments and results, as compiled; None
        if it was not compiled for all items.
    note : str
        Why it was given up, not run or failed; ``"not tried"`` if time ran out.
    """

    options: dict[str, Any]
    tile: int
    seconds: float | None
    temporaries: int | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of ``kernel.tune(...)``, which ``print(kernel.tuning)`` shows as a table.

    Attributes
    ----------
    measured_for : dict
        The kernel, the shapes and dtypes of its arguments, the device and the version of JAX.
    candidates : tuple of Candidate
        The first has the options that the kernel had.
    chosen : int
        The position of the fastest candidate.
    """

    measured_for: dict[str, Any]
    candidates: tuple[Candidate, ...]
    chosen: int

    @property
    def options(self) -> dict[str, Any]:
        """The chosen options, for ``kernel.with_options(**kernel.tuning.options)``."""
        return dict(self.candidates[self.chosen].options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Add this to a JSON file, in place of an earlier measurement of the same call."""
        file = Path(path)
        entries = read_tunings(file) if file.exists() else ()
        entries = [*(e for e in entries if e.measured_for != self.measured_for), self]
        content = {"format": _FORMAT, "tunings": [dataclasses.asdict(e) for e in entries]}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return f"{self._title()}\n{table(_HEADER, self._rows(), {self.chosen})}"

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

        tags = ["th" if i == self.chosen else "td" for i in range(len(self.candidates))]
        body = "".join(map(row, self._rows(), tags))
        title = f"<p>{escape(self._title())}</p>"
        return f"{title}<table><thead>{row(_HEADER, 'th')}</thead><tbody>{body}</tbody></table>"

    def _title(self) -> str:
        facts = self.measured_for
        what = "value and gradient" if facts["gradient"] else "value"
        arguments = ", ".join(f"{path} {kind}" for path, kind in facts["arguments"].items())
        left = sum(candidate.note == NOT_TRIED for candidate in self.candidates)
        more = f"; {left} not tried, for which pass more seconds=" if left else ""
        return (
            f"{facts['kernel'].rpartition('.')[2]}: {what} for {arguments}, on {facts['device']} "
            f"with JAX {facts['jax']}{more}"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        before, after = (self.candidates[i].seconds for i in (0, self.chosen))
        gain = f", {before / after:.3g} times as fast" if self.chosen and before and after else ""
        return [
            (
                str(c.tile),
                ", ".join(f"{name}={value!r}" for name, value in c.options.items()),
                "-" if c.seconds is None else _time(c.seconds),
                "-" if c.temporaries is None else shown_bytes(c.temporaries),
                f"chosen{gain}" if i == self.chosen else c.note,
            )
            for i, c in enumerate(self.candidates)
        ]


def _time(seconds: float) -> str:
    units = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")]
    size, unit = next((u for u in units if seconds >= u[0]), (1e-9, "ns"))
    return f"{seconds / size:.3g} {unit}"


def measured_for(
    kernel: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], *, gradient: bool
) -> dict[str, Any]:
    """Return a JSON-serializable description of the measured call."""
    bound = inspect.signature(kernel).bind(*args, **kwargs)
    arguments: dict[str, str] = {}
    for name, value in bound.arguments.items():
        arguments |= {path: _kind(leaf) for path, leaf in leaves_with_names(value, name)}
    return {
        "kernel": f"{kernel.__module__}.{kernel.__qualname__}",
        "arguments": arguments,
        "gradient": gradient,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


def _kind(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, (bool, int, str)):  # may decide how much work there is
        return repr(leaf)
    return type(leaf).__name__


class Tunings(tuple[Tuning, ...]):
    """The contents of a file that `Tuning.save` wrote: a tuple of `Tuning`."""

    __slots__ = ()

    def find(
        self, kernel: Callable[..., Any], *args: Any, gradient: bool = False, **kwargs: Any
    ) -> Tuning | None:
        """Return the `Tuning` for this kernel and arguments like these, or None.

        All of these must agree: the name of the kernel and its module, the shapes and dtypes of the
        arguments, the kind of device, and the version of JAX. The arguments may be
        `jax.ShapeDtypeStruct`.
        """
        facts = measured_for(kernel, args, kwargs, gradient=gradient)
        return next((t for t in self if t.measured_for == facts), None)


def read_tunings(path: str | os.PathLike[str]) -> Tunings:
    """Read what `load_tuning` returns."""
    refusal = f"{path}: not a file that Tuning.save wrote"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"{refusal} (its format is {content['format']!r}, not {_FORMAT!r})")
        tunings: list[Tuning] = []
        for entry in content["tunings"]:
            facts, chosen = entry["measured_for"], entry["chosen"]
            candidates = tuple(Candidate(**candidate) for candidate in entry["candidates"])
            tunings.append(Tuning(facts, candidates, chosen))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{refusal} ({type(error).__name__}: {error})") from None
    return Tunings(tunings)
