# SPDX-License-Identifier: MIT
"""Benchmarks: ``hlo.py`` reads what a program does; ``gpu.py`` runs, with sizes for a CPU.

``page.py`` prints figures beside those of the pages, and a benchmark writes only if told to.
"""

import itertools
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Of what XLA prints of a program for a GPU, what is read: ten times three steps, a loop of unknown
# length with a sum over devices, a branch, a product of matrices, and a result for the host.
TEXT = """
%add (a: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %a)
}

%total_of_row (p.1: f32[10,100], p.2: f32[10]) -> f32[10] {
  %p.1 = f32[10,100]{1,0} parameter(0)
  %p.2 = f32[10]{0} parameter(1)
  %row = f32[1,100]{1,0} dynamic-slice(%p.1), dynamic_slice_sizes={1,100}
  %exp = f32[1,100]{1,0} exponential(%row)
  %total = f32[1]{0} reduce(%exp), dimensions={1}, to_apply=%add
  ROOT %put = f32[10]{0} dynamic-update-slice(%p.2, %total)
}

%wrapped (p.3: f32[100]) -> f32[100] {
  %p.3 = f32[100]{0} parameter(0)
  ROOT %waves = f32[100]{0} fft(%p.3)
}

%inner_body (x.1: f32[100]) -> f32[100] {
  %x.1 = f32[100]{0} parameter(0)
  %begun = ((f32[100]{0}), f32[100]{0}, u32[]) async-start(%x.1), calls=%wrapped
  ROOT %ended = f32[100]{0} async-done(%begun), metadata={op_name="while/body/fft"}
}

%outer_body (x.2: f32[10,100], y.2: f32[10]) -> f32[10] {
  %x.2 = f32[10,100]{1,0} parameter(0)
  %y.2 = f32[10]{0} parameter(1)
  %kept = f32[10]{0} copy(%y.2)
  %loop.1 = f32[100]{0} while(%kept), condition=%c, body=%inner_body, \
backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %done = f32[10]{0} fusion(%x.2, %kept), kind=kInput, calls=%total_of_row
}

%open_body (s.3: f32[10]) -> f32[10] {
  %s.3 = f32[10]{0} parameter(0)
  ROOT %sent = f32[10]{0} all-reduce-start(%s.3), replica_groups={{0,1}}, to_apply=%add
}

%open_cond (s.4: f32[10]) -> pred[] {
  %s.4 = f32[10]{0} parameter(0)
  ROOT %goes_on = pred[] reduce(%s.4), to_apply=%add
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
  %loop.2 = (s32[], f32[10,100]{1,0}, /*index=2*/f32[10]{0}) while(%x), condition=%c, \
body=%outer_body, backend_config={"known_trip_count":{"n":"10"}}
  %loop.3 = f32[10]{0} while(%y), condition=%open_cond, body=%open_body
  %either = f32[10]{0} conditional(%y, %loop.3, %y), branch_computations={%cheap, %costly}
  %square = (f32[10,10]{1,0}, s8[64]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm", \
backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}
  ROOT %host = (f32[10,10]{1,0:S(5)}, f32[10,10]{1,0}, u32[]) copy-start(%square)
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
    assert str(nested) == "10 x (1+1 + 3 x 1)"
    assert (nested.steps, nested.kernels, nested.copies, nested.launches) == (10, 1, 1, 50)
    # A send, and the condition for which the host waits; the number of steps counts as one.
    assert (str(unknown), unknown.launches) == ("? x 2", 2)
    assert program.has_unknown_steps
    assert not hlo.read_text(
        TEXT.replace("body=%open_body", 'body=%open_body, known_trip_count={"n":"5"}')
    ).has_unknown_steps
    # The product, the copy to the host, and that in the branch that launches more.
    assert (program.kernels, program.copies, program.launches) == (1, 2, 55)
    assert (program.collectives, program.collectives_in_loops, program.host_copies) == (1, 1, 1)


def test_bytes_and_operations_are_those_of_all_steps(hlo):
    program = hlo.read_text(TEXT)
    row = 4 * 100
    outer = (2 * 40) + 3 * (2 * row) + (row + 4)  # a copy, the loop within, a row and its total
    rest = (2 * 40) + (40 + 1) + (2 * 40) + (2 * 4000 + 400 + 64) + (400 + 64 + 400)
    assert program.bytes == 10 * outer + rest
    assert program.operations == 10 * (3 * 100 + 100 + 100) + 10 + 2 * 10 * 10 * 100


def test_a_prediction_is_the_largest_of_three(hlo):
    program = hlo.read_text(TEXT)
    assert hlo.predict(program) == (pytest.approx(55 * 2.5e-6), "launches")
    assert hlo.predict(program._replace(bytes=335 * 10**10)) == (pytest.approx(1), "bytes")
    assert hlo.predict(program._replace(operations=12 * 10**13)) == (2.0, "operations")
    assert list(map(hlo.milliseconds, (1.23456e-7, 12.3456))) == ["0.000123", "12,300"]


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


@pytest.mark.weekly
def test_the_first_minutes_on_a_gpu_at_small_sizes():
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--small"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    parts = [part.split("\n\n") for part in run.stdout.split("\n## ")[1:]]
    assert parts[0][0] == "Reductions over 100,000 x 100,000 pairs, in ms"
    assert [len(rows.splitlines()) - 2 for _, rows, *_ in parts] == [4, 1, 1, 2, 4, 1]
    assert "nan" not in run.stdout  # all programs ran, and none was out of memory


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import page

    return page


SHOWN = """\
# Loops

