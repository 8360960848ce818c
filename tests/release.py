# SPDX-License-Identifier: MIT
# ruff: noqa: T201
"""Build the sdist and the wheel, and check what a user would install from each.

    python -m tox -e release                # writes dist/

``twine check`` reads their metadata. Then each is installed in an empty environment, with nothing
but its dependencies, and runs the first example of the README there, which is the description that
it carries. The workflow "Release" runs this, and publishes on a tag what it has written.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Runs where only the package is installed, so it needs nothing else.
FIRST_EXAMPLE = """\
import doctest, importlib.metadata, re, sys

import rankax

facts = importlib.metadata.metadata("rankax")
if not rankax.__version__ == facts["Version"] == sys.argv[1]:
    sys.exit(f"rankax {rankax.__version__} is installed as {facts['Version']}, not {sys.argv[1]}")
text = facts["Description"] or facts.get_payload()
block = re.search(r"(?ms)^```python\\n(.*?)^```$", text)[1]
example = doctest.DocTestParser().get_doctest(block, {}, "README", None, 0)
result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example)
print(f"{result.attempted} lines of the README, {result.failed} failed, in {rankax.__file__}")
sys.exit(result.failed or not result.attempted)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="refuse a version without a date, or another one")
    options = parser.parse_args()
    version = current_version()
    if options.tag and (problem := unready(options.tag, version)):
        sys.exit(problem)
    folder = ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)  # the wheel from the sdist
    files = sorted(folder.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for file in files:
        install(file, version)
    print(f"checked {' and '.join(file.name for file in files)}")


def current_version() -> str:
    """The version that the source has."""
    text = (ROOT / "src/rankax/__init__.py").read_text(encoding="utf-8")
    return re.search(r'(?m)^__version__ = "(.+)"$', text)[1]


def unready(tag: str, version: str) -> str:
    """Say why this source cannot be published under a tag, if it cannot."""
    if tag != f"v{version}":
        return f"the tag {tag} is not v{version}, the version in src/rankax/__init__.py"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"(?m)^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes):
        return f"CHANGELOG.md has no date for {version}"
    return ""


def install(file: Path, version: str) -> None:
    """Install a file in an empty environment, and run the first example of the README there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        run(python, "-I", "-m", "pip", "install", "--quiet", "--no-compile", file)
        run(python, "-I", "-c", FIRST_EXAMPLE, version, cwd=folder)


def run(*command: object, cwd: Path | str = ROOT) -> None:
    """Run a command, and end with its status if it fails."""
    if code := subprocess.run([*map(str, command)], cwd=cwd, check=False).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
