# SPDX-License-Identifier: MIT
# ruff: noqa: T201
"""Break the library in twenty ways, and see that the tests notice: ``python -m tox -e mutants``.

Each mutant is one change to a copy, and the quick tests named beside it must fail on it.
Words or numbers choose some: ``python -m tox -e mutants -- 3 lockstep``.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: str  # files, or a test in them, without "test_" and ".py"


DEVICES = "devices::parts_are_walked_side_by_side"

MUTANTS = [
    Mutant(
        "the last chunk starts one item early",
        "_loop/access.py",
        "number(chunks.length - chunks.size)",
        "number(chunks.length - chunks.size - 1)",
        "chunked_vmap::equals_a_python_loop",
    ),
    Mutant(
        "joined chunks take the overlap twice",
        "_loop/access.py",
        "slice_in_dim(leaf, -(chunks.length - whole), None, axis=axis)",
        "slice_in_dim(leaf, whole, chunks.length, axis=axis)",
        "chunked_vmap::gradients_for_every_length_and_chunk_size",
    ),
    Mutant(
        "more items in flight than allowed",
        "_plan/chunks.py",
        "    steps = -(-length // chunk_size)\n",
        "    steps = max(1, length // chunk_size)\n",
        "chunked_vmap::otherwise_one_loop_holds_the_chunk",
    ),
    Mutant(
        "the numbers of keys begin anew in each chunk",
        "_loop/loop.py",
        "start.astype(PLACE.dtype) + counted",
        "counted",
        "keys::items_draw_what_split_keys_draw",
    ),
    Mutant(
        "keys of a part do not count what is before the part",
        "_loop/keys.py",
        "terms = [_times(start, split.strides[axis]) for axis, start in first.items()]",
        "terms = []",
        "keys::a_part_of_a_batch_has_the_keys_of_the_whole",
    ),
    Mutant(
        "a kept program does not depend on the plan",
        "_call/run.py",
        "(whole, parts, options, progress, *of_bound)",
        "(parts, options, progress, *of_bound)",
        "eager::other_shapes_dtypes_and_axes_are_other_programs",
    ),
    Mutant(
        "a kept loop does not depend on out_axes",
        "_loop/reuse.py",
        "(item.where, item.out_axes, key)",
        "(item.where, key)",
        "eager::other_shapes_dtypes_and_axes_are_other_programs",
    ),
    Mutant(
        "derivative rules that cannot be compared are equal",
        "_trace/fingerprint.py",
        "            raise UnknownRule\n        if (other",
        "            continue\n        if (other",
        "eager::rules_may_change",
    ),
    Mutant(
        "literals are equal if their types are",
        "_trace/fingerprint.py",
        "value.dtype, value.tobytes()\n\n\ndef _of_params",
        "value.dtype\n\n\ndef _of_params",
        "eager::what_is_outside_may_change",
    ),
    Mutant(
        "the order of operands does not matter",
        "_trace/fingerprint.py",
        "arguments = tuple(map(used, eqn.invars))",
        "arguments = frozenset(map(used, eqn.invars))",
        "eager::operands_may_change_places",
    ),
    Mutant(
        "a reversed scan in lanes begins one step late",
        "_lockstep/machine.py",
        "length - 1 - i if is_reversed",
        "length - i if is_reversed",
        "lockstep::loops_of_closed_over_arrays_and_of_length_zero",
    ),
    Mutant(
        "carried values in lanes move one after another",
        "_lockstep/machine.py",
        "self.here.add(lambda *values: values, [x for x, _ in pairs], [slot for _, slot in pairs])",
        "[self.here.add(lambda value: [value], [x], [slot]) for x, slot in pairs]",
        "lockstep::carried_values_change_places",
    ),
    Mutant(
        "a lane that is free skips an item",
        "_lockstep/engine.py",
        "jnp.cumsum(is_free, dtype=dtype) - dtype.type(1)",
        "jnp.cumsum(is_free, dtype=dtype)",
        "lockstep::trees_integers_and_bools",
    ),
    Mutant(
        "axes of a run are renumbered from the outermost",
        "_reduce/passes.py",
        "reversed(list(zip(self.sizes, shape, starts, strict=True)))",
        "zip(self.sizes, shape, starts, strict=True)",
        "blocks",
    ),
    Mutant(
        "an even number of items is folded in the wrong order",
        "_reduce/states.py",
        "for start in range(2)]",
        "for start in (1, 0)]",
        "reductions::a_fold_keeps_the_order_of_the_items",
    ),
    Mutant(
        "the best of no items takes part in a merge",
        "_reduce/winners.py",
        "jnp.where(index == no_index(index.dtype), worst, by)",
        "by",
        "where::the_best_step_that_counts_in_a_window",
    ),
    Mutant(
        "the mask does not reach moments",
        "_reduce/states.py",
        "return new if counts is None else choose(counts, new, state)",
        "return new",
        "where::values_and_gradients",
    ),
    Mutant(
        "what no item counts for sends a gradient back",
        "_reduce/passes.py",
        "return jnp.where(number > 0, x, lax.stop_gradient(x))",
        "return x",
        "where::what_items_share_gets_nothing_from_what_is_left_out",
    ),
    Mutant(
        "a Gram matrix of columns is not conjugated",
        "_front/jacobians.py",
        "jnp.conj(leaf) * weight",
        "leaf * weight",
        "jacobians::the_gram_matrix_of_a_complex_jacobian",
    ),
    Mutant(
        "the basis of a Jacobian begins one number late",
        "_front/jacobians.py",
        "_size(self.basis)) == number",
        "_size(self.basis)) == number + 1",
        "jacobians::as_in_jax",
    ),
    Mutant(
        "joined parts lose their last item in place of the repeated one",
        "_devices/parts.py",
        "slice_in_dim(tail, 1, None, axis=axis + 1)",
        "slice_in_dim(tail, 0, -1, axis=axis + 1)",
        f"{DEVICES}[keys_of_any_length_are_those_of_the_whole_batch-Auto-4]",
    ),
    Mutant(
        "a part begins where the one before ends, although it repeats an item",
        "_devices/parts.py",
        "jnp.minimum(number, longer) - repeats",
        "jnp.minimum(number, longer)",
        f"{DEVICES}[keys_of_any_length_are_those_of_the_whole_batch-Auto-4]",
    ),
    Mutant(
        "the step of a window counts from the whole scan",
        "_scan/sliced.py",
        "fold.step(held, ys, at - starts[window])",
        "fold.step(held, ys, at)",
        "where::steps_that_count_in_a_window",
    ),
    Mutant(
        "a stretched axis decides the length",
        "_plan/shapes.py",
        "len(batch) >= -axis and batch[axis] != 1",
        "len(batch) > -axis and batch[axis] != 1",
        "auto_vmap",
    ),
]


def apply(mutant: Mutant, source: Path) -> None:
    path = source / "rankax" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.what}: {mutant.file} has changed; change the mutant, too")
    path.write_text(text.replace(mutant.old, mutant.new))


def named(name: str) -> str:
    file, *test = name.split("::")
    (path,) = (PROJECT / "tests").rglob(f"test_{file}.py")
    return "::".join([str(path.relative_to(PROJECT)), *(f"test_{each}" for each in test)])


def failure(mutant: Mutant) -> str | None:
    """Return the first test that fails on a mutant, or None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("src", "tests", "examples"):  # tests look for files beside them
            shutil.copytree(PROJECT / name, Path(folder) / name)
        for name in ("pyproject.toml", "conftest.py"):
            shutil.copy(PROJECT / name, folder)
        source = Path(folder) / "src"
        apply(mutant, source)
        tests = [named(name) for name in mutant.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "not slow", *tests]
        run = subprocess.run(
            [*command, "-p", "no:cacheprovider", "--tb=no"],
            env=os.environ | {"PYTHONPATH": str(source)},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode == 0:
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if run.returncode != 1 or not lines:
        raise SystemExit(f"{mutant.what}: the tests did not run\n{run.stdout}{run.stderr}")
    return lines[0].partition(" - ")[0]


def main() -> None:
    wanted = sys.argv[1:]
    survived = []
    for number, mutant in enumerate(MUTANTS):
        words = f"{mutant.what} {mutant.file}"
        if wanted and not any(w == str(number) or (not w.isdigit() and w in words) for w in wanted):
            continue
        began = time.monotonic()
        found = failure(mutant)
        survived += [] if found else [mutant.what]
        result = f"{found or 'SURVIVED'}, {time.monotonic() - began:.0f} s"
        print(f"{number:2} {mutant.file}: {mutant.what}: {result}", flush=True)
    if survived:
        raise SystemExit(f"survived: {survived}")


if __name__ == "__main__":
    main()
