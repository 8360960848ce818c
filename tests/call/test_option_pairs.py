# SPDX-License-Identifier: MIT
"""Options in pairs, in a call and in a stream, against plain programs; or refused in words."""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from helpers import assert_same, refusal, slow, weekly
from rankax import Mask, Ragged, SplitKey, auto_vmap
from rankax._options import NAMES
from rankax.reductions import Moments, MomentsResult, TopK, TopKResult

DRAW = np.random.default_rng(3).normal
X = DRAW(size=(6, 1, 3)).astype(np.float32)
Y = DRAW(size=(5, 3)).astype(np.float32)
KEY = jax.random.key(8)
LENGTHS = np.array([3, 1, 0, 3, 2])
IS_ROW = np.arange(3) < LENGTHS[:, None]


def item(x, y, key=None, mask=None):
    """Return a number by a loop whose length depends on the item, and whether that is even."""
    start = jnp.sum(jnp.sin(x)) * jnp.sum(y, where=mask)
    if key is not None:
        start += jax.random.normal(key)
    state = jnp.int32(0), start
    n, v = lax.while_loop(lambda s: s[1] < 2, lambda s: (s[0] + 1, s[1] + 0.3 + s[1] ** 2), state)
    return {"v": v, "ok": n % 2 == 0}


def items(x, y, key=None):
    return jax.vmap(item)(x, y) if key is None else jax.vmap(item)(x, y, key)


OPTIONS = {
    "chunks": {"chunk_size": 4},
    "a memory limit": {"memory_limit": "4 kB"},
    "what chunks store": {"chunk_size": 7, "checkpoint": False},
    "jit": {"jit": True},
    "a bucket": {"jit": True, "bucket": (8, 16)},
    "options of XLA": {"jit": True, "compiler_options": {"xla_embed_ir_in_executable": True}},
    "a device": {"devices": 1},
    "progress": {"progress": lambda done, total: None},
    "a mask": {"reduce": {"v": Moments(), "ok": "any"}, "where": "ok"},
    "a sum": {"reduce": {"v": "sum", "ok": "all"}},
    "indices": {"reduce": {"v": "argmax", "ok": "any"}, "reduce_axis": -2},
    "the largest": {"reduce": {"v": TopK(4), "ok": "all"}},
    "what is kept": {"reduce": {"v": None, "ok": "any"}},
    "names": {"reduce": {"v": "sum", "ok": "any"}, "over": "j"},
    "a batch at once": {"batched": True},
    "unlike lengths": {"ragged": True},
    "an axis more": {"batch_shape": (2, 1, 1)},
    "keys": {"key": KEY},
    "sines of ours": {"cpu_math": True},
    "the plain program": {"xla_cpu": False},
    "no part moved": {"hoist": False},
    "one kernel": {"fused": "auto"},
    "lanes": {"lockstep": False},
    "a stream": {"stream": True},
}


@functools.cache
def values(batch, *, with_key, is_ragged):
    """Return the outputs of all items, by plain JAX."""
    y = np.where(IS_ROW, Y, 0) if is_ragged else Y
    pair = [np.broadcast_to(x, (*batch, 3)).reshape(-1, 3) for x in (X, y)]
    keys = [jax.random.split(KEY, batch).ravel()] if with_key else []
    outs = jax.jit(jax.vmap(item))(*pair, *keys)
    return {name: np.asarray(out).reshape(batch) for name, out in outs.items()}


def reduced(how, x, counts):
    """Reduce the last axis of an array, by NumPy."""
    if how in ("any", "all"):
        return np.any(x & counts, -1) if how == "any" else np.all(x | ~counts, -1)
    if how == "sum":
        return np.sum(x, -1, where=counts)
    ranked = np.where(counts, x, -np.inf)
    if how == "argmax":
        return np.where(counts.any(-1), ranked.argmax(-1), -1).astype(np.int32)
    if isinstance(how, TopK):
        first = np.argsort(-ranked, -1, kind="stable")[..., : how.k]
        best = np.take_along_axis(ranked, first, -1)
        return TopKResult(best, np.where(best == -np.inf, -1, first).astype(np.int32))
    count = counts.sum(-1).astype(np.int32)
    mean = np.sum(x, -1, where=counts) / count
    squares = np.sum((x - mean[..., None]) ** 2, -1, where=counts)
    return MomentsResult(count, mean.astype(np.float32), (squares / count).astype(np.float32))


