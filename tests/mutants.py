# SPDX-License-Identifier: MIT
# ruff: noqa: T201
"""Break the library in many ways, and see that the tests notice: ``python -m tox -e mutants``.

A mutant is a copy in which one place of one function is changed; the quick tests that are named
beside it must fail. Words or numbers choose some: ``python -m tox -e mutants -- 3 lockstep``.

To add one, list the places of a function, and add a line with one of them to `MUTANTS`::

    python tests/mutants.py --places split_into_chunks
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[1]
SOURCE = PROJECT / "src" / "rankax"
EACH_TIME = ["-m", "not slow and not weekly"]


class Mutant(NamedTuple):
    function: str  # its qualified name, or the end of it
    kind: str
    tests: str  # files, or a test in them, without "test_" and ".py"
    place: int = 0  # which of the places in the function where the kind applies


CALLS = "eager::other_shapes_dtypes_and_axes_are_other_programs"
SHARED = "where::what_items_share_gets_nothing_from_what_is_left_out"
GRAM = "jacobians::the_gram_matrix_of_a_complex_jacobian"
CHOICE = "reductions::the_derivative_of_a_choice_looks_at_the_winners_only"
PARTS = "chosen_devices::keys_of_any_length_are_those_of_the_whole_batch"

MUTANTS = [
    # Maps.
    Mutant("_unlike_items", "comparison", "mistakes::a_mistake_in_a_call"),
    Mutant("next_start", "one less", "chunked_vmap::equals_a_python_loop", 2),
    Mutant("join_chunks", "one less", "chunked_vmap::gradients_for_every_length_and_chunk_size", 1),
    Mutant("with_short_last", "one less", "nothing_is_sent_back::items_of_two_chunks"),
    Mutant("gated", "always true", "nothing_is_sent_back::items_left_out", 1),
    Mutant("split_into_chunks", "round down", "chunked_vmap::otherwise_one_loop_holds_the_chunk"),
    Mutant("broadcast", "comparison", "auto_vmap", 3),
    Mutant(
        "leaf_plan", "right operand", "batch_names::an_argument_without_a_name_has_axes_in_front", 1
    ),
    # Each argument's own work.
    Mutant("pieces", "always true", "once::what_calls_back_is_not_moved"),
    Mutant("has_room", "comparison", "once::a_limit_without_room_for_results"),
    # Random keys.
    Mutant("chunk_at", "right operand", "keys::items_draw_what_split_keys_draw"),
    Mutant("number_of", "nothing listed", PARTS),
    # Programs that eager calls keep.
    Mutant("_walked", "element left out", CALLS, 4),
    Mutant("_key_of", "element left out", CALLS, 1),
    Mutant("derivatives_key", "no error", "eager::rules_may_change"),
    Mutant("_of_literal", "element left out", "eager::what_is_outside_may_change", 3),
    Mutant("eager_programs._of_program", "unordered", "eager::operands_may_change_places", 1),
    # Items that end by themselves.
    Mutant("_scan.body", "one more", "lockstep::items_are_those_of_lockstep"),
    Mutant("_move", "backwards", "lockstep::items_are_those_of_lockstep", 2),
    Mutant("Engine._take", "right operand", "lockstep::trees_integers_and_bools", 2),
    # Reductions.
    Mutant("_added", "left operand", "long_sums::sums_do_not_drift"),
    Mutant("_added", "always true", "long_sums::infinite_and_missing_numbers_stay_what_they_are"),
    Mutant(
        "_borrowed_back", "always true", "long_sums::cotangents_of_what_items_share_do_not_drift"
    ),
    Mutant("narrowed", "always false", "half_precision::a_sum_of_all_items_at_once"),
    Mutant("RunStates.renumber.place", "left operand", "blocks"),
    Mutant("as_floats", "comparison", "reductions::numbers_are_compared_as_floats", 1),
    Mutant("Ordered.join", "backwards", "reductions::a_fold_keeps_the_order_of_the_items"),
    Mutant("Best.merge_states", "always false", "where::the_best_step_that_counts_in_a_window"),
    Mutant("FirstK.plain", "always false", CHOICE),
    Mutant("MomentsOf.step", "always true", "where::values_and_gradients"),
    Mutant("bins._moments", "always false", "by_label::moments_of_large_numbers"),
    Mutant("bins._best", "always false", "by_label::derivatives_of_first_and_second_order", 1),
    Mutant(
        "InBins._scattered", "always true", "by_label::what_where_leaves_out_sends_nothing_back", 1
    ),
    Mutant(
        "Histogram.labels", "always false", "by_label::numbers_beside_the_edges_of_equal_bins", 2
    ),
    Mutant("_edges_in", "always false", "by_label::histograms_are_those_of_numpy", 1),
    Mutant("ByLabel.labels", "always true", "by_label::labels_of_64_bits_are_not_cut", 3),
    Mutant("_extreme", "always false", "by_label::a_bin_without_items_sends_nothing_back", 1),
    Mutant("_masked_row.if_any", "always true", SHARED, 1),
    # Jacobians, devices, windows of scans.
    Mutant("gram.product", "argument itself", GRAM, 1),
    Mutant("_Jacobian.image", "comparison", "jacobians::as_in_jax"),
    Mutant("Parts.begin", "left operand", PARTS, 1),
    Mutant("_scan_windows.step", "left operand", "where::steps_that_count_in_a_window"),
]

# What stands in place of a node, for each way in which a kind applies to it.

PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)]
OTHER = dict(PAIRS) | {b: a for a, b in PAIRS}


def is_call(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in names


def called(name: str, node: ast.AST) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [node], [])


def branch(node: ast.AST, *, value: bool) -> list[ast.AST]:
    if isinstance(node, ast.IfExp):
        return [node.body if value else node.orelse]
    if is_call(node, "where", "choose", "select") and len(node.args) == 3:
        return [node.args[1 if value else 2]]
    if isinstance(node, ast.If):
        return [ast.If(ast.Constant(value), node.body, node.orelse)]
    return []


def backwards(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.ListComp) or is_call(node, "map", "zip", "range"):
        reverse = ast.Slice(step=ast.Constant(-1))
        return [ast.Subscript(called("list", node), reverse, ast.Load())]
    return []


def replacements(kind: str, node: ast.AST) -> list[ast.AST]:
    """Return what may stand in place of a node."""
    match kind, node:
        case "always true" | "always false", _:
            return branch(node, value=kind == "always true")
        case "backwards", _:
            return backwards(node)
        case "argument itself", ast.Call(args=[only], keywords=[]):
            return [] if isinstance(only, ast.Starred) else [only]
        case "comparison", ast.Compare(left, [first, *ops], others) if type(first) in OTHER:
            return [ast.Compare(left, [OTHER[type(first)](), *ops], others)]
        case "element left out", ast.Tuple(elements, ast.Load() as load):
            shorter = ([*elements[:i], *elements[i + 1 :]] for i in range(len(elements)))
            return [ast.Tuple(rest, load) for rest in shorter]
        case "left operand", ast.BinOp(left, _, _):
            return [left]
        case "right operand", ast.BinOp(_, _, right):
            return [right]
        case "no error", ast.Raise():
            return [ast.Pass()]
        case "nothing listed", ast.ListComp():
            return [ast.List([], ast.Load())]
        case "one less", ast.BinOp(op=ast.Add() | ast.Sub()):
            return [ast.BinOp(node, ast.Sub(), ast.Constant(1))]
        case "one more", ast.BinOp(op=ast.Add() | ast.Sub()):
            return [ast.BinOp(node, ast.Add(), ast.Constant(1))]
        case "round down", ast.UnaryOp(
            ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), left), ast.FloorDiv(), right)
        ):
            return [ast.BinOp(left, ast.FloorDiv(), right)]
        case "unordered", ast.Call() if is_call(node, "tuple"):
            return [ast.Call(ast.Name("frozenset", ast.Load()), node.args, [])]
    return []


# Finding and changing.


def functions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield every function below a node with its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}"
            if isinstance(child, ast.FunctionDef):
                yield inner, child
            yield from functions(child, inner)
        else:
            yield from functions(child, name)


def found(name: str) -> tuple[Path, ast.Module, ast.AST]:
    """Return the file of the one function with this name, its tree, and the function in that."""
    all_found = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for qualified, function in functions(tree, path.stem):
            if f".{qualified}".endswith(f".{name}"):
                all_found.append((qualified, path, tree, function))
    if not all_found:
        raise LookupError(f"no function is called {name}")
    if len(all_found) > 1:
        names = ", ".join(qualified for qualified, *_ in all_found)
        raise LookupError(f"{name} is the name of several functions: {names}")
    return all_found[0][1:]


def places(function: ast.AST, kind: str) -> list[tuple[ast.AST, ast.AST]]:
    """Return each node where a kind applies, and what stands there then, in reading order."""
    body = [node for part in function.body for node in ast.walk(part)]
    pairs = [(node, new) for node in body for new in replacements(kind, node)]
    return sorted(pairs, key=lambda pair: (pair[0].lineno, pair[0].col_offset))


def changed(mutant: Mutant) -> tuple[Path, str, str]:
    """Return a file, its text with the change, and the change in words."""
    path, tree, function = found(mutant.function)
    pairs = places(function, mutant.kind)
    if mutant.place >= len(pairs):
        raise LookupError(f"{mutant.function}: {mutant.kind!r} applies at {len(pairs)} places only")
    old, new = pairs[mutant.place]
    words = f"{ast.unparse(old)} -> {ast.unparse(new)}"

    class Change(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else self.generic_visit(node)

    return path, ast.unparse(ast.fix_missing_locations(Change().visit(tree))), words


def named(name: str) -> str:
    file, *test = name.split("::")
    paths = [*(PROJECT / "tests").rglob(f"test_{file}.py")]
    if not paths:
        raise SystemExit(f"{name}: there is no file tests/**/test_{file}.py")
    return "::".join([str(paths[0].relative_to(PROJECT)), *(f"test_{each}" for each in test)])


def failure(mutant: Mutant, path: Path, text: str) -> str | None:
    """Return the first test that fails on a mutant, or None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("src", "tests", "examples"):  # tests look for files beside them
            shutil.copytree(PROJECT / name, Path(folder) / name)
        for name in ("pyproject.toml", "conftest.py"):
            shutil.copy(PROJECT / name, folder)
        (Path(folder) / path.relative_to(PROJECT)).write_text(text)
        tests = [named(name) for name in mutant.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *EACH_TIME, *tests]
        run = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--tb=no"],
            env=os.environ | {"PYTHONPATH": str(Path(folder) / "src")},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode == 0:
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if run.returncode != 1 or not lines:
        raise SystemExit(f"{mutant.function}: the tests did not run\n{run.stdout}{run.stderr}")
    return lines[0].partition(" - ")[0]


