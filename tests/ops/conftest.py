# SPDX-License-Identifier: MIT
"""Say how many operations are covered."""

from ops.operations import ALL, covered, public_names


def pytest_terminal_summary(terminalreporter):
    if ALL:
        mapped, refused, rest = map(len, covered())
        terminalreporter.write_line(
            f"operations: {mapped} are compared with a loop over items and {refused} refused in "
            f"words, of {len(public_names())} public functions; {rest} are not compared, mostly "
            "because they take no arrays"
        )
