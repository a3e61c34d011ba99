"""What is known of the image: the audit of its wheel, and the ledger beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sm12x.audit.model import MIXED, NATIVE, SM120, SM121, Device
from sm12x.core import files
from sm12x.core.cudaarch import CudaArch
from sm12x.core.errors import BadFileError
from sm12x.doctor.host import Host
from sm12x.doctor.model import Image, ImageLibrary, Unseen

AUDIT, LEDGER = "audit.json", "ledger.json"
# Where the image itself keeps its ledger.
INSIDE = "/opt/sm12x/ledger.json"
SCHEMA = 1


def find(
    host: Host, audit: Path | None, image: str | None, *, machine: str, dist: Path
) -> Image | Unseen:
    """The image to compare with: of ``audit``, else the bundle that ``image`` is, else the newest
    that was built here for this machine, else the one that this runs in.

    Args:
        machine: "x86_64" or "aarch64". A bundle for the other one was built for another host.
        dist: the folder of what was built here.

    Raises BadFileError when a file that was named, or that belongs to the bundle, cannot be read.
    """
    if audit is not None:
        return read(audit)
    if image is not None:
        return _of_image(host, image, dist)
    others = []
    for path in sorted(dist.glob(f"*/{AUDIT}"), key=lambda one: one.stat().st_mtime, reverse=True):
        found = read(path)
        if found.machine in ("", machine):
            return found
        others.append(found.machine)
    if host.exists(INSIDE):
        return _inside(host.path(INSIDE))
    if others:
        return Unseen(f"{dist} has bundles for {others[0]} alone, and this is {machine}")
    return Unseen(f"no bundle was built here: {dist} has no audit")


def read(audit: Path) -> Image:
    """Read an audit of `sm12x audit --json`, and the ledger beside it when there is one."""
    report = _json(audit)
    beside = audit.with_name(LEDGER)
    ledger = _json(beside) if beside.is_file() else {}
    try:
        if report["schema"] != SCHEMA:
            raise ValueError(f"schema {report['schema']!r}")
        policy = report["policy"]
        libraries = tuple(_library(entry) for entry in report["libraries"])
        offenders: dict[Device, tuple[str, ...]] = {}
        for entry in policy["offenders"] if policy else ():
            sentence = f"{entry['path']}: {entry['message']}"
            # One that names no device is about all of them: a file that could not be read.
            for name in [entry["device"]] if entry["device"] else report["devices"]:
                device = Device.parse(name)
                offenders[device] = (*offenders.get(device, ()), sentence)
        return Image(
            name=str(report["subject"]),
            audit=audit,
            stack_id=str(ledger.get("stack_id", "")),
            machine=str(ledger.get("machine", "")) or _machine(libraries),
            # The first file of a build: whatever the image compiles is younger.
            built=beside.stat().st_mtime if beside.is_file() else None,
            libraries=libraries,
            passed=policy["passed"] if policy else None,
            offenders=offenders,
            versions=dict(ledger.get("dependencies", {})),
            patches=_patches(ledger),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadFileError(
            f"{audit} is not an audit of schema {SCHEMA}: {error!r}",
            next_step="write one with `sm12x audit PATH|IMAGE --json --output audit.json`",
        ) from None


def _inside(path: Path) -> Image:
    """The ledger of the image around us, which has a verdict for each library and no more."""
    ledger = _json(path)
    try:
        return Image(
            name=f"vllm-sm12x:{ledger['base_version']}-{ledger['stack_id']}",
            audit=path,
            stack_id=ledger["stack_id"],
            machine=ledger["machine"],
            built=path.stat().st_mtime,
            libraries=tuple(_judged(entry) for entry in ledger["libraries"]),
            passed=None,
            offenders={},
            versions=dict(ledger["dependencies"]),
            by_library=True,
            patches=_patches(ledger),
        )
    except (KeyError, TypeError) as error:
        raise BadFileError(
            f"{path} is not a ledger: {error!r}", next_step="run the image as it was built"
        ) from None


def _patches(ledger: Mapping[str, Any]) -> tuple[str, ...]:
    """The subjects of the patches that a ledger names."""
    return tuple(str(entry["subject"]) for entry in ledger.get("patches", ()))


def _judged(entry: Mapping[str, Any]) -> ImageLibrary:
    # What runs in part natively has code for the device.
    units = {
        device: {NATIVE if verdict == MIXED else verdict: 1}
        for device, verdict in ((SM120, entry["sm120"]), (SM121, entry["sm121"]))
    }
    return ImageLibrary(
        path=entry["path"], machine="", cubins=(), ptx=(), readable=False, units=units
    )


def _of_image(host: Host, image: str, dist: Path) -> Image | Unseen:
    if host.which("docker") is None and host.which("podman") is None:
        return Unseen(f"no docker or podman here to ask for the labels of {image}")
    engine = "docker" if host.which("docker") else "podman"
    done = host.ask([engine, "image", "inspect", "--format", "{{json .Config.Labels}}", image])
    if isinstance(done, Unseen):
        return done
    try:
        labels: Mapping[str, str] = json.loads(done.stdout) or {}
    except ValueError:
        return Unseen(f"{engine} does not give the labels of {image} in JSON")
    # One stack can be built for several machines, in both modes: the ledger tells them apart.
    ledger = labels.get("sm12x.ledger.sha256")
    if not ledger:
        return Unseen(f"{image} carries no sm12x.ledger.sha256 label: not a bundle of this project")
    for path in sorted(dist.glob(f"*/{LEDGER}")):
        if files.sha256(path) == ledger:
            return read(path.with_name(AUDIT))
    return Unseen(
        f"{dist} holds no audit of {image} (stack {labels.get('sm12x.stack')}, "
        f"{labels.get('sm12x.mode')} mode, ledger {ledger[:12]})"
    )


def _library(entry: Mapping[str, Any]) -> ImageLibrary:
    return ImageLibrary(
        path=entry["path"],
        machine=entry["machine"],
        cubins=tuple(CudaArch.parse(name) for name in entry["cubins"]),
        ptx=tuple(CudaArch.parse(name) for name in entry["ptx"]),
        readable=not entry["unknown"],
        units={Device.parse(name): dict(runs["units"]) for name, runs in entry["runs"].items()},
    )


def _machine(libraries: tuple[ImageLibrary, ...]) -> str:
    return next((library.machine for library in libraries if library.machine), "")


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadFileError(
            f"{path} cannot be read: {error}",
            next_step="build the bundle again, or name another audit with --audit",
        ) from None
    return found
