"""The facts about the image: the audit of its wheel, and the ledger beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sm12x.audit import report as audits
from sm12x.audit.model import MIXED, NATIVE, SM120, SM121, Device
from sm12x.audit.report import LibraryReport
from sm12x.core import files
from sm12x.core.cudaarch import CudaArch
from sm12x.doctor.host import Host
from sm12x.doctor.model import Image, ImageLibrary, Unseen
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.ledger import Ledger, LibraryEntry

_AUDIT, _LEDGER = "audit.json", "ledger.json"
# Where the image itself keeps its ledger.
_INSIDE = "/opt/sm12x/ledger.json"
_NEXT = "build the bundle again, or write an audit with `sm12x audit PATH|IMAGE --json`"


def find(
    host: Host, audit: Path | None, image: str | None, *, machine: str, dist: Path
) -> Image | Unseen:
    """Return the facts of the image to compare with, from the first of these that applies: the file
    ``audit``, the bundle of ``image``, the newest bundle for this machine in ``dist``, the image
    that this process runs in.

    Args:
        machine: "x86_64" or "aarch64". A bundle for the other one was built for another host.
        dist: the folder of the bundles built here.

    Raises BadFileError when ``audit``, or a file of the bundle, cannot be read.
    """
    if audit is not None:
        return read(audit)
    if image is not None:
        return _of_image(host, image, dist)
    others = []
    for path in sorted(dist.glob(f"*/{_AUDIT}"), key=lambda one: one.stat().st_mtime, reverse=True):
        bundle = read(path)
        if bundle.machine in ("", machine):
            return bundle
        others.append(bundle.machine)
    if host.exists(_INSIDE):
        return _inside(host.path(_INSIDE))
    if others:
        return Unseen(f"{dist} has bundles only for {others[0]}, and this machine is {machine}")
    return Unseen(f"no bundle was built here: {dist} has no audit")


def read(audit: Path) -> Image:
    """Read an audit of `sm12x audit --json`, and the ledger beside it when there is one."""
    report = audits.read(audit, next_step=_NEXT)
    beside = audit.with_name(_LEDGER)
    ledger = ledgers.read(beside) if beside.is_file() else None
    policy = report.policy
    libraries = tuple(map(_library, report.libraries))
    offenders: dict[Device, tuple[str, ...]] = {}
    for entry in policy.offenders if policy else ():
        # One that names no device is about all of them: a file that could not be read.
        for name in [entry.device] if entry.device else report.devices:
            device = Device.parse(name)
            offence = f"{entry.path}: {entry.message}"
            offenders[device] = (*offenders.get(device, ()), offence)
    return Image(
        name=report.subject,
        audit=audit,
        stack_id=ledger.stack_id if ledger else "",
        machine=ledger.machine if ledger else _machine(libraries),
        # The first file of a build: all code that the image compiles is newer.
        built=beside.stat().st_mtime if ledger else None,
        libraries=libraries,
        passed=policy.passed if policy else None,
        offenders=offenders,
        versions=ledger.dependencies if ledger else {},
        patches=_subjects(ledger) if ledger else (),
        precompiled=beside.with_name(ledgers.FLASHINFER_REQUEST).is_file(),
    )


def _inside(path: Path) -> Image:
    """The ledger of the image around us, which has a verdict for each library and no more."""
    ledger = ledgers.read(path)
    return Image(
        name=f"vllm-sm12x:{ledger.base_version}-{ledger.stack_id}",
        audit=path,
        stack_id=ledger.stack_id,
        machine=ledger.machine,
        built=path.stat().st_mtime,
        libraries=tuple(map(_judged, ledger.libraries)),
        passed=None,
        offenders={},
        versions=ledger.dependencies,
        by_library=True,
        patches=_subjects(ledger),
        precompiled=_has_modules(path.with_name(ledgers.FLASHINFER_RECORD)),
    )


def _has_modules(record: Path) -> bool:
    """Whether modules of FlashInfer are listed there; `check` says what is wrong with a record."""
    try:
        return bool(json.loads(record.read_text(encoding="utf-8"))["libraries"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _subjects(ledger: Ledger) -> tuple[str, ...]:
    return tuple(patch.subject for patch in ledger.patches)


def _judged(entry: LibraryEntry) -> ImageLibrary:
    # A library that runs partly natively has code for the device.
    units = {
        device: {NATIVE if verdict == MIXED else verdict: 1}
        for device, verdict in ((SM120, entry.sm120), (SM121, entry.sm121))
    }
    return ImageLibrary(path=entry.path, machine="", cubins=(), ptx=(), readable=False, units=units)


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
        return Unseen(f"{image} has no sm12x.ledger.sha256 label: not a bundle of this project")
    for path in sorted(dist.glob(f"*/{_LEDGER}")):
        if files.sha256(path) == ledger:
            return read(path.with_name(_AUDIT))
    return Unseen(
        f"{dist} holds no audit of {image} (stack {labels.get('sm12x.stack')}, "
        f"{labels.get('sm12x.mode')} mode, ledger {ledger[:12]})"
    )


def _library(entry: LibraryReport) -> ImageLibrary:
    return ImageLibrary(
        path=entry.path,
        machine=entry.machine,
        cubins=tuple(map(CudaArch.parse, entry.cubins)),
        ptx=tuple(map(CudaArch.parse, entry.ptx)),
        readable=not entry.unknown,
        units={Device.parse(name): runs.units for name, runs in entry.runs.items()},
    )


def _machine(libraries: tuple[ImageLibrary, ...]) -> str:
    return next((library.machine for library in libraries if library.machine), "")
