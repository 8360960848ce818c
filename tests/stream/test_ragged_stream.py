# SPDX-License-Identifier: MIT
"""Streams of ragged items: a flat array on disk, and lengths; beside the call in memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

import rankax.stream
from helpers import assert_same, compilations, slow
from rankax import Mask, Ragged, auto_vmap
from rankax.reductions import Fold, TopK
from rankax.stream import _job
from rankax.stream._stages import COPIES_IN
from stream_child import Recorded, values

pytestmark = pytest.mark.usefixtures("few_blocks")

RNG = np.random.default_rng(0)
# Few lengths, in much the same numbers in each block, so that blocks share their programs.
LENGTHS = np.resize([4, 0, 4, 4], 120)
LENGTHS[60] = 40
ROWS = RNG.normal(size=(LENGTHS.sum(), 3)).astype("float32")
S = RNG.normal(size=120).astype("float32")


def run(kernel, *args, **options):
    return rankax.stream.run(
        kernel, *args, **{"memory_limit": "100 kB", "progress": False} | options
    )


@auto_vmap(x="n 3", mask=Mask("n"), s=0)
def total(x, mask, s):
    return jnp.sum(jnp.tanh(x).sum(-1) ** 2, where=mask) * s


@auto_vmap("(n,3),()->(n,3),()", mask=Mask("n"))
def centred(x, s, mask):
    count = jnp.sum(mask, dtype=x.dtype)
    mean = jnp.sum(x, 0, where=mask[:, None]) / jnp.maximum(count, 1)
    return (x - mean[None]) * s, jnp.sum(mean) + count


def test_each_item_is_read_once_and_mapped(tmp_path, out):
    np.save(tmp_path / "x.npy", ROWS)
    flat = Recorded(np.load(tmp_path / "x.npy", mmap_mode="r"))
    stored = run(total, Ragged(flat, LENGTHS), S, out=out)
    assert_same(values(stored), total(Ragged(ROWS, LENGTHS), S))
    of_digest = _job._SAMPLES if ROWS.nbytes > _job._WHOLE else 1
    rows = sum(part.stop - part.start for part, *_ in flat.reads[of_digest:])
    assert rows == len(ROWS)
    assert len(flat.reads) > 12


def test_rows_come_back_with_the_lengths(tmp_path):
    flat, out = Recorded(ROWS), tmp_path / "out.zarr"
    rows, sums = run(centred, Ragged(flat, LENGTHS), S, out=out)
    want_rows, want_sums = centred(Ragged(ROWS, LENGTHS), S)
    assert_same(values(sums), want_sums)
    assert_same(values(rows), want_rows)
    assert repr(rows) == f"Ragged(120 items of 0 to 40 rows, float32[{len(ROWS)}, 3])"
    np.testing.assert_array_equal(zarr.open_group(out)["0"][...], rows.values[...])
    begin = int(LENGTHS[:60].sum())  # the longest item is in many blocks of rows
    of_longest = (part.start <= begin and part.stop >= begin + 40 for part, *_ in flat.reads[1:])
    assert sum(of_longest) > 2


# The last number that is not 0, which depends on the order.
LAST = Fold(jnp.float32(0), lambda x: x, lambda a, b: jnp.where(b == 0, a, b))


@pytest.mark.parametrize("reduce", [TopK(20), slow(LAST)])
def test_reductions_number_the_items(reduce, out):
    """Also where there are more winners than a block has items."""
    kernel = total.with_options(reduce=reduce, chunk_size=4)
    stored = run(kernel, Ragged(ROWS, LENGTHS), S, out=out)
    assert_same(values(stored), kernel(Ragged(ROWS, LENGTHS), S))


@pytest.mark.parametrize("lengths", [[], slow([4]), slow([0, 0])])
def test_few_items(lengths, tmp_path, out):
    x = Ragged(ROWS[: sum(lengths)], lengths)
    s = S[: len(lengths)]
    assert_same(values(run(centred, x, s, out=out)), centred(x, s))
    summed = total.with_options(reduce="sum")
    assert_same(values(run(summed, x, s, out=tmp_path / "sum")), summed(x, s))


def test_one_ragged_item_for_many_others(out):
    x = Ragged(ROWS[:9], [9])
    assert_same(values(run(total, x, S, out=out)), total(x, S))


def test_a_run_that_failed_goes_on(out):
    flat = Recorded(ROWS, OSError("the disk is gone"), after=9)
    with pytest.raises(OSError, match="the disk is gone"):
        run(centred, Ragged(flat, LENGTHS), S, out=out)
    stored = run(centred, Ragged(ROWS, LENGTHS), S, out=out)
    assert_same(values(stored), centred(Ragged(ROWS, LENGTHS), S))
    with pytest.raises(ValueError, match=r"out was written by another call: x was .*lengths"):
        run(centred, Ragged(ROWS, LENGTHS[::-1]), S, out=out)


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (centred, "0 is NaN"),
        slow(total.with_options(reduce="sum"), "what is reduced is not finite"),
    ],
)
def test_nan_is_named_by_its_item(kernel, what, out):
    rows = ROWS.copy()
    rows[LENGTHS[:78].sum()] = np.nan
    want = f"{what} at the batch indices (78,); on_nan='keep' stores NaN"
    with pytest.raises(FloatingPointError, match=re.escape(want)):
        run(kernel, Ragged(rows, LENGTHS), S, out=out, on_nan="raise")


def test_blocks_stay_within_the_limit(tmp_path):
    lengths = np.full(60, 3)
    lengths[20:23] = 200
    rows = np.ones((lengths.sum(), 3), "float32")
    flat, limit, ones = Recorded(rows), 40_000, np.ones(60, "float32")
    run(total, Ragged(flat, lengths), ones, out=tmp_path / "a", memory_limit=limit)
    most = max(part.stop - part.start for part, *_ in flat.reads[1:])
    assert most >= 200
    assert most * 12 * COPIES_IN <= limit / 2
    with pytest.raises(ValueError, match=re.escape("the smallest block, of shape (1,), needs")):
        run(total, Ragged(flat, lengths), ones, out=tmp_path / "b", memory_limit=9000)


@auto_vmap("(n,3),(m),()->()", n_mask=Mask("n"), m_mask=Mask("m"))
def bonds(x, y, s, n_mask, m_mask):
    return (jnp.sum(x.sum(-1), where=n_mask) + jnp.sum(y**2, where=m_mask)) * s


# For each of three lengths and two or three numbers of items, one program measures memory and one
# evaluates. Of `centred`, the rows have blocks of their own, and are put in order by a third one.
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "most"), [(bonds, 25), (centred, 50)])
def test_blocks_share_their_shapes(kernel, most, tmp_path, out):
    rng = np.random.default_rng(1)
    lengths = rng.choice([3, 7, 30], 240)
    rows = rng.normal(size=(lengths.sum(), 3)).astype("float32")
    args = [Ragged(rows, lengths), np.linspace(-1, 1, 240, dtype="float32")]
    if kernel is bonds:
        others = rng.integers(0, 3, 240)
        args.insert(1, Ragged(rows[: others.sum(), 0], others))
    kernel = kernel.with_options(chunk_size=5)  # other tests compiled nothing of it
    stored, count = compilations(lambda: run(kernel, *args, out=out))
    assert 0 < count <= most
    assert_same(values(stored), kernel(*args), rtol=1e-4)
    assert compilations(lambda: run(kernel, *args, out=tmp_path / "again"))[1] <= 5


def test_what_is_refused(tmp_path):
    keys = jax.random.split(jax.random.key(0), 5)
    noise = auto_vmap(key="n")(lambda key: jax.random.normal(key[0]))
    with pytest.raises(TypeError, match=r"key is Ragged with PRNG keys, which are not read"):
        run(noise, Ragged(keys, [2, 3]), out=tmp_path / "a")
    pairs = auto_vmap("(n),(n)->()")(lambda x, y: x @ y)
    want = "item 1 of y has 3 rows, but that of x has 2"
    x = np.ones(5, "float32")
    with pytest.raises(ValueError, match=re.escape(want)):
        run(pairs, Ragged(x, [3, 2]), Ragged(np.ones(6, "float32"), [3, 3]), out=tmp_path / "b")
    square = auto_vmap("(n)->(n,n)")(lambda x: x[:, None] * x)
    with pytest.raises(TypeError, match="only the first core dimension of an output"):
        run(square, Ragged(x, [3, 2]), out=tmp_path / "c")
    with pytest.raises(ValueError, match=re.escape("the batch shape is (2, 120); use jax.vmap")):
        run(centred, Ragged(ROWS, LENGTHS), np.ones((2, 120), "float32"), out=tmp_path / "d")
    assert not list(tmp_path.iterdir())
