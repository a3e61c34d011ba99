"""Nomad and the stand-in for NVIDIA's plugin, built from Go modules: python -m tests.nomad.build

Built once for these pins, then cached. CI starts it beside the other tests: it takes about 165 s of
processor time. Clients of clouds are left out (go.mod), which were as much again.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from sm12x import layout
from sm12x.core import process

HERE = Path(__file__).resolve().parent
# Nomad's own go.mod has a `go` line; what is older refuses with a message that names it.
_GO = ("go", "/usr/local/go/bin/go")


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Nomad's program, and the folder of its device plugins."""

    nomad: Path
    plugins: Path


def tools() -> Tools | None:
    """Both, built where the cache does not have them; None where Go is not installed.

    Raises:
        ToolFailedError: Go cannot build one of them; its last lines are in the message.
    """
    go = next((found for name in _GO if (found := shutil.which(name))), None)
    if go is None:
        return None
    pins = hashlib.sha256(process.run([go, "env", "GOVERSION"]).stdout.encode())
    sources = sorted(path for name in ("absent", "standin") for path in (HERE / name).rglob("*.*"))
    for path in (HERE / "go.mod", HERE / "go.sum", *sources):
        pins.update(path.read_bytes())
    folder = layout.cache() / "nomad" / pins.hexdigest()[:16]
    if not folder.is_dir():
        _build(go, folder)
    return Tools(nomad=folder / "nomad", plugins=folder / "plugins")


def _build(go: str, folder: Path) -> None:
    """About 165 s of processor time; what Go keeps (2 GB) is removed at the end.

    An interrupted build goes on where it was.
    """
    work = folder.with_name("work")
    fresh = work / "made"
    env = {
        "GOMODCACHE": str(work / "modules"),
        "GOCACHE": str(work / "objects"),
        # As pinned, or not at all; and no other Go is fetched.
        "GOFLAGS": "-mod=readonly -modcacherw -buildvcs=false",
        "GOTOOLCHAIN": "local",
    }
    # Not inlined and without debugging information: that takes 40% less of the compiler's time.
    flags = ("-trimpath", "-tags", "osusergo", "-ldflags", "-s -w", "-gcflags=all=-l -dwarf=false")
    for target, out in (
        ("github.com/hashicorp/nomad", fresh / "nomad"),
        ("./standin", fresh / "plugins" / "standin-gpu"),
    ):
        process.run([go, "build", *flags, "-o", out, target], cwd=HERE, env=env)
    fresh.rename(folder)
    shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(0 if tools() else "go is not installed")
