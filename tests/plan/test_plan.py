# SPDX-License-Identifier: MIT
"""Plans: their values against a brute-force expectation, and how they print."""

import dataclasses
import itertools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from helpers import refusal
from rankax import auto_vmap


def energy(x, m):
    return jnp.sum(x * m[:, None])


def annotated(x: Float[Array, "n 3"], m: Float[Array, "n"]) -> Float[Array, ""]:
    return jnp.sum(x * m[:, None])


annotated.__name__ = "energy"

SPELLINGS = {
    "ints": auto_vmap(2, 1)(energy),
    "prefix trees": auto_vmap({"a": 2}, m={"a": 1})(lambda x, m: jnp.sum(x["a"] * m["a"][:, None])),
    "dimension strings": auto_vmap("n 3", "n")(energy),
    "gufunc signature": auto_vmap("(n,3),(n)->()")(energy),
    "annotations": auto_vmap(annotated),
}


@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if name != "ints"])
@pytest.mark.parametrize("shapes", [((4, 1, 5, 3), (6, 5)), ((2, 0, 5, 3), (2, 1, 5))], ids=str)
def test_the_five_spellings_are_one_kernel(spelling, shapes):
    """Equal plans and equal jaxprs; in a tree only the paths of the leaves say so."""
    ints, kernel = SPELLINGS["ints"], SPELLINGS[spelling]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    given = [{"a": x} for x in args] if spelling == "prefix trees" else args
    want, got = ints.plan(*args), kernel.plan(*given)
    if given is args:
        assert got == want
    assert (got.batch_shape, got.levels) == (want.batch_shape, want.levels)
    for leaf, plain in zip(got.leaves, want.leaves, strict=True):
        assert dataclasses.replace(leaf, path=plain.path) == plain
    assert str(jax.make_jaxpr(kernel)(*given)) == str(jax.make_jaxpr(ints)(*args))


# Values.


BATCHES = {
    "one": ((5,),),
    "pairs": ((5, 1), (6,)),
    "alike": ((2, 3, 5), (3, 5), (1, 5)),
    "apart": ((2, 1, 5), (1, 3, 1), (6, 2, 3, 5)),
    "ones": ((1, 1), (1,)),
    "none": ((), ()),
}


@pytest.mark.parametrize("chunk_size", [1, 7, 40])
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
def test_a_plan_is_what_brute_force_says(batches, chunk_size):
    batch_shape = np.broadcast_shapes(*batches)
    kernel = auto_vmap(leaves=1, chunk_size=chunk_size)(lambda *leaves: leaves)
    plan = kernel.plan(*(jax.ShapeDtypeStruct((*b, 3), jnp.float32) for b in batches))

    assert plan.batch_shape == batch_shape
    assert plan.evaluations == len(list(np.ndindex(batch_shape)))
    assert plan.in_flight <= (chunk_size or plan.evaluations)
    assert plan.steps == math.prod(len(range(0, lv.size, lv.tile)) for lv in plan.levels)
    assert plan.steps * plan.in_flight >= plan.evaluations
    for leaf, batch in zip(plan.leaves, batches, strict=True):
        assert (leaf.batch_axes, leaf.core_shape, leaf.shape) == (batch, (3,), (*batch, 3))

    covered = [axis for level in plan.levels for axis in level.axes]
    assert covered == [axis for axis, n in enumerate(batch_shape) if n != 1 or axis in covered]
    assert covered == sorted(covered)
    for level in plan.levels:
        assert level.size == math.prod(batch_shape[axis] for axis in level.axes)
        assert 1 <= level.tile <= level.size
        for axis, (batch, mapped) in itertools.product(
            level.axes, zip(batches, level.mapped, strict=True)
        ):
            from_right = axis - len(batch_shape)
            has_axis = len(batch) >= -from_right and batch[from_right] == batch_shape[axis]
            assert mapped == has_axis

    room = chunk_size  # of which each level takes what those inside it leave
    for level in reversed(plan.levels):
        assert level.tile <= room or level.tile == 1
        assert level.tile == level.size or level.size > room
        room //= level.tile


def test_a_plan_reads_shapes_only():
    kernel = auto_vmap(2, 1)(energy)
    x, m = jnp.ones((4, 5, 3)), np.ones((2, 1, 5))
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, m)]
    assert kernel.plan(x, m) == kernel.plan(*structs)
    traced = []
    jax.make_jaxpr(lambda x, m: traced.append(kernel.plan(x, m)))(x, m)
    assert traced == [kernel.plan(x, m)]


# Text.


@auto_vmap(s=0, v=1, m=2)
def quadratic(s, v, m):
    return v @ m @ v + s * v.size


