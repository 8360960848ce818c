# SPDX-License-Identifier: MIT
# ruff: noqa: T201 - pytest shows what is printed where a test fails
"""Random programs against plain JAX: a few of them, or as many as RANKAX_PROGRAMS says."""

import dataclasses
import itertools
import os

import pytest

import edges
import programs
import sides
from helpers import at_each_run, weekly
from programs import KINDS, Program, draw
from rankax import clear_caches
from rankax.core.loop import eager_programs
from rankax.ext import once
from shrink import failure, smaller

# The seeds are fixed: a failure comes from the change. Each takes a second or more, to compile.
COUNT = int(os.environ.get("RANKAX_PROGRAMS", "12"))


def cases(first, count=COUNT, **at_each_run):
    """Return kinds and seeds; each week, more of them run, beside thousands that are new."""
    return [
        (kind, first + n) if n < quick else weekly(kind, first + n)
        for kind, quick in at_each_run.items()
        for n in range(count)
    ]


def check(kind, seed, how=Program.check):
    program = draw(seed, kind)
    print(program)
    how(program)


OF_OTHER_KINDS = cases(2 * 10**6, lanes=1, streams=1, reverse=0, batches=0, ragged=0, pairs=0)


@pytest.mark.parametrize(("kind", "seed"), cases(0, calls=3) + OF_OTHER_KINDS)
def test_equals_plain_jax(kind, seed):
    if kind == "streams":
        pytest.importorskip("zarr")
    check(kind, seed)


@pytest.mark.parametrize(
    ("kind", "seed"),
    cases(10**6, 3 * COUNT, calls=3) + cases(3 * 10**6, reverse=1, batches=1, ragged=1, pairs=1),
)
def test_traces_like_plain_jax(kind, seed):
    check(kind, seed, Program.check_types)


# At the edges of arithmetic.


@pytest.mark.parametrize(
    ("kind", "seed"), cases(5 * 10**6, half=1, long=1, infinite=2, nonzero=2, weak=1)
)
def test_is_right_at_the_edges(kind, seed):
    program = edges.draw(seed, kind)
    print(program)
    program.check()


@pytest.mark.parametrize(("kind", "seed"), cases(6 * 10**6, **dict.fromkeys(edges.KINDS, 2)))
def test_edges_have_the_types_of_plain_jax(kind, seed):
    program = edges.draw(seed, kind)
    print(program)
    program.check_types()


def test_all_edges_are_drawn():
    drawn = [edges.draw(seed, kind) for kind in edges.KINDS for seed in range(300)]
    assert {edge.kernel for edge in drawn} == edges.KERNELS.keys()
    assert {edge.caller for edge in drawn} == {*edges.CALLERS, *edges.SCANS}
    assert {edge.transformation for edge in drawn} == edges.TRANSFORMATIONS.keys()
    names = {name for edge in drawn for name in edge.options}
    assert names >= {"chunk_size", "reduce", "reduce_axis", "where", "checkpoint", "lockstep"}
    assert names >= {"jit", "bucket", "devices", "whole", "start", "step", "reverse"}
    for edge in drawn[::50]:
        assert eval(repr(edge), vars(edges)) == edge


# Work that belongs to one argument.

SIDES = 3, 5, 11, 13  # they take little time, and something is hoisted


@pytest.mark.parametrize("seed", [n if n in SIDES else weekly(n) for n in range(20)])
def test_work_of_one_side_is_that_of_nested_maps(seed):
    program = sides.draw(seed)
    print(program)
    program.check()


def test_all_work_of_one_side_is_drawn():
    drawn = [sides.draw(seed) for seed in range(600)]
    assert {name for program in drawn for name in program.names()} == sides.PARTS.keys()
    assert {name for program in drawn for name in program.joins} == sides.JOINS.keys()
    assert {program.layout for program in drawn} == sides.LAYOUTS.keys()
    assert {program.transformation for program in drawn} == {*sides.TRANSFORMATIONS}
    assert {program.reduce for program in drawn} == {None, *sides.REDUCED}
    names = {name for program in drawn for name in program.options}
    assert names == {"chunk_size", "memory_limit", "devices", "lockstep", "checkpoint", "hoist"}
    for program in drawn[::50]:
        assert eval(repr(program), vars(sides)) == program


@pytest.mark.parametrize("transformation", ["value", "grad"])
def test_what_is_wrong_of_one_side_is_seen(transformation, monkeypatch):
    options = {"chunk_size": 6}
    program = sides.Sides((("net",), ("solved",)), ("product",), options=options)
    program = dataclasses.replace(program, transformation=transformation)
    right = once.Before.__call__

    def wrong(self, item, leaves):
        rest, values = right(self, item, leaves)
        return rest, [*values[:-1], values[-1] * (1 + 1e-6)]

    monkeypatch.setattr(once.Before, "__call__", wrong)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        program.check()


# Whatever is wrong in the way that a kind looks for is seen.

EDGE = edges.Edge("half", "wide", "chunked_vmap", (97,), {"chunk_size": 4}, "grad", ("w",))


