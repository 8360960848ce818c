# SPDX-License-Identifier: MIT
"""Meshes that tests run on, and the sessions of pytest whose JAX has their devices.

JAX fixes the number of devices when it starts, and all other tests run on one device. So a test on
a mesh runs, by its name, in a session in another process, which reports to this one.
"""

import contextlib
import dataclasses
import multiprocessing
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Mesh:
    """All devices in one row, with axes of a kind: ``Auto`` or ``Explicit``."""

    kind: str
    devices: int
    enter: bool  # with `jax.set_mesh`, as JAX wants where axes are explicit; or the test does


def on(*meshes, enter=True):
    """Run a test with an argument ``mesh`` on each, such as ``"Auto-4"`` or ``slow("Auto-4")``."""
    return pytest.mark.parametrize("mesh", [_case(mesh, enter) for mesh in meshes], indirect=True)


def _case(mesh, enter):
    (name,), marks = getattr(mesh, "values", (mesh,)), [*getattr(mesh, "marks", ())]
    kind, devices = name.split("-")
    return pytest.param(Mesh(kind, int(devices), enter), id=name, marks=marks)


class Session:
    """A session with so many devices in a process of its own, which runs tests by name."""

    def __init__(self, devices):
        self.devices = devices
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, devices))
        self.process.start()
        other.close()

    def run(self, name):
        """Return the outcome of a test and its explanation: passed, failed or skipped."""
        try:
            self.connection.send(name)
            return self.connection.recv()
        except (EOFError, BrokenPipeError):
            self.process.join()
            return "died", f"the process with {self.devices} devices died: {self.process.exitcode}"

    def close(self):
        self.connection.close()
        self.process.join()


def _serve(connection, devices):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the other session reports
    arguments = ["-q", "-p", "no:cacheprovider", f"--devices={devices}", str(FOLDER)]
    pytest.main(arguments, plugins=[_Server(connection)])


class _Server:
    def __init__(self, connection):
        self.connection = connection
        self.result = "passed", ""

    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        with contextlib.suppress(EOFError):  # until the other session ends
            while True:
                item = items[self.connection.recv()]
                self.result = "passed", ""
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                self.connection.send(self.result)
        return True

    def pytest_runtest_logreport(self, report):
        if not report.passed:
            sections = (f"{title}\n{text}" for title, text in report.sections)
            self.result = report.outcome, "\n".join([report.longreprtext, *sections])
