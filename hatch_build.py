# SPDX-License-Identifier: MIT
"""The addresses in the metadata of the package, from the variables that docs/conf.py reads, too."""

import os

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Addresses(MetadataHookInterface):
    """Fill in ``[project.urls]`` where the address of the repository is known: in CI at GitHub."""

    def update(self, metadata):
        """Add the addresses."""
        repository = os.environ.get("RANKAX_REPOSITORY", "")
        if not repository and "GITHUB_REPOSITORY" in os.environ:
            repository = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format_map(os.environ)
        if repository:
            changelog = f"{repository}/blob/main/CHANGELOG.md"
            metadata["urls"] = {"Repository": repository, "Changelog": changelog}
        if site := os.environ.get("RANKAX_SITE"):
            metadata.setdefault("urls", {})["Documentation"] = site
