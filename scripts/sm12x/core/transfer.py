"""A file of the package index, fetched under the eyes of whoever waits for it."""

from __future__ import annotations

from pathlib import Path

from sm12x.core import index, progress


def fetch(project: str, name: str, sha256: str, *, cache: Path, find_links: Path | None) -> Path:
    """As ``index.fetch``, with a bar for what has to be transferred."""
    with progress.transfer(name) as moved:
        return index.fetch(
            project, name, sha256, cache=cache, find_links=find_links, on_progress=moved
        )