@pytest.mark.parametrize(
    ("edge", "name", "change"),
    [
        (EDGE, "w", lambda w: w * 1.03),
        (dataclasses.replace(EDGE, kind="long", narrow=()), "w", lambda w: w * (1 + 2e-5)),
        (dataclasses.replace(EDGE, kind="infinite", kernel="root", zeros=(4,)), "x",
         lambda x: x.at[4].set(float("nan"))),
        (dataclasses.replace(EDGE, kind="nonzero", kernel="regular"), "x",
         lambda x: x.at[93].add(0.1)),
        (dataclasses.replace(EDGE, kind="weak", kernel="of_shared"), "w",
         lambda w: w.astype("float32")),
    ],
    ids=edges.KINDS,
)  # fmt: skip
def test_what_is_wrong_at_an_edge_is_seen(edge, name, change, monkeypatch):
    edge = dataclasses.replace(edge, options={"chunk_size": None}, dtype="bfloat16")
    edge.check()
    right = edge._run

    def wrong(self, fun, *args, jit=True):
        out = right(fun, *args, jit=jit)
        return out if isinstance(out, list) else out | {name: change(out[name])}

    monkeypatch.setattr(edges.Edge, "_run", wrong)
    with pytest.raises(AssertionError, match=f"'{name}'"):
        edge.check()


@pytest.mark.parametrize(("kind", "seed"), cases(4 * 10**6, calls=2))
def test_eager_calls_find_their_own_programs(kind, seed):
    check(kind, seed, Program.check_reuse)


# What was wrong once, made small.

SCAN = {"reverse": False, "unroll": 1, "start": None, "stop": None, "step": 2}
ONCE_WRONG = {
    # Under vmap, the rule of a loop's derivative is differentiated first and batched afterwards. So
    # a cond stops its tangents, and a custom_vjp is asked for a forward derivative.
    f"{step} in {caller}": Program(caller, (step,), layout, options, transformation, 5)
    for step in ("either", "vjp_rule")
    for caller, layout, options, transformation in [
        ("chunked_vmap", {"s": None, "v": 0}, {"chunk_size": 2, "out_axes": 0}, "grad of vmap"),
        ("auto_vmap", {"s": (2, 1), "v": (2, 5)}, {"chunk_size": 3}, "grad"),
        ("sliced_scan", {"s": "xs", "v": "init"}, SCAN, "grad of vmap"),
        ("checkpoint_chunked_scan", {"s": "xs", "v": "init"}, SCAN | {"chunk_size": 2},
         "grad of vmap"),
    ]
}  # fmt: skip


@pytest.mark.parametrize(
    "program",
    at_each_run(["vjp_rule in checkpoint_chunked_scan", "either in chunked_vmap"], ONCE_WRONG),
)
def test_once_wrong(program):
    program.check()


def test_everything_is_drawn():
    drawn = [draw(seed, kind) for kind in KINDS for seed in range(300)]
    assert {name for program in drawn for name in program.steps} == programs.STEPS.keys()
    assert {program.caller for program in drawn} == programs.CALLERS.keys()
    assert {program.transformation for program in drawn} == programs.TRANSFORMATIONS.keys()


def test_every_pair_of_options_is_drawn():
    options = {*programs.MORE} - {"split key"} | {"split", "rows"}
    drawn = (sorted(options_of(draw(seed, "pairs"))) for seed in range(1000))
    pairs = {pair for names in drawn for pair in itertools.combinations(names, 2)}
    refused = {("batched", "lockstep"), ("batched", "rows")}
    assert pairs == {*itertools.combinations(sorted(options), 2)} - refused


def options_of(program):
    """Return the options of a program, and what its arguments have of their own."""
    return {*program.options} | {x for x in program.layout.values() if x in ("split", "rows")}


def test_a_program_prints_itself():
    for seed in range(100):
        assert eval(repr(draw(seed))) == draw(seed)


SMALL = Program(
    "chunked_vmap", ("sine",), {"s": None, "v": 0}, {"chunk_size": 2, "out_axes": 0}, "grad", 3
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda v: v.at[2, 0].multiply(1 + 1e-5), "Mismatched elements"),
        (lambda v: v.astype("float32"), "'v'"),
    ],
    ids=["number", "dtype"],
)
def test_what_is_wrong_is_seen(change, text, monkeypatch):
    program = dataclasses.replace(SMALL, transformation="value")
    program.check()
    right = programs.by_chunked_vmap

    def wrong(program, arrays, w, *, plain):
        out = right(program, arrays, w, plain=plain)
        return out if plain else out | {"v": change(out["v"])}

    monkeypatch.setitem(programs.CALLERS, "chunked_vmap", wrong)
    with pytest.raises(AssertionError, match=text):
        program.check()


def test_a_program_of_another_call_is_seen(monkeypatch):
    clear_caches()
    SMALL.check_reuse()
    monkeypatch.setattr(eager_programs, "_of_literal", lambda literal, _: literal.aval)
    monkeypatch.setitem(programs.STEPS, "sine", lambda v: {"v": 1.0 * v})
    SMALL.check_reuse()
    monkeypatch.setitem(programs.STEPS, "sine", lambda v: {"v": 2.0 * v})
    with pytest.raises(RuntimeError, match="program of an earlier call"):
        SMALL.check_reuse()
    clear_caches()


def test_what_fails_is_made_small():
    def check(program):
        assert "sine" not in program.steps or program.options["chunk_size"] < 2, "3.5 is wrong"

    options = {"chunk_size": 4, "out_axes": 1, "checkpoint": False}
    steps, layout = ("product", "sine", "noise"), {"s": 0, "v": 1, "key": 0}
    first = Program("chunked_vmap", steps, layout, options, "grad of vmap", 7, x64=False)
    small = smaller(first, check)
    least = {"chunk_size": 2, "out_axes": 0, "checkpoint": True}
    assert small == Program("chunked_vmap", ("sine",), {"s": 0, "v": 0}, least, "value", 1, core=1)
    assert failure(small, check) == failure(first, check) == "AssertionError: # is wrong"
