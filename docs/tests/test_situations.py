# SPDX-License-Identifier: MIT
"""The threads that tests/situations cites are those that the page "Why rankax" links."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_why_links_the_threads_that_the_tests_cite():
    tests = (ROOT / "tests" / "situations").glob("test_*.py")
    cited = {ref for path in tests for ref in re.findall(r"[\w-]+/[\w-]+#\d+", path.read_text())}
    page = (ROOT / "docs" / "why.md").read_text()
    link = r"\[([\w-]+) (\d+)\]\(https://github\.com/([\w-]+/([\w-]+))/(?:issues|pull)/(\d+)\)"
    found = re.findall(link, page)
    assert [(name, n) for name, n, _, repo, number in found if (name, n) != (repo, number)] == []
    assert {f"{path}#{number}" for *_, path, _, number in found} == cited
    assert len(cited) > 50
