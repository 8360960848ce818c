# SPDX-License-Identifier: MIT
# ruff: noqa: T201
"""Compare random programs with plain JAX, see `README.md`."""

import argparse
import re
import traceback
from collections.abc import Callable

import jax

from .programs import KINDS, Program, draw

Check = Callable[[Program], None]


def main() -> int:
    """Compare N programs, from that of SEED on; print a minimal one for each that disagrees."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=main.__doc__)
    parser.add_argument("count", metavar="N", type=int)
    parser.add_argument("seed", metavar="SEED", type=int)
    parser.add_argument("--kind", choices=[*KINDS], default="calls", help="see the README")
    parser.add_argument("--types", action="store_true", help="trace only")
    parser.add_argument("--reuse", action="store_true", help="eager calls that find programs")
    arguments = parser.parse_args()
    check = Program.check_types if arguments.types else Program.check
    check = Program.check_reuse if arguments.reuse else check
    failed = 0
    for number in range(arguments.count):
        seed = arguments.seed + number
        program = draw(seed, arguments.kind)
        if failure(program, check):
            failed += 1
            show(seed, smaller(program, check), check)
        if number % 50 == 49:
            jax.clear_caches()  # else memory grows without end
            print(f"{number + 1} programs, {failed} disagree", flush=True)
    print(f"JAX {jax.__version__}: {arguments.count} programs, {failed} disagree")
    return min(failed, 1)


def show(seed: int, program: Program, check: Check) -> None:
    """Print a minimal program as the Python that makes it, and how it fails."""
    print(f"\nseed {seed}:\n{program}.{check.__name__}()\n", flush=True)
    try:
        check(program)
    except Exception:
        print(traceback.format_exc(limit=-3), flush=True)


def failure(program: Program, check: Check) -> str | None:
    """Say in a few words how the check of a program fails; None if it does not."""
    try:
        check(program)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        numbers = r"[-+]?\d[\d.e+-]*"  # such as tolerances, which depend on the program
        return f"{type(error).__name__}: {re.sub(numbers, '#', message[:80])}"
    return None


def smaller(program: Program, check: Check) -> Program:
    """Leave out of a program, or replace, whatever it fails without, in the same words."""
    words = failure(program, check)
    found = program
    while found is not None:
        program = found
        found = next((each for each in program.simpler() if failure(each, check) == words), None)
    return program


if __name__ == "__main__":
    raise SystemExit(main())