Written by `python benchmarks/loops.py --write`. x86_64,
JAX 0.12.0.1.

| kernel | items | ms |
|---|---:|---:|
| waves | 100 | **3.0** |
| waves | 100 | 4.0 |
| other | 7 | 1.0 |

## Gradients

| kernel | items | ms |
|---|---:|---:|
| waves | 100 | 9.0 |

Measured on 2026-11-27 at commit ab9f870, with JAX 0.12.0.1. <!-- source: 3 -->
"""
FOUND = SHOWN.partition("Measured")[0].replace("3.0", "5.5").replace("| other | 7 | 1.0 |\n", "")


def test_figures_stand_beside_those_of_the_page(page, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.10.2")
    assert page.beside(f"<!-- mark -->\n{FOUND}", SHOWN).splitlines() == [
        "# Loops",
        "",
        "kernel  items  ms",
        "------  -----  ---------",
        "waves   100    5.5 (3.0)",
        "waves   100    4.0",
        "",
        "## Gradients",
        "",
        "kernel  items  ms",
        "------  -----  ---",
        "waves   100    9.0",
        "",
        "In brackets: what the pages show, if it differs. It is from `python benchmarks/loops.py "
        "--write`. x86_64, JAX 0.12.0.1.",
        "Measured on 2026-11-27 at commit ab9f870, with JAX 0.12.0.1.",
        "JAX here: 0.10.2, another version. It compiles other programs, so that times and memory "
        "may differ.",
    ]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.0.1")
    assert page.beside(FOUND, SHOWN).endswith(
        "JAX here: 0.12.0.1, the same. Times are 1 times the page's.\n"
        "6 figures compared; 0 do not agree."
    )
    assert "(3.0)" not in page.beside(FOUND, "")
    assert page.beside(FOUND, "").endswith(
        "No page shows these figures. Measured with JAX 0.12.0.1."
    )


@pytest.mark.parametrize(
    ("here", "shown", "column", "section"),
    [
        ("66", "264", "rankax", ""),
        ("0.24", "0.22", "temporaries, MB", ""),
        ("0.24", "0.85", "rankax", ""),
        ("29 ms, 22 MB", "999 ms, 24 MB", "jax.vmap", ""),
        ("580", "66", "ms", ""),
        ("950 kB", "1.0 MB", "rankax", ""),
        ("0.00", "0.01", "rankax", "Temporaries in MB"),
        ("not run", "12", "ms", ""),
        ("—", "12", "ms", ""),
    ],
)
def test_figures_that_agree(page, here, shown, column, section):
    assert differing(page, here, shown, column, section) == []


@pytest.mark.parametrize(
    ("here", "shown", "column", "section"),
    [
        ("66", "269", "rankax", ""),
        ("0.24", "0.34", "temporaries, MB", ""),
        ("29 ms, 22 MB", "29 ms, 33 MB", "jax.vmap", ""),
        ("0 MB", "900 kB", "rankax", ""),
        ("1.1 MB", "1.1 GB", "rankax", ""),
        ("0.00", "0.02", "rankax", "Temporaries in MB"),
        ("2.0", "3.0", "evaluations of a step", ""),
    ],
)
def test_figures_that_do_not_agree(page, here, shown, column, section):
    (words,) = differing(page, here, shown, column, section)
    assert words == f"sum, {column}: {here} ({shown})"
    assert differing(page, shown, here, column, section) == [f"sum, {column}: {shown} ({here})"]


def differing(page, here, shown, column, section):
    table = f"## {section}\n\n| task | | {column} |\n|---|---|---:|\n| sum | | {{}} |\n"
    return page.compared(table.format(here), table.format(shown))[2]


def test_a_machine_that_is_slow_as_a_whole_agrees(page):
    def table(*times):
        lines = (f"| {name} | {ms} | {ms} |" for name, ms in zip("abcd", times, strict=True))
        return "\n".join(["| task | ms | compile, s |", "|---|---:|---:|", *lines])

    shown = table(10, 20, 30, 40)
    assert page.compared(table(90, 180, 270, 300), shown)[1:] == (9, [])
    assert page.compared(table(90, 180, 270, 3000), shown)[1:] == (
        9,
        ["d, ms: 3000 (40)", "d, compile, s: 3000 (40)"],
    )


def test_the_figures_that_do_not_agree_are_named(page, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.0.1")
    assert page.beside(FOUND.replace("5.5", "55"), SHOWN).splitlines()[-3:] == [
        "JAX here: 0.12.0.1, the same. Times are 1 times the page's.",
        "6 figures compared; 1 does not agree:",
        "  waves, ms: 55 (3.0)",
    ]


@pytest.mark.parametrize("write", [False, True])
def test_a_result_is_written_only_if_told_to(page, write, tmp_path, capsys):
    file = tmp_path / "loops.md"
    file.write_text(SHOWN)
    page.finish(file, FOUND, write=write)
    assert "5.5 (3.0)" in capsys.readouterr().out
    assert ("5.5" in file.read_text()) is write
    assert "Written by" in file.read_text()


def test_long_turns_say_how_far_they_are(page, monkeypatch, capsys):
    seconds = itertools.count(0, 6)
    monkeypatch.setattr(page, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
    assert list(page.turns(3)) == [0, 1, 2]
    assert capsys.readouterr().err == "  turn 2 of 3\n"


def test_every_result_can_be_compared(page):
    for file in page.RESULTS.glob("*.md"):
        text = file.read_text(encoding="utf-8")
        keys = [row.key for row in page._rows(text)]
        assert len(keys) == len(set(keys)) > 0
        count, slow, differing = page.compared(text, text)
        assert (count > 0, slow, differing) == (True, 1, [])
        assert "--write`" in text


def test_each_benchmark_of_a_result_takes_write(page):
    for file in page.RESULTS.glob("*.md"):
        (name,) = re.findall(r"Written by `python benchmarks(/\w+\.py)?", file.read_text("utf-8"))
        text = (BENCHMARKS / (name[1:] or "__main__.py")).read_text(encoding="utf-8")
        assert "page.arguments(__doc__)" in text, name


def test_a_case_that_is_unknown_is_named():
    lockstep = [sys.executable, str(BENCHMARKS / "lockstep.py")]
    shown = subprocess.run([*lockstep, "--help"], capture_output=True, text=True, check=True)
    assert "python benchmarks/lockstep.py oscillator" in shown.stdout
    run = subprocess.run([*lockstep, "nobody"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "no case 'nobody': the cases are escape, oscillator, " in run.stderr
