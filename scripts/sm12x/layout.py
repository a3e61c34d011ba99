"""Where things are: the checkout, its folders, and the cache."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from sm12x.core.errors import UsageError


def root() -> Path:
    """The checkout (or, in the builder image, the copy of it that SM12X_ROOT names)."""
    given = os.environ.get("SM12X_ROOT")
    return Path(given) if given else Path(__file__).resolve().parents[2]


def cache() -> Path:
    """SM12X_CACHE, else sm12x/ in XDG_CACHE_HOME, else ~/.cache/sm12x. Raises UsageError."""
    given = os.environ.get("SM12X_CACHE")
    if given:
        return Path(given)
    folder = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(folder) if folder else Path.home() / ".cache") / "sm12x"
    except RuntimeError:
        # A user without an entry in the system's list, and without HOME.
        raise UsageError(
            "there is no home directory to keep a cache in",
            next_step="set HOME, or SM12X_CACHE to a folder",
        ) from None


def patches() -> Path:
    return root() / "patches"


def recipes() -> Path:
    """The checkout's recipes; in an image, which has no checkout, those it was built with."""
    here = root() / "recipes"
    image = Path(os.environ.get("SM12X_IMAGE_ROOT", "/opt/sm12x")) / "recipes"
    return here if here.is_dir() or not image.is_dir() else image


def release() -> str:
    """The release of vLLM here: a checkout's default base, or the version of an image's vLLM.

    "" where neither is known.
    """
    try:
        return (patches() / "default").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        pass
    try:
        return metadata.version("vllm").partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def bundles() -> Path:
    """A folder for each release, and each machine, that a bundle was built for."""
    return root() / "dist"


def dist(version: str) -> Path:
    return bundles() / version


def data() -> Path:
    """Files that ship inside the package: schemas, policies, templates."""
    return Path(__file__).resolve().parent / "data"


def schemas() -> Path:
    """Return the folder of the JSON schemas of reports and of recipes."""
    return data() / "schemas"
