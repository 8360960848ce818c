# SPDX-License-Identifier: MIT
"""Ragged items beside padding to the longest, and beside one program for each length.

    python benchmarks/ragged.py

10,000 items of log-normal length, median 20, longest over
1,000. For each way: the first call, which compiles, and later ones; the programs that the first one
compiled; and the memory of the compiled program, temporaries apart from inputs and outputs.

* The items of the other two ways are sorted, stacked and filled up before the clock starts, and
  their results stay as they are. Those of `rankax.Ragged` start from the flat array, in the order
  given, and end there.
* Temporaries of `rankax.Ragged` are those of the whole call in one `jax.jit`, all lengths together;
  those of one program for each length are of the one with most rows. Its gradient is left out: it
  compiles twice as many programs.
* All three use the same chunks of the same kernel, on one core. Processor time, so that a machine
  with other work does not count; the least of some turns.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import page
from rankax import Mask, Ragged, auto_vmap

os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX starts its threads

RESULTS = page.RESULTS / "ragged.md"
ITEMS, CHUNK, ROUNDS = 10_000, 64, 9
WEIGHTS = np.random.default_rng(1).normal(size=(3, 32)).astype(np.float32)
HEAD = """# Ragged items

Written by `{command}`. jax {jax}, {device}, one core, float32.

{plan}; `chunk_size={chunk}`.
Processor time, the least of {rounds} turns. The first call compiles *programs*, of which some hold
the kernel. Memory is what the compiler reports; temporaries of `Ragged` are those of all lengths
in one program. The items of the other ways are sorted, stacked and filled up before the clock
starts.

"""
COLUMNS = {
    "way": "---",
    "": "---",
    "first, s": "---:",
    "later, ms": "---:",
    "times `jit=True`": "---:",
    "programs": "---:",
    "of the kernel": "---:",
    "temporaries, MB": "---:",
    "inputs and outputs, MB": "---:",
}
compiled: list[str] = []


def listen(event: str, _: float, **facts: Any) -> None:
    """Note the name of each program that is compiled."""
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(str(facts.get("fun_name")))


def energy(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Return a number for one item that looks at each of its rows."""
    return jnp.sum(jnp.tanh(x @ WEIGHTS).sum(-1), where=mask)


EAGER = auto_vmap(x="n 3", mask=Mask("n"), chunk_size=CHUNK)(energy)
KERNEL = EAGER.with_options(jit=True)
PADDED = auto_vmap(x="n 3", mask="n", chunk_size=CHUNK, jit=True)(energy)


