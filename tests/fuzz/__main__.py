# SPDX-License-Identifier: MIT
# ruff: noqa: T201
"""Compare random programs with plain JAX, see `README.md`."""

import argparse
import operator
import os
import time
import traceback

# Before JAX is imported: devices that programs are divided among, and threads for each of them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("PJRT_NPROC", "16")

import jax

from . import edges, fused, programs, sides
from .shrink import failure, smaller

DRAWS = dict.fromkeys(programs.KINDS, programs.draw) | dict.fromkeys(edges.KINDS, edges.draw)
DRAWS |= dict.fromkeys(fused.KINDS, fused.draw) | dict.fromkeys(sides.KINDS, sides.draw)


def main() -> int:
    """Compare N programs, from that of SEED on; print a minimal one for each that disagrees."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=main.__doc__)
    parser.add_argument("count", metavar="N", type=int)
    parser.add_argument("seed", metavar="SEED", type=int)
    parser.add_argument("--kind", choices=[*DRAWS], default="calls", help="see the README")
    parser.add_argument("--types", action="store_true", help="trace only")
    parser.add_argument("--reuse", action="store_true", help="eager calls that find programs")
    arguments = parser.parse_args()
    name = "check_types" if arguments.types else "check"
    name = "check_reuse" if arguments.reuse else name
    check = operator.methodcaller(name)
    failed, began = 0, time.process_time()
    for number in range(arguments.count):
        seed = arguments.seed + number
        program = DRAWS[arguments.kind](seed, arguments.kind)
        if failure(program, check):
            failed += 1
            show(seed, smaller(program, check), name)
        if number % 50 == 49:
            jax.clear_caches()  # else memory grows without end
            print(f"{number + 1} programs, {failed} disagree", flush=True)
    seconds = f"{time.process_time() - began:.0f} s"
    print(f"JAX {jax.__version__}: {arguments.count} programs in {seconds}, {failed} disagree")
    return min(failed, 1)


def show(seed: int, program: object, name: str) -> None:
    """Print a minimal program as the Python that makes it, and how it fails."""
    print(f"\nseed {seed}:\n{program}.{name}()\n", flush=True)
    try:
        operator.methodcaller(name)(program)
    except Exception:
        print(traceback.format_exc(limit=-3), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
