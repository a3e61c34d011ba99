"""What of a machine a container sees: the folder of a model, and never one of the system.

A recipe names the model, so a stranger's recipe chooses this folder. Links are resolved where the
text is made; a link that is put there later is the machine owner's.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm12x.core.errors import UsageError

# With all that is in them: processes, devices, sockets, passwords, the images of other containers.
_SYSTEM = (
    *("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/var/run", "/var/lib/containerd"),
    *("/var/lib/containers", "/var/lib/docker", "/var/lib/kubelet", "/var/spool"),
)
# Themselves, for they hold what belongs to others; a folder in them may hold a model.
_SHARED = (
    *("/", "/bin", "/home", "/lib", "/lib64", "/media", "/mnt", "/opt", "/root", "/sbin", "/srv"),
    *("/tmp", "/usr", "/usr/lib", "/usr/local", "/usr/share", "/var", "/var/lib"),  # noqa: S108
    *("/var/log", "/var/tmp"),  # noqa: S108
)
# The Hub's cache, whose snapshots link to files beside them.
_HUB = re.compile(r"(.*/models--[^/]+)/snapshots(/.*)?")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder, file or volume of the machine at ``target``; a volume has no `/` in its source."""

    source: str
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


def of_file(path: Path, target: str) -> Mount:
    """A file, read only. Raises UsageError for a path that engines cannot mount."""
    return Mount(source=_plain(str(path)), target=_plain(target), read_only=True)


def of_model(model: str) -> Mount:
    """The folder of a model, read only, at its own path.

    Raises:
        UsageError: it is, or leads to, a folder of the system, a home, a hidden folder of one, a
            socket or a device.
    """
    given = os.path.normpath(_plain(model)).replace("//", "/", 1)
    folder = hub.group(1) if (hub := _HUB.fullmatch(given)) else given
    real = os.path.realpath(folder)
    for path in dict.fromkeys((given, folder, real)):
        if why := refused(path):
            through = "" if path in (given, folder) else f", through a link to {path}"
            raise UsageError(
                f"the model {model!r} is not mounted{through}: {why}",
                next_step="put the model into a folder of its own, such as /srv/models/NAME",
            )
    return Mount(source=_plain(real), target=folder, read_only=True)


def _plain(path: str) -> str:
    # `:` divides the fields of -v, and a control character is no part of a name that people read.
    if ":" in path or not path.isprintable():
        raise UsageError(
            f"{path!r} cannot be mounted: its name has a colon or an unprintable character",
            next_step="rename it",
        )
    return path


def refused(path: str) -> str:
    """Why a folder is never mounted, "" where it may be."""
    if path in _SHARED or path in _SYSTEM:
        return "it is a folder of the system"
    if inside := next((one for one in _SYSTEM if path.startswith(f"{one}/")), ""):
        return f"it lies in {inside}"
    home = Path("~").expanduser()
    homes = {"/root", str(home), os.path.realpath(home)} - {"/"}
    if path in homes or PurePosixPath(path).parent == PurePosixPath("/home"):
        return "it is a home"
    in_home = path.startswith("/home/") or any(path.startswith(f"{one}/") for one in homes)
    hub = "/.cache/huggingface/hub/models--" in path
    if in_home and not hub and re.search(r"/\.", path):
        return "it is a hidden folder of a home"
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return ""
    return "" if stat.S_ISDIR(mode) or stat.S_ISREG(mode) else "it is a socket or a device"