@auto_vmap("n 3", "n", "", chunk_size=100)
def forces(x, m, g):
    return g * m @ x


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


TEXTS = {
    "stretched and absent axes": (
        lambda: quadratic.plan(2.0, struct(5, 3), struct(4, 1, 3, 3)),
        "quadratic: batch shape (4, 5), 20 evaluations, 20 in flight, 1 step\n"
        "  leaf   shape         rank  core    batch axes\n"
        "  s      ()            0     ()      -  -\n"
        "  v      (5, 3)        1     (3,)    -  5\n"
        "  m      (4, 1, 3, 3)  2     (3, 3)  4 1*\n"
        "  batch  (4, 5)                      4  5\n"
        "  axis 0: vmap over 4, mapping m\n"
        "  axis 1: vmap over 5, mapping v\n"
        "  (1* stretched, - absent: used again for each item, never copied)",
    ),
    "chunks of merged axes": (
        lambda: forces.plan(struct(50, 80, 5, 3), struct(50, 80, 5), struct()),
        "forces: batch shape (50, 80), 4000 evaluations, 100 in flight, 40 steps\n"
        "  leaf   shape           rank   core    batch axes\n"
        '  x      (50, 80, 5, 3)  "n 3"  (5, 3)  50 80\n'
        '  m      (50, 80, 5)     "n"    (5,)    50 80\n'
        '  g      ()              ""     ()       -  -\n'
        "  batch  (50, 80)                       50 80\n"
        "  axes 0, 1 as one: 40 chunks of 100 over 4000, mapping x, m\n"
        "  (- absent: used again for each item, never copied)",
    ),
    "no batch axes": (
        lambda: quadratic.plan(2.0, struct(3), struct(3, 3)),
        "quadratic: no batch axes, so the kernel is simply called\n"
        "  leaf  shape   rank  core\n"
        "  s     ()      0     ()\n"
        "  v     (3,)    1     (3,)\n"
        "  m     (3, 3)  2     (3, 3)",
    ),
    "no leaves": (
        lambda: auto_vmap(x=1)(lambda *x: x).plan(),
        "<lambda>: no argument with a rank, so the kernel is simply called",
    ),
}


@pytest.mark.parametrize(("planned", "text"), TEXTS.values(), ids=TEXTS)
def test_text(planned, text):
    assert str(planned()) == text


def test_lines_of_an_empty_batch_and_of_many_leaves():
    text = str(quadratic.plan(2.0, struct(0, 3), struct(3, 3)))
    assert text.startswith("quadratic: batch shape (0,), 0 evaluations, 0 in flight, 0 steps\n")
    assert "  axis 0: vmap over 0, mapping v\n" in text
    plan = auto_vmap(xs=0)(lambda *xs: xs).plan(*[struct(7)] * 9)
    assert "axis 0: vmap over 7, mapping xs (9 leaves)" in str(plan)


def test_a_cell_of_a_notebook_shows_the_text():
    plan, shown = quadratic.plan(2.0, struct(5, 3), struct(4, 1, 3, 3)), []
    plan._repr_pretty_(SimpleNamespace(text=shown.append), False)  # as IPython does
    assert shown == [str(plan)]


class Spring:
    stiffness = 2.0

    @auto_vmap(x=1, jit=True)
    def energy(self, x, y=1.0):
        return self.stiffness * y * jnp.dot(x, x)

    @auto_vmap(x=1, jit=True)
    def rest(self, x=(0.0,), y=None):
        return x


V = jnp.ones((4, 3))
MISSING = "^energy\\(\\) missing a required argument: 'x'$"


@pytest.mark.parametrize("what", ["plan", "lower"])
def test_of_a_method(what):
    spring, shape = Spring(), jax.ShapeDtypeStruct((4, 3), jnp.float32)
    for name, args, kwargs in (
        ("energy", (V,), {}),
        ("energy", (shape, 2.0), {}),
        ("energy", (), {"x": V}),
        ("rest", (V,), {}),
    ):
        got = getattr(getattr(spring, name), what)(*args, **kwargs)
        want = getattr(getattr(Spring, name), what)(spring, *args, **kwargs)
        assert got == want if what == "plan" else got.as_text() == want.as_text()
    for call in (getattr(spring.energy, what), spring.energy):
        with pytest.raises(TypeError, match=MISSING):
            call()
    with pytest.raises(TypeError, match=MISSING):
        getattr(Spring.energy, what)(spring)
    assert Spring.energy.plan(self=spring, x=V).batch_shape == (4,)
    assert Spring.energy.lower(spring, V).compile()(V).shape == (4,)


