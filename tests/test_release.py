# SPDX-License-Identifier: MIT
"""The check before a release: what it refuses, and that the workflow publishes only what passed."""

import re

import pytest

import rankax
import release

DATED = f"# Changelog\n\n## [{rankax.__version__}] - 2027-01-31\n"


@pytest.mark.parametrize(
    ("tag", "changes", "problem"),
    [
        ("v{}", DATED, ""),
        ("v{}", DATED.replace("2027-01-31", "unreleased"), "CHANGELOG.md has no date for {}"),
        ("{}", DATED, "the tag {0} is not v{0}, the version in src/rankax/__init__.py"),
    ],
)
def test_a_tag_must_be_that_of_a_version_with_a_date(tag, changes, problem, monkeypatch, tmp_path):
    version = release.current_version()
    assert version == rankax.__version__
    (tmp_path / "CHANGELOG.md").write_text(changes)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert release.unready(tag.format(version), version) == problem.format(version)


def test_only_what_was_checked_is_published_and_only_on_a_tag():
    workflow = (release.ROOT / ".github/workflows/release.yml").read_text()
    build, publish = re.split(r"(?m)^  publish:\n", workflow)
    assert "python -m tox -e release" in build
    assert "id-token" not in build
    assert publish.startswith("    if: github.ref_type == 'tag'\n    needs: build\n")
    assert publish.count("uses:") == 2
    assert "uses: actions/download-artifact" in publish
    assert "password" not in publish