def show_places(name: str) -> None:
    _, _, function = found(name)
    for kind in sorted({mutant.kind for mutant in MUTANTS}):
        for place, (old, new) in enumerate(places(function, kind)):
            first, *_ = ast.unparse(old).splitlines()
            print(f"{kind:16} {place:2}  {first}  ->  {ast.unparse(new).splitlines()[0]}")


def is_named(word: str, number: int, mutant: Mutant) -> bool:
    """Whether a word of the command line chooses a mutant: by its number, or by part of a name."""
    return word == str(number) if word.isdigit() else word in f"{mutant.function} {mutant.tests}"


def main() -> None:
    wanted = sys.argv[1:]
    if wanted[:1] == ["--places"]:
        for name in wanted[1:]:
            show_places(name)
        return
    chosen = [
        (number, mutant)
        for number, mutant in enumerate(MUTANTS)
        if not wanted or any(is_named(word, number, mutant) for word in wanted)
    ]
    if not chosen:
        raise SystemExit(f"no mutant has {' or '.join(wanted)} in its function or tests")
    wrong = []
    for number, mutant in chosen:
        began = time.monotonic()
        what = f"{number:2} {mutant.function}: {mutant.kind}"
        try:
            path, text, change = changed(mutant)
        except LookupError as error:  # the function has another name now
            wrong.append(str(error))
            continue
        test = failure(mutant, path, text)
        wrong += [] if test else [f"{what}: survived"]
        result = f"{test or 'SURVIVED'}, {time.monotonic() - began:.0f} s"
        print(f"{what}: {change}: {result}", flush=True)
    if wrong:
        raise SystemExit("\n".join(["", *wrong]))


if __name__ == "__main__":
    main()