def test_options_given_at_the_call_are_named():
    kernel = auto_vmap(1, 0, chunk_size=2)(lambda v, jit: v * jit)
    for call in (kernel, kernel.plan):
        assert refusal(TypeError, call, V, 1.0, chunk_size=10) == (
            "<lambda>() got chunk_size among its arguments, but it is an option: "
            "<lambda>.with_options(chunk_size=10)(...)"
        )
    with pytest.raises(TypeError, match=re.escape("<lambda>() missing a required argument: 'v'")):
        kernel(jit=2.0)


POINTS = np.ones((4, 3), "float32")


def potential(target, source, mass):
    return mass * jnp.exp(-jnp.sum((target - source) ** 2))


@pytest.mark.parametrize(
    ("target", "options", "line"),
    [
        (
            POINTS,
            {},
            "target i goes with source i and mass i only; for all pairs, pass target[:, None]",
        ),
        (POINTS[:, None], {}, None),  # all pairs, of which an axis is kept
        (POINTS[0], {}, "source i goes with mass i only; for all pairs, pass source[:, None]"),
        (POINTS, {"reduce": None, "reduce_axis": None}, None),
    ],
)
def test_a_plan_says_which_items_a_reduction_pairs(target, options, line):
    kernel = auto_vmap(1, 1, 0, **{"reduce": "sum", "reduce_axis": -1, **options})(potential)
    shown = str(kernel.plan(target, POINTS, POINTS[:, 0]))
    assert [text.strip() for text in shown.split("\n") if " goes with " in text] == (
        [] if line is None else [line]
    )
    tree = auto_vmap(1, 1, reduce="sum")(lambda p, q: p["a"] @ q).plan({"a": POINTS}, POINTS)
    assert "\n  p i goes with q i only" in str(tree)
    assert "None" not in str(tree)  # which cannot be written for a tree


@pytest.mark.parametrize(
    ("shapes", "lines"),
    [
        ([(4, 1, 3), (4, 3), (4,), (4,)], ["along axis 1, y, i and j go together, item by item"]),
        (
            [(4, 1, 3), (4, 3), (4, 1), (4,)],
            [
                "along axis 0, x and i go together, item by item",
                "along axis 1, y and j go together, item by item",
            ],
        ),
        ([(4, 1, 1, 3), (4, 1, 3), (4,), ()], []),  # three axes, each of one argument
        ([(4, 5, 3), (4, 5, 3), (5,), ()], []),  # nothing meets in all pairs
        (
            [(2, 4, 1, 3), (2, 4, 1, 3), (2, 1, 4), ()],
            ["along axes 0 and 1, x and y go together, item by item"],
        ),
    ],
)
def test_a_plan_says_which_arguments_go_together(shapes, lines):
    def repulsion(x, y, i, j):
        return x @ y * i * j

    arrays = [np.ones(shape, "float32") for shape in shapes]
    kernel = auto_vmap(1, 1, 0, 0, reduce="sum")(repulsion)
    shown = str(kernel.plan(*arrays)).split("\n")
    assert [line.strip() for line in shown if "go together" in line] == lines
    assert "go together" not in str(kernel.with_options(reduce=None).plan(*arrays))
    named = auto_vmap(x="i | 3", y="j | 3", i="j |", j="j |", reduce="sum")(repulsion)
    assert "go together" not in str(named.plan(POINTS, POINTS, POINTS[:, 0], POINTS[:, 0]))


def test_leaves_of_an_argument_that_are_alike_are_one_row():
    params = {name: jnp.ones(500) for name in "abcd"} | {"m": jnp.ones((500, 3)), "n": jnp.ones(1)}
    ranks = {"params": {**dict.fromkeys("abcdn", 0), "m": 1}, "x": 0}
    kernel = auto_vmap(ranks=ranks, chunk_size=16)(lambda params, x: x * jnp.sum(params["m"]))
    assert (
        str(kernel.plan(params, jnp.ones((100, 1))))
        == """\
<lambda>: batch shape (100, 500), 50000 evaluations, 16 in flight, 3200 steps
  leaf               shape       rank  core  batch axes
  params (4 leaves)  (500,)      0     ()      - 500
  params['m']        (500, 3)    1     (3,)    - 500
  params['n']        (1,)        0     ()      -  1*
  x                  (100, 1)    0     ()    100  1*
  batch              (100, 500)              100 500
  axis 0: 100 chunks of 1 over 100, mapping x
  axis 1: 32 chunks of 16 over 500, mapping params (5 leaves)
  (1* stretched, - absent: used again for each item, never copied)"""
    )
