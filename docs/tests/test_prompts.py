# SPDX-License-Identifier: MIT
"""An example copied from a page runs in a bare Python prompt."""

import code
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)

CELL = re.compile(  # its options, and its code
    r"^```\{code-cell\}\n((?:---\n.*?^---\n|:.*?\n\n)?)(.*?)^```$", re.MULTILINE | re.DOTALL
)


@pytest.fixture(autouse=True)
def extension(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")


def copied(block: str) -> str:
    """What the copy button of the site takes: `copybutton_prompt_text` in docs/conf.py."""
    found = [re.match(r"(?:>>> |\.\.\. ?)(.*)", line) for line in block.splitlines()]
    return "\n".join(line[1] for line in found if line)


def refused(text: str) -> list[str]:
    """Return the errors that a prompt shows when ``text`` is pasted; nothing is run."""

    class Prompt(code.InteractiveConsole):
        def __init__(self):
            super().__init__()
            self.told = []

        def runcode(self, _):
            pass

        def showsyntaxerror(self, *_, **__):
            self.told.append(repr(sys.exc_info()[1]))

    prompt = Prompt()
    for line in [*text.split("\n"), ""]:
        prompt.push(line)
    return prompt.told


READ = """\
text
>>> def f(x):
...     return x
>>> f(
...     1
... )
1
    >>> class A:
    ...     def g(self):
    ...         pass
    ...
    ...     def h(self):
    ...         pass
>>> for i in range(2):
...     print(i)
0
1
... and so on
"""
SHOWN = """\
text
>>> def f(x):
...     return x
...
>>> f(
...     1
... )
1
    >>> class A:
    ...     def g(self):
    ...         pass
    ...     def h(self):
    ...         pass
    ...
>>> for i in range(2):
...     print(i)
...
0
1
... and so on
"""


def test_a_definition_gets_the_line_that_ends_it():
    from prompts import pasteable

    assert pasteable(READ.splitlines()) == SHOWN.splitlines()
    assert pasteable(SHOWN.splitlines()) == SHOWN.splitlines()


def test_what_a_prompt_would_refuse_is_seen():
    assert refused("def f():\n    return 1\nf()") != []
    assert refused("def f():\n    return 1\n\nf()") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_a_page_can_be_pasted(page):
    from prompts import pasteable

    text = "\n".join(pasteable(page.read_text(encoding="utf-8").split("\n")))
    for block in re.findall(r"(?ms)^```python\n(>>> .*?)^```$", text):
        assert refused(copied(block)) == [], block
    for _, cell in CELL.findall(text):
        assert refused(cell) == [], cell