class Way:
    """One way to evaluate all items, with the arrays that it needs."""

    def __init__(self, x: Ragged, gradient: bool) -> None:
        self.x, self.gradient = Ragged(jnp.asarray(x.values), x.lengths), gradient

    def differentiated(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return what one call computes: the kernel, or the gradient of the sum of its results."""
        return jax.grad(lambda x, *rest: kernel(x, *rest).sum()) if self.gradient else kernel

    def call(self) -> Any:
        """Evaluate all items."""
        raise NotImplementedError

    def program(self) -> Any:
        """Return the program whose memory counts, before it is compiled."""
        raise NotImplementedError

    def arrays(self) -> Any:
        """Return what goes into the call."""
        return self.x

    def flat(self, out: Any) -> Any:
        """Return the result as that of `rankax.Ragged`."""
        return np.asarray(out.values if isinstance(out, Ragged) else out)


class OneCall(Way):
    """A call of rankax with a `Ragged`."""

    kernel = staticmethod(KERNEL)  # or it would be a method

    def call(self) -> Any:
        return self.differentiated(self.kernel)(self.x)

    def program(self) -> Any:
        return jax.jit(self.differentiated(EAGER)).lower(self.x)


class Eager(OneCall):
    """The same without ``jit=True``."""

    kernel = staticmethod(EAGER)


class PerLength(Way):
    """A program for each length that occurs."""

    def __init__(self, x: Ragged, gradient: bool) -> None:
        super().__init__(x, gradient)
        items, self.batches = x.to_list(), []
        for length in np.unique(x.lengths):
            at = np.flatnonzero(x.lengths == length)
            self.batches.append((at, jnp.stack([items[i] for i in at])))

    def call(self) -> Any:
        return [KERNEL(batch) for _, batch in self.batches]

    def program(self) -> Any:
        largest = max((batch for _, batch in self.batches), key=lambda batch: batch.size)
        return jax.jit(EAGER).lower(largest)

    def flat(self, out: Any) -> Any:
        result = np.zeros(len(self.x), np.float32)
        for (at, _), part in zip(self.batches, out, strict=True):
            result[at] = part
        return result


class Padded(Way):
    """All items at the length of the longest."""

    def __init__(self, x: Ragged, gradient: bool) -> None:
        super().__init__(x, gradient)
        longest = int(x.lengths.max())
        self.mask = np.arange(longest) < x.lengths[:, None]
        filled = np.zeros((len(x), longest, 3), np.float32)
        filled[self.mask] = x.values
        self.filled = jnp.asarray(filled), jnp.asarray(self.mask)

    def call(self) -> Any:
        return self.differentiated(PADDED)(*self.filled)

    def program(self) -> Any:
        return jax.jit(self.differentiated(PADDED)).lower(*self.filled)

    def arrays(self) -> Any:
        return self.filled

    def flat(self, out: Any) -> Any:
        return np.asarray(out)[self.mask] if self.gradient else np.asarray(out)


WAYS: dict[str, type[Way]] = {
    "`Ragged`, `jit=True`": OneCall,
    "`Ragged`": Eager,
    "one program for each length": PerLength,
    "padded to the longest": Padded,
}


def timed(way: Way) -> tuple[Any, float]:
    """Return the result of a call, and its seconds."""
    begin = time.process_time()
    out = jax.block_until_ready(way.call())
    return out, time.process_time() - begin


def compare(x: Ragged, gradient: bool) -> list[str]:
    """Return the rows of one mode: first calls one after the other, then turns."""
    ways = {
        name: kind(x, gradient)
        for name, kind in WAYS.items()
        if not (gradient and kind is PerLength)
    }
    first: dict[str, float] = {}
    outs: dict[str, Any] = {}
    counts: dict[str, tuple[int, int]] = {}
    want = None
    for name, way in ways.items():
        compiled.clear()
        outs[name], first[name] = timed(way)
        counts[name] = len(compiled), sum(energy.__name__ in program for program in compiled)
        found = way.flat(outs[name])
        want = found if want is None else want
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-2, err_msg=name)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in page.turns(ROUNDS):
        for name, way in ways.items():
            times[name].append(timed(way)[1])
    least, rows = min(times["`Ragged`, `jit=True`"]), []
    for name, way in ways.items():
        temporaries = way.program().compile().memory_analysis().temp_size_in_bytes / 1e6
        others = sum(leaf.nbytes for leaf in jax.tree.leaves((way.arrays(), outs[name]))) / 1e6
        programs, own = counts[name]
        cells = [
            name,
            "gradient" if gradient else "forward",
            f"{first[name]:.2f}",
            f"{1e3 * min(times[name]):.1f}",
            f"{min(times[name]) / least:.2f}",
            str(programs),
            str(own or "—"),
            f"{temporaries:.2f}",
            f"{others:.1f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
        page.progress(rows[-1])
    return rows


def main() -> None:
    parser = page.arguments(__doc__)
    parser.add_argument("--results", default=RESULTS.stem, help="the name of the file of results")
    given = parser.parse_args()
    jax.monitoring.register_event_duration_secs_listener(listen)
    rng = np.random.default_rng(0)
    lengths = np.ceil(rng.lognormal(np.log(20), 1.2, ITEMS)).astype(int)
    x = Ragged(rng.normal(size=(lengths.sum(), 3)).astype(np.float32), lengths)
    command = "python benchmarks/ragged.py"
    if given.results != RESULTS.stem:
        command += f" --results {given.results}"
    command += " --write"
    head = "".join(f"| {' | '.join(cells)} |\n" for cells in (COLUMNS, COLUMNS.values()))
    text = HEAD.format(
        command=command,
        jax=jax.__version__,
        device=jax.devices()[0].device_kind,
        plan=KERNEL.plan(x).ragged[0],
        chunk=CHUNK,
        rounds=ROUNDS,
    )
    rows = [row for gradient in (False, True) for row in compare(x, gradient)]
    path = RESULTS.with_stem(given.results)
    page.finish(path, text + head + "\n".join(rows), write=given.write)


if __name__ == "__main__":
    main()
