# SPDX-License-Identifier: MIT
"""Compare the compiled programs of two versions of rankax.

To show that a refactoring leaves the compiled programs alone, dump them from a checkout of each
version and compare the two folders::

    PYTHONPATH=before/src python benchmarks/programs.py dump /tmp/before
    PYTHONPATH=after/src python benchmarks/programs.py dump /tmp/after
    python benchmarks/programs.py compare /tmp/before /tmp/after

``dump`` compiles the cases of `program_cases.py` for the CPU: each one forward and, if it has
floating inputs and outputs, also its gradient and its jvp. It writes one file per program, with the
size of the temporaries and the optimized HLO. Names and source locations are removed from the HLO.
The cases of ``EAGER`` are also called outside `jax.jit`. XLA then dumps every program that such a
call compiles, and the file has them all, with their number, and the number that the same call
compiles again.
``compare`` reports each program as same or different, and exits with 1 if any differs. With
``--only TEXT``, both look only at cases whose names contain TEXT.

Use the same JAX, the same machine and the same number of cores for both dumps, because XLA's
choices depend on them.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rankax
from program_cases import CASES, EAGER, NO_GRADIENT, NO_JVP, Case


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def programs(name: str, fun: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Case]:
    """Return the functions to compile for one case, and their arguments, by mode."""
    leaves, treedef = jax.tree.flatten(args)
    floats = [leaf for leaf in leaves if is_float(leaf)]
    others = [leaf for leaf in leaves if not is_float(leaf)]

    def outputs(floats: list[Any], others: list[Any]) -> list[Any]:
        by_kind = {True: iter(floats), False: iter(others)}
        rebuilt = treedef.unflatten(next(by_kind[is_float(leaf)]) for leaf in leaves)
        return [out for out in jax.tree.leaves(fun(*rebuilt)) if is_float(out)]

    def loss(floats: list[Any], others: list[Any]) -> jax.Array:
        return sum(jnp.sum(jnp.sin(out)) for out in outputs(floats, others))

    def jvp(floats: list[Any], others: list[Any], tangents: list[Any]) -> Any:
        return jax.jvp(lambda floats: outputs(floats, others), (floats,), (tangents,))

    result = {"forward": (fun, args)}
    if floats and jax.eval_shape(outputs, floats, others):
        if name not in NO_GRADIENT:
            result["gradient"] = jax.grad(loss), (floats, others)
        if name not in NO_JVP:
            result["jvp"] = jvp, (floats, others, floats)
    return result


METADATA = re.compile(r', (?:metadata|origin)=\{(?:"(?:[^"\\]|\\.)*"|\{[^{}]*\}|[^{}"])*\}')
COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.-]+) \(.*\{\n((?:.*\n)*?)\}$", re.MULTILINE)
NAME = re.compile(r"%[\w.-]+")


def normalized(text: str) -> str:
    """Remove source locations from HLO, and replace names by numbers in order of use."""
    text = METADATA.sub("", text)
    matches = COMPUTATION.findall(text)
    bodies = {name: body for _, name, body in matches}
    order = [name for entry, name, _ in matches if entry]
    for name in order:  # the loop appends to it
        used = dict.fromkeys(NAME.findall(bodies[name]))
        order += [other for other in used if other in bodies and other not in order]
    computations = {name: f"%computation{number}" for number, name in enumerate(order)}
    head = text.partition("\n")[0].partition(", ")[2]
    blocks = [f"{computations[name]}\n{_numbered(bodies[name], computations)}" for name in order]
    return "\n".join([head, *blocks])


def _numbered(body: str, computations: dict[str, str]) -> str:
    """Replace the names of instructions by numbers, which start from 0 in each computation."""
    instructions = re.findall(r"^ *(?:ROOT )?(%[\w.-]+) = ", body, re.MULTILINE)
    names = computations | {name: f"%{number}" for number, name in enumerate(instructions)}
    return NAME.sub(lambda match: names[match[0]], body)


def compiled(fun: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return the program of a compiled call, and the size of its temporaries."""
    program = (fun if hasattr(fun, "lower") else jax.jit(fun)).lower(*args).compile()
    size = program.memory_analysis().temp_size_in_bytes
    return f"temporaries in bytes: {size}\n{normalized(program.as_text())}"


