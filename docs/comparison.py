# SPDX-License-Identifier: MIT
"""What other libraries do, found by running them: the table of "Why rankax"."""

import os
import re
from importlib.metadata import files, requires
from pathlib import Path

os.environ["NETKET_ENABLE_X64"] = "0"  # NetKet turns 64-bit numbers on unless told not to

import adv_jax_math
import jax
import jax.numpy as jnp
import jax_autovmap
import netket
import powerpax
from IPython.display import Markdown

import rankax
from rankax import auto_vmap, chunked_reduce, chunked_vmap

__all__ = ["lines", "table"]


def _vectorized(fun, _size, ranks=(1,)):
    names = iter("abcdefgh")
    cores = ["(" + ",".join(next(names) for _ in range(rank)) + ")" for rank in ranks]
    return jnp.vectorize(fun, signature=f"{','.join(cores)}->()")


# How each maps a function: with a chunk size, and the ranks of its arguments where it takes them.
TOOLS = {
    "rankax": lambda fun, size, ranks=(1,): auto_vmap(*ranks, chunk_size=size)(fun),
    "`jax.vmap`": lambda fun, size, ranks=None: jax.vmap(fun),
    "`lax.map`": lambda fun, size, ranks=None: lambda x: jax.lax.map(fun, x, batch_size=size),
    "powerpax 0.2": lambda fun, size, ranks=None: powerpax.chunked_vmap(fun, size),
    "NetKet 3.23": lambda fun, size, ranks=None: netket.jax.vmap_chunked(
        fun, in_axes=0, chunk_size=size
    ),
    "adv-jax-math 1.3": lambda fun, size, ranks=None: adv_jax_math.batch_vmap(fun, batch_size=size),
    "jax-autovmap 0.3": lambda fun, size, ranks=(1,): jax_autovmap.auto_vmap(*ranks)(fun),
    "`jnp.vectorize`": _vectorized,
}


def _works(call):
    try:
        return bool(call())
    except Exception:  # each of them refuses in its own way
        return False


def _temporaries(fun, length):
    items = jax.ShapeDtypeStruct((length, 50, 3), jnp.float32)
    return jax.jit(fun).lower(items).compile().memory_analysis().temp_size_in_bytes


def _is_flat(fun, rest=0):
    return _temporaries(fun, 8000 + rest) < 2 * _temporaries(fun, 1000 + rest)


def _nearest(points):
    """A kernel that goes through 50 x 50 numbers, which no compiler fuses whole."""
    squares = jnp.sum((points[:, None] - points[None]) ** 2, axis=-1)
    return jnp.sum(jnp.sort(squares, axis=None)[:20])


def _grad(fun):
    return jax.grad(lambda x: fun(x).sum())


@jax.custom_jvp
def _clipped(x):
    return x**2


_clipped.defjvp(lambda x, t: (_clipped(*x), jnp.clip(2 * x[0], -1, 1) * t[0]))


def _second(mapped):
    slope = _grad(lambda x: mapped(lambda x: jnp.sin(_clipped(x)), 2, (0,))(x))
    return float(jax.jvp(slope, (jnp.full(4, 2.0),), (jnp.ones(4),))[1][0])


def _traces(mapped):
    count = []
    jax.make_jaxpr(mapped(lambda x: count.append(1) or x.sum(), 64))(jnp.ones((1007, 3)))
    return len(count)


def _broadcasts(mapped):
    return mapped(lambda x, y: x @ y, None, (1, 1))(jnp.ones((5, 1, 3)), jnp.ones((4, 3))).shape


def _sums(reduced):
    """Whether memory is flat in the number of items: forward, and as a gradient."""
    return _is_flat(reduced), _is_flat(jax.grad(reduced))


def _found(name, mapped):
    """What one tool does, a word for each row."""
    forward, gradient = mapped(_nearest, 50, (2,)), _grad(mapped(_nearest, 50, (2,)))
    is_bounded, always = _is_flat(forward), _is_flat(forward, rest=7)
    if jax.__version_info__ < (0, 12):
        has_rules = _second(mapped) == _second(TOOLS["`jax.vmap`"])
    else:  # nothing to see any more
        has_rules = name in ("rankax", "`jax.vmap`", "jax-autovmap 0.3", "`jnp.vectorize`")
    broadcasts = _word(_works(lambda: _broadcasts(mapped) == (5, 4)))
    bounded = "yes" if always else "if the chunk divides" if is_bounded else "no"
    return {
        "batch axes found from the shapes": "`batch_vectorize`" if "adv" in name else broadcasts,
        "takes keyword arguments": _word(_works(lambda: _adds_keyword(mapped))),
        "pytree arguments": _word(_works(lambda: _adds_tree(mapped))),
        "memory bounded, forward": bounded,
        "memory bounded, gradient": _word(_is_flat(gradient)),
        "traces the function once, for any length": _word(_traces(mapped) == 1)
        if is_bounded
        else "n/a",
        "correct second derivatives of `jax.custom_jvp`, before JAX 0.12": _word(has_rules),
    }


