"""The image: the audit of its wheel and the ledger beside it, and whether it runs here."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from sm12x.audit import report as audits
from sm12x.audit.model import MIXED, NATIVE, NONE, PTX, SM120, SM121, Device
from sm12x.audit.model import UNKNOWN as UNREADABLE
from sm12x.core import files
from sm12x.core.text import either, ranges
from sm12x.doctor import gpus
from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.model import Facts, Finding, Image, bad, check, info, ok, unknown, warn
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.ledger import Ledger

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
    units: dict[Device, Counter[str]] = {}
    offenders: dict[Device, tuple[str, ...]] = {}
    for name in report.devices:
        device = Device.parse(name)
        units[device] = Counter()
        for library in report.libraries:
            runs = library.runs.get(name)
            units[device].update(runs.units if runs else {UNREADABLE: 1})
        offenders[device] = tuple(
            f"{entry.path}: {entry.message}"
            for entry in (policy.offenders if policy else ())
            # One that names no device is about all of them: a file that could not be read.
            if entry.device in ("", name)
        )
    machines = [library.machine for library in report.libraries if library.machine]
    return Image(
        name=report.subject,
        audit=audit,
        stack_id=ledger.stack_id if ledger else "",
        machine=ledger.machine if ledger else next(iter(machines), ""),
        # The first file of a build: all code that the image compiles is newer.
        built=beside.stat().st_mtime if ledger else None,
        units=units,
        passed=policy.passed if policy else None,
        offenders=offenders,
        versions=ledger.dependencies if ledger else {},
        patches=_subjects(ledger) if ledger else (),
        precompiled=beside.with_name(ledgers.FLASHINFER_REQUEST).is_file(),
    )


def _inside(path: Path) -> Image:
    """The ledger of the image around us, which has a verdict for each library and no more."""
    ledger = ledgers.read(path)
    verdicts = {
        SM120: Counter(library.sm120 for library in ledger.libraries),
        SM121: Counter(library.sm121 for library in ledger.libraries),
    }
    for counts in verdicts.values():
        # A library that runs partly natively has code for the device.
        counts[NATIVE] += counts.pop(MIXED, 0)
    return Image(
        name=f"vllm-sm12x:{ledger.base_version}-{ledger.stack_id}",
        audit=path,
        stack_id=ledger.stack_id,
        machine=ledger.machine,
        built=path.stat().st_mtime,
        units=verdicts,
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


def _of_image(host: Host, image: str, dist: Path) -> Image | Unseen:
    engine = next((name for name in ("docker", "podman") if host.which(name)), "")
    if not engine:
        return Unseen(f"no docker or podman here to ask for the labels of {image}")
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


@check("image.audit")
def _audited(facts: Facts) -> Iterator[Finding]:
    image = facts.image
    if isinstance(image, Unseen):
        yield unknown(f"could not see how the image was compiled: {image.why}", "build", "audit")
        return
    stack = f", stack {image.stack_id}" if image.stack_id else ""
    about = f"{image.name}{stack}, for {image.machine or 'an unknown architecture'}"
    if image.machine and image.machine != facts.machine.name:
        yield bad(f"{about}, but this is {facts.machine.name}: it does not start here", "build")
    else:
        yield ok(about)


@check("gpu.code")
def _code(facts: Facts) -> Iterator[Finding]:
    """Check how each kind of GPU runs the image: natively, through PTX, or not at all."""
    if isinstance(facts.image, Unseen):
        return
    for group in gpus.alike(facts):
        device, kind = group[0].capability, group[0].kind
        if device is None:
            why = "its compute capability is not known"
            yield unknown(f"could not see how {kind} runs the image: {why}")
        else:
            which = f"GPU {ranges(gpu.index for gpu in group)} {kind}"
            yield _runs(facts.image, device, which)


def _runs(image: Image, device: Device, which: str) -> Finding:
    # The wheel that an audit of dist/ names lies beside it.
    is_wheel = image.name.endswith(".whl")
    subject = shlex.quote(str(image.audit.with_name(image.name)) if is_wheel else image.name)
    values = {"subject": subject, "device": device}
    if device not in image.units:
        devices = either(map(str, image.units)) or "no GPU"
        seen = f"could not see how {which} runs the image: its audit is of {devices} only"
        return unknown(seen, "audit", **values)
    counted = image.units[device]
    counts = f"{counted[NATIVE]} native, {counted[PTX]} through PTX, {counted[NONE]} not at all"
    units = f"{'libraries' if image.by_library else 'translation units'} {counts}"
    seen = f"{which}: {units}"
    if counted[NATIVE] + counted[PTX] == 0:
        return bad(f"{which} cannot run the image: {units}", "audit", **values)
    if image.offenders.get(device):
        return bad(f"{seen}; against the policy: {image.offenders[device][0]}", "audit", **values)
    if unreadable := counted[UNREADABLE]:
        return warn(f"{seen}, {unreadable} that could not be read", "audit", **values)
    if counted[NATIVE] == 0:
        return warn(seen, "audit", **values)
    if counted[NONE] and image.passed:
        seen += "; units without code are for other GPUs"
    return info(seen) if counted[PTX] else ok(seen)
