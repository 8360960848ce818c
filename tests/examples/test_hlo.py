# SPDX-License-Identifier: MIT
"""``benchmarks/hlo.py`` reads what a program launches, moves and computes from its HLO."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# As XLA prints a program for a GPU: ten times three rows, a loop of unknown length, a sum over
# devices in it, a branch, a product of matrices, and a result that goes to the host.
TEXT = """
HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %b = f32[] parameter(1)
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %b)
}

%slice_of (p.1: f32[10,100], p.2: s32[]) -> f32[1,100] {
  %p.1 = f32[10,100]{1,0} parameter(0)
  %p.2 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,100]{1,0} dynamic-slice(%p.1, %p.2, %zero), dynamic_slice_sizes={1,100}
}

%into (p.3: f32[10], p.4: f32[1,100], p.5: s32[]) -> f32[10] {
  %p.3 = f32[10]{0} parameter(0)
  %p.4 = f32[1,100]{1,0} parameter(1)
  %p.5 = s32[] parameter(2)
  %exp = f32[1,100]{1,0} exponential(%p.4)
  %zero.1 = f32[] constant(0)
  %total = f32[1]{0} reduce(%exp, %zero.1), dimensions={1}, to_apply=%add
  ROOT %put = f32[10]{0} dynamic-update-slice(%p.3, %total, %p.5)
}