def _word(value):
    return "yes" if value else "no"


def _adds_keyword(mapped):
    def add(x, y=0.0):
        return x + y

    out = mapped(add, 2, (0, 0))(jnp.ones(4), y=jnp.arange(4.0))
    return out.tolist() == [1.0, 2.0, 3.0, 4.0]


def _adds_tree(mapped):
    tree = {"a": jnp.ones(4), "b": jnp.arange(4.0)}
    return mapped(lambda d: d["a"] + d["b"], 2, (0,))(tree).tolist() == [1.0, 2.0, 3.0, 4.0]


def _needs(tool):
    """The packages that a tool needs besides JAX and NumPy."""
    if tool.startswith("`"):
        return "none"
    required = [need for need in requires(tool.split()[0]) or [] if "extra ==" not in need]
    others = {re.match(r"[\w-]+", need)[0] for need in required} - {"jax", "jaxlib", "numpy"}
    return ", ".join(sorted(others)) if 0 < len(others) < 4 else "many" if others else "none"


def _size(tool):
    """How many lines a tool has to read, as a round number that its next version keeps."""
    if tool.startswith("`"):
        return "part of JAX"
    if tool == "rankax":  # an editable installation lists no files
        paths = [*Path(rankax.__file__).parent.rglob("*.py")]
    else:
        paths = [file.locate() for file in files(tool.split()[0]) if file.suffix == ".py"]
    count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    least = next(limit for limit in (1000, 10_000, 10**9) if count < limit)
    return f"under {least:,}" if least < 10**9 else "over 10,000"


def lines():
    """The rows of the table, as Markdown."""
    found = {name: _found(name, mapped) for name, mapped in TOOLS.items()}

    def adv(x):
        options = {"reduction": jnp.add, "chunk_reduction": jnp.add.reduce}
        return adv_jax_math.batch_vmap(_nearest, batch_size=50, **options)(x)

    assert _sums(lambda x: chunked_reduce(_nearest, "sum", chunk_size=50)(x)) == (True, True)
    assert _sums(adv)[1] is False
    pair = adv_jax_math.batch_vectorize(lambda x, y: x @ y, signature="(n),(n)->()", batch_size=2)
    assert pair(jnp.ones((5, 1, 3)), jnp.ones((4, 3))).shape == (5, 4)
    assert chunked_vmap(jnp.sum, 2, in_axes=1)(jnp.ones((3, 4))).shape == (4,)
    for refused in (
        lambda: netket.jax.vmap_chunked(jnp.sum, in_axes=1, chunk_size=2)(jnp.ones((3, 4))),
        lambda: adv_jax_math.batch_vmap(jnp.sum, in_axes=1, batch_size=2)(jnp.ones((3, 4))),
    ):
        assert not _works(lambda call=refused: call().shape)
    # What no call can show: that there is no such thing in their documentation.
    own = dict.fromkeys(TOOLS, "no") | {"rankax": "yes"}
    rows = {row: {name: found[name][row] for name in TOOLS} for row in found["rankax"]}
    rows["reduces without storing the batch"] = own | {"adv-jax-math 1.3": "not in gradients"}
    rows["shows what a call will do"] = own
    rows["dependencies besides JAX and NumPy"] = {name: _needs(name) for name in TOOLS}
    rows["lines of Python"] = {name: _size(name) for name in TOOLS}
    rows["released: `pip install`"] = dict.fromkeys(TOOLS, "yes") | {"rankax": "not yet"}
    head = [f"| | {' | '.join(TOOLS)} |", "|---" * (len(TOOLS) + 1) + "|"]
    return [*head, *(f"| {row} | {' | '.join(cells.values())} |" for row, cells in rows.items())]


def table():
    """The table, as Markdown that a page shows."""
    return Markdown("\n".join(lines()))