def expected(options):
    batch = (*options.get("batch_shape", ())[:1], 6, 5)
    outs = values(batch, with_key="key" in options, is_ragged="ragged" in options)
    if "reduce" not in options:
        return jax.tree.map(jnp.asarray, outs)
    axis = options.get("reduce_axis", -1 if "over" in options else None)

    def row(x):
        return x.ravel() if axis is None else np.moveaxis(x, axis, -1)

    counts = outs["ok"] if "where" in options else np.ones(batch, bool)
    entries = options["reduce"].items()
    with np.errstate(invalid="ignore"):
        out = {
            name: outs[name] if how is None else reduced(how, row(outs[name]), row(counts))
            for name, how in entries
        }
    return jax.tree.map(jnp.asarray, out)


def refused(options):
    """Return words of what is said of options that exclude each other; None if they do not."""
    at_once, ragged, stream = (name in options for name in ("batched", "ragged", "stream"))
    if {"over", "reduce_axis"} <= options.keys():
        return "both say which axes are reduced"
    if at_once and "lockstep" in options:
        return "lockstep=False lets each item end by itself, but with batched=True"
    if at_once and ragged:
        return "y is Ragged, but with batched=True the function takes a whole chunk"
    if stream and "batch_shape" in options:
        return "has no chunks, by which rankax.stream would evaluate it"
    if stream and "key" in options:
        return "key has the rank SplitKey, but rankax.stream evaluates block by block"
    return None


def called(options, out):
    """Call the kernel with these options; ``out`` is where a stream stores its results."""
    options = dict(options)
    is_stream, key = options.pop("stream", False), options.pop("key", None)
    ranks, x, y = {"x": 1, "y": 1, "key": None if key is None else SplitKey}, X, Y
    if "over" in options:
        ranks, x = ranks | {"x": "i | 3", "y": "j | 3"}, X[:, 0]
        options |= {"batch_shape": 2} if "batch_shape" in options else {}
    if options.pop("ragged", False):
        y = Ragged(Y[IS_ROW], LENGTHS)
        ranks |= {"y": "j | n" if "over" in options else "n"}
        ranks |= {} if options.get("batched") else {"mask": Mask("n")}
    kernel = auto_vmap(ranks=ranks, **options)(items if options.get("batched") else item)
    more = {} if key is None else {"key": key}
    if not is_stream:
        return kernel(x, y, **more)
    run = pytest.importorskip("rankax.stream", exc_type=ImportError).run
    stored = run(kernel, x, y, **more, out=out, memory_limit="5 MB", progress=False)
    return jax.tree.map(lambda x: jnp.asarray(x[...]), stored)


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """Let the 30 items of a stream be 8 blocks, not 30."""
    if importlib.util.find_spec("zarr"):
        monkeypatch.setattr("rankax.stream._job._LEAST", 6)


BOTH = "lanes", "a stream"
CASES = [*itertools.combinations(OPTIONS, 2), *((n, *BOTH) for n in OPTIONS if n not in BOTH)]
EACH_TIME = [("a mask", "lanes"), ("keys", "lanes"), ("a mask", "a stream")]
# Each option is in one of these. Lanes have memory limits in tests/lockstep.
OFTEN = ["the largest", "what is kept", "an axis more", "a batch at once"]
AT_MERGE = [
    *((name, last) for last in BOTH for name in OFTEN),
    *(("a bucket", "lanes"), ("a bucket", "keys"), ("a memory limit", "a stream")),
    *(("chunks", "indices"), ("a memory limit", "unlike lengths"), ("jit", "a batch at once")),
    *(("a bucket", "unlike lengths"), ("options of XLA", "keys"), ("a device", "the largest")),
    *(("progress", "a sum"), ("what is kept", "an axis more"), ("what chunks store", "a mask")),
    *(("unlike lengths", "sines of ours"), ("unlike lengths", "keys")),
    *(("jit", "the plain program"), ("names", "unlike lengths"), ("names", "a stream")),
]


def mark(names):
    return names if names in EACH_TIME else slow(names) if names in AT_MERGE else weekly(names)


@pytest.mark.parametrize("names", [*map(mark, CASES)], ids=" and ".join)
def test_options_together(tmp_path, names):
    options = functools.reduce(dict.__or__, (OPTIONS[name] for name in names))
    if words := refused(options):
        assert words in refusal(TypeError, called, options, tmp_path)
    else:
        assert_same(called(options, tmp_path), expected(options), rtol=1e-4, atol=1e-5)


def test_every_option_is_paired():
    assert {*NAMES} <= {name for given in OPTIONS.values() for name in given}