%inner_body (s.1: (s32[], f32[100])) -> (s32[], f32[100]) {
  %s.1 = (s32[], f32[100]{0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%s.1), index=0
  %x.1 = f32[100]{0} get-tuple-element(%s.1), index=1
  %wave-start = ((f32[100]{0}), f32[100]{0}, u32[]) async-start(%x.1), calls=%wrapped
  %y.1 = f32[100]{0} async-done(%wave-start), metadata={op_name="while/body/sin"}
  %m.1 = s32[] fusion(%n.1), kind=kLoop, calls=%next
  ROOT %t.1 = (s32[], f32[100]{0}) tuple(%m.1, %y.1)
}

%wrapped (p.11: f32[100]) -> f32[100] {
  %p.11 = f32[100]{0} parameter(0)
  ROOT %waves = f32[100]{0} fusion(%p.11), kind=kLoop, calls=%wave
}

%wave (p.6: f32[100]) -> f32[100] {
  %p.6 = f32[100]{0} parameter(0)
  ROOT %sin = f32[100]{0} sine(%p.6)
}

%next (p.7: s32[]) -> s32[] {
  %p.7 = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %more = s32[] add(%p.7, %one)
}

%outer_body (s.2: (s32[], f32[10,100], f32[10])) -> (s32[], f32[10,100], f32[10]) {
  %s.2 = (s32[], f32[10,100]{1,0}, f32[10]{0}) parameter(0)
  %n.2 = s32[] get-tuple-element(%s.2), index=0
  %x.2 = f32[10,100]{1,0} get-tuple-element(%s.2), index=1
  %y.2 = f32[10]{0} get-tuple-element(%s.2), index=2
  %begun = ((f32[10,100]{1,0}, s32[]), f32[1,100]{1,0}, u32[]) fusion-start(%x.2, %n.2), \
kind=kLoop, calls=%slice_of
  %row = f32[1,100]{1,0} fusion-done(%begun)
  %loop.1 = (s32[], f32[100]{0}) while(%row), condition=%inner_cond, body=%inner_body, \
backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
  %done = f32[10]{0} fusion(%y.2, %row, %n.2), kind=kInput, calls=%into
  ROOT %t.2 = (s32[], f32[10,100]{1,0}, f32[10]{0}) tuple(%n.2, %x.2, %done)
}

%open_body (s.3: f32[10]) -> f32[10] {
  %s.3 = f32[10]{0} parameter(0)
  %sent = f32[10]{0} all-reduce-start(%s.3), replica_groups={{0,1}}, to_apply=%add
  ROOT %got = f32[10]{0} all-reduce-done(%sent)
}

%open_cond (s.4: f32[10]) -> pred[] {
  %s.4 = f32[10]{0} parameter(0)
  ROOT %goes_on = pred[] fusion(%s.4), kind=kLoop, calls=%is_small
}

%is_small (p.10: f32[10]) -> pred[] {
  %p.10 = f32[10]{0} parameter(0)
  %first = f32[1]{0} slice(%p.10), slice={[0:1]}
  ROOT %small = pred[] compare(%first, %first), direction=LT
}

%cheap (p.8: f32[10]) -> f32[10] {
  ROOT %p.8 = f32[10]{0} parameter(0)
}

%costly (p.9: f32[10]) -> f32[10] {
  %p.9 = f32[10]{0} parameter(0)
  ROOT %copied = f32[10]{0} copy(%p.9)
}

ENTRY %main (x: f32[10,100], y: f32[10]) -> f32[10,10] {
  %x = f32[10,100]{1,0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %start = (s32[], f32[10,100]{1,0}, /*index=2*/f32[10]{0}) tuple(%x, %x, %y)
  %loop.2 = (s32[], f32[10,100]{1,0}, f32[10]{0}) while(%start), condition=%c, body=%outer_body, \
backend_config={"known_trip_count":{"n":"10"}}
  %z = f32[10]{0} get-tuple-element(%loop.2), index=2
  %loop.3 = f32[10]{0} while(%z), condition=%open_cond, body=%open_body
  %either = f32[10]{0} conditional(%z, %loop.3, %z), branch_computations={%cheap, %costly}
  %square = (f32[10,10]{1,0}, s8[64]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm", \
backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}
  %host = (f32[10,10]{1,0:S(5)}, f32[10,10]{1,0}, u32[]) copy-start(%square)
  ROOT %out = f32[10,10]{1,0:S(5)} copy-done(%host)
}
"""


@pytest.fixture
def hlo(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import hlo

    return hlo


def test_loops_launches_and_collectives_are_read(hlo):
    program = hlo.read_text(TEXT, temporaries=7)
    assert program.temporaries == 7
    nested, unknown = program.loops
    assert str(nested) == "10 x (1+1 + 3 x 2)"
    assert (nested.steps, nested.kernels, nested.copies, nested.launches) == (10, 1, 1, 80)
    # A send, and the condition for which the host waits; the number of steps counts as one.
    assert (str(unknown), unknown.launches) == ("? x 2", 2)
    assert program.has_unknown_steps
    assert not hlo.read_text(
        TEXT.replace("body=%open_body", 'body=%open_body, known_trip_count={"n":"5"}')
    ).has_unknown_steps
    # The product, the copy to the host, and that in the branch that launches more.
    assert (program.kernels, program.copies, program.launches) == (1, 2, 85)
    assert (program.collectives, program.collectives_in_loops, program.host_copies) == (1, 1, 1)


def test_bytes_and_operations_are_those_of_all_steps(hlo):
    program = hlo.read_text(TEXT)
    row, step = 4 * 100, 3 * (2 * 400 + 2 * 4)
    outer = (2 * row + 4) + step + (row + 4 + 4)  # a slice, the loop within, and one element
    rest = (2 * 40) + (4 + 1) + (2 * 40) + (2 * 4000 + 400 + 64) + (400 + 64 + 400)
    assert program.bytes == 10 * outer + rest
    within = 3 * (100 + 1)
    assert program.operations == 10 * (within + 100 + 100) + 1 + 2 * 10 * 10 * 100


def test_a_prediction_is_the_largest_of_three(hlo):
    program = hlo.read_text(TEXT)
    assert hlo.predict(program) == (pytest.approx(85 * 2.5e-6), "launches")
    assert hlo.predict(program._replace(bytes=335 * 10**10)) == (pytest.approx(1), "bytes")
    assert hlo.predict(program._replace(operations=12 * 10**13)) == (2.0, "operations")
    assert [hlo.milliseconds(x) for x in (1.23456e-7, 0.0123456, 12.3456)] == [
        "0.000123",
        "12.3",
        "12,300",
    ]


@pytest.mark.optimized
def test_a_program_of_this_machine_is_read(hlo):
    def f(x):
        return jax.lax.scan(lambda c, row: (c, jnp.sum(jnp.tanh(row))), 0.0, x)[1]

    compiled = jax.jit(f).lower(jnp.zeros((50, 64))).compile()
    program = hlo.read(compiled)
    assert [loop.steps for loop in program.loops] == [50]
    assert re.fullmatch(r"50 x \d+(\+\d+)?", str(program.loops[0]))
    assert program.launches >= 50
    assert not program.has_unknown_steps
    assert program.collectives == program.host_copies == 0