def compiled_by_call(fun: Callable[..., Any], args: tuple[Any, ...], xla_dump: Path) -> str:
    """Return the programs that a call compiles, and how many the same call compiles again."""
    jax.clear_caches()
    texts = []
    for _ in range(2):
        shutil.rmtree(xla_dump, ignore_errors=True)
        jax.block_until_ready(fun(*args))
        paths = xla_dump.glob("module_*after_optimizations.txt")
        in_order = sorted(paths, key=lambda path: int(path.name.split(".")[0].split("_")[1]))
        texts.append([normalized(path.read_text()) for path in in_order])
    first, again = texts
    return "\n".join([f"programs, and again: {len(first)} and {len(again)}", *first])


def dumped(folder: Path, only: str) -> set[str]:
    """Return the names of the files of these cases, which end in the mode."""
    return {path.name for path in folder.glob("*.hlo") if only in path.name.rpartition(", ")[0]}


def dump(folder: Path, only: str, xla_dump: Path) -> None:
    flags = f"--xla_dump_to={xla_dump} --xla_dump_hlo_as_text"  # read when the first array is made
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    folder.mkdir(parents=True, exist_ok=True)
    for name in dumped(folder, only):
        (folder / name).unlink()  # if this dump fails, nothing of an earlier one is left
    begin, count = time.perf_counter(), 0
    for family, cases in CASES.items():
        for short_name, case in cases().items():
            name = f"{family}, {short_name}"
            if only not in name:
                continue
            for mode, (fun, args) in programs(name, *case).items():
                (folder / f"{name}, {mode}.hlo").write_text(compiled(fun, args))
                count += 1
                if name in EAGER:
                    text = compiled_by_call(fun, args, xla_dump)
                    (folder / f"{name}, eager {mode}.hlo").write_text(text)
                    count += 1
    package, seconds = Path(rankax.__file__).parent, time.perf_counter() - begin
    print(f"{count} programs of {package}, JAX {jax.__version__}, in {seconds:.0f} s")


def difference(before: str, after: str) -> str:
    """Summarize how two programs differ: sizes, then lines that only one has, without names."""
    sizes = [text.partition("\n")[0].partition(": ") for text in (before, after)]
    lines = [Counter(NAME.sub("%", text).splitlines()[1:]) for text in (before, after)]
    numbers = [sum(count.values()) for count in lines]
    summary = [
        f"{sizes[0][0]}: {sizes[0][2]} -> {sizes[1][2]}; lines: {numbers[0]} -> {numbers[1]}"
    ]
    for sign, only in zip("-+", (lines[0] - lines[1], lines[1] - lines[0]), strict=True):
        summary += [f"{sign} {count} x {line.strip()[:110]}" for line, count in only.most_common(4)]
    if lines[0] == lines[1]:
        summary.append("the same lines: only their order or their operands differ")
    return "\n    ".join(summary)


def compare(before: Path, after: Path, only: str) -> bool:
    """Print which programs differ, and return whether there are programs and none differs."""
    names = sorted(dumped(before, only) | dumped(after, only))
    different = 0
    for name in names:
        paths = [folder / name for folder in (before, after)]
        missing = [str(path.parent) for path in paths if not path.exists()]
        texts = [path.read_text() for path in paths if path.exists()]
        is_same = not missing and texts[0] == texts[1]
        different += not is_same
        label = name.removesuffix(".hlo")
        print(f"{'same' if is_same else 'DIFFERENT':<10}{label}")
        if not is_same:
            print("    " + (f"missing in {missing[0]}" if missing else difference(*texts)))
    print(f"{len(names)} programs, {different} different")
    return bool(names) and not different


def main() -> None:
    only = argparse.ArgumentParser(add_help=False)
    only.add_argument("--only", default="", metavar="TEXT", help="names that contain TEXT")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    dump_parser = commands.add_parser(
        "dump", parents=[only], help="compile the cases and write their programs"
    )
    dump_parser.add_argument("folder", type=Path)
    compare_parser = commands.add_parser("compare", parents=[only], help="compare two dumps")
    compare_parser.add_argument("before", type=Path)
    compare_parser.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "dump":
        with tempfile.TemporaryDirectory() as xla_dump:
            dump(options.folder, options.only, Path(xla_dump))
    elif not compare(options.before, options.after, options.only):
        sys.exit(1)


if __name__ == "__main__":
    main()
