# SPDX-License-Identifier: MIT
"""Run the commands of README.md, of the front page and of the guides as written, in a new clone.

    python tests/commands.py [WORDS]    # those that contain these words

Benchmarks of more than a minute are stopped after half a minute. `LONG` says which; a test fails if
a page names another command. None may change a file of the clone. Figures have to agree with those
of the pages, unless these are of another version of JAX (`benchmarks/page.py`).
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/index.md", "docs/benchmarks.md", "docs/faq.md"]
FOLDERS = ["docs/howto", "docs/coming"]
MOST_SECONDS = 300  # on a busy machine; a minute on an idle one
FIRST_SECONDS = 30

# What runs within a minute.
SHORT = {
    "python -m pip install .",
    'python -m pip install ".[progress,dask]"',
    "python -m pip install tox",
    "python -m pip install -U pip",
    "python -m rankax stream --help",
    "python benchmarks --memory",
    "python benchmarks/items.py",
    "python benchmarks/lockstep.py oscillator",
    'python benchmarks/once.py "net 3-64-64-3"',
    "python benchmarks/reductions.py sum",
    "python benchmarks/scan_levels.py",
    "python examples/cluster.py",
}
# Others, by what they begin with, and why they do not run here.
LONG = {
    "python benchmarks": "minutes, or a GPU: its first half minute",
    "python -m tox -e": "an environment, which CI runs",
    'python -m pip install . "jax[cuda13]"': "gigabytes of CUDA",
    "python -m pip install . --group": "hundreds of megabytes",
    'python -m pip install ".[warp]"': "tox -e fused",
    "python3.13": "a Python of a name that is not everywhere",
    "python -m rankax": "files of the page, which tests/stream has",
}
AGREE = r"another version|[1-9]\d* figures .*; 0 do not"
# How a benchmark ends that needs a GPU, or packages beside JAX.
ABSENT = re.compile(r" needs .*, in a clone: |JAX sees no GPU|no compiler for an H100")


def commands() -> Iterator[str]:
    """Yield each command of the pages once."""
    paths = [ROOT / page for page in PAGES]
    paths += [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]
    seen: set[str] = set()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        blocks = re.findall(r"(?ms)^```bash\n(.*?)^```$", text)
        lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
        for line in [*lines, *re.findall(r"`(python3?\S* [^`\n]+)`", text)]:
            command = " ".join(line.partition("  #")[0].split())
            if command.startswith("python") and command not in seen:
                seen.add(command)
                yield command


def why_not(command: str) -> str | None:
    """Say why a command does not run here; None if it does.

    Raises
    ------
    LookupError
        If nobody has said yet how long it takes.
    """
    if command in SHORT:
        return None
    for begin, why in LONG.items():
        if command.startswith(begin):
            return why
    raise LookupError(f"a page has the command {command!r}: is it in SHORT or LONG?")


def main() -> None:
    words = " ".join(sys.argv[1:])
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        clone, environment = Path(folder, "clone"), Path(folder, "venv")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        venv.create(environment, with_pip=True)
        for command in dict.fromkeys(["python -m pip install .", *commands()]):
            why = why_not(command)
            if why and not command.startswith("python benchmarks"):
                sys.stdout.write(f"     -  {command}: {why}\n")
            elif words in command or command == "python -m pip install .":
                seconds, said, problem = tried(command, clone, environment, is_long=why is not None)
                sys.stdout.write(f"{seconds:4.0f} s  {command}{problem and f': {problem}'}\n{said}")
                sys.stdout.flush()
                failed += [command] if problem else []
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def tried(command: str, clone: Path, environment: Path, *, is_long: bool) -> tuple[float, str, str]:
    """Return how long a command takes, how its figures compare, and what is wrong, if anything."""
    binaries = shlex.quote(str(environment / "bin"))
    line = ["bash", "-c", f"export PATH={binaries}:$PATH; {command}"]
    begin, problem, pipe = time.perf_counter(), "", subprocess.PIPE
    with subprocess.Popen(
        line, cwd=clone, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as run:
        try:
            out, err = run.communicate(timeout=FIRST_SECONDS if is_long else MOST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            if not is_long:
                return MOST_SECONDS, "", f"more than {MOST_SECONDS} s"
            out = err = ""
    seconds = time.perf_counter() - begin
    status = ["git", "status", "--porcelain", "benchmarks", "docs", "README.md", "src"]
    changed = subprocess.run(status, cwd=clone, capture_output=True, text=True, check=True).stdout
    said = "".join(re.findall(r"(?ms)^JAX here: .*", out))
    if changed:
        problem = f"changed {changed}"
    elif is_long and (ABSENT.search(err) or run.returncode == -signal.SIGKILL):
        problem = ""
    elif run.returncode:
        problem = f"exit {run.returncode}: {(err or out)[-2000:]}"
    elif command.startswith("python benchmarks") and not re.search(AGREE, said):
        problem = "figures" if said else "prints no figure of a page"
    return seconds, said, problem


if __name__ == "__main__":
    main()
