"""The audit as JSON; data/schemas/audit-1.json says what each key holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sm12x.audit.model import DEVICES, Audit, Device, LibraryAudit
from sm12x.audit.policy import Judgement

SCHEMA = 1


def document(
    audit: Audit, judgement: Judgement | None = None, devices: Sequence[Device] = DEVICES
) -> dict[str, Any]:
    """The report as plain data. ``policy`` is null when nothing was judged."""
    return {
        "schema": SCHEMA,
        "subject": audit.subject,
        "kind": audit.kind,
        "devices": [str(device) for device in devices],
        "libraries": [_library(library, devices) for library in audit.libraries],
        "policy": None if judgement is None else _judgement(judgement),
    }


def to_json(
    audit: Audit, judgement: Judgement | None = None, devices: Sequence[Device] = DEVICES
) -> str:
    return json.dumps(document(audit, judgement, devices), indent=1) + "\n"


def _library(library: LibraryAudit, devices: Sequence[Device]) -> dict[str, Any]:
    return {
        "path": library.path,
        "sha256": library.sha256,
        "size": library.size,
        "machine": library.machine,
        "cubins": dict(library.cubins),
        "ptx": dict(library.ptx),
        **({"lto": dict(library.lto)} if library.lto else {}),
        "unknown": list(library.unknown),
        **({"unloadable": library.unloadable} if library.unloadable else {}),
        **({"store_exclusives": _stores(library)} if library.stores.total else {}),
        "runs": {
            str(device): {
                "verdict": library.verdict(device),
                "units": dict(library.units_on(device)),
                **({"embedded": dict(library.embedded_on(device))} if library.embedded else {}),
            }
            for device in devices
        },
    }


def _stores(library: LibraryAudit) -> dict[str, Any]:
    return {"total": library.stores.total, "untested": list(library.stores.untested)}


def _judgement(judgement: Judgement) -> dict[str, Any]:
    return {
        "name": judgement.policy,
        "passed": judgement.passed,
        "unasked": judgement.unasked,
        "offenders": [
            {"path": offender.path, "device": offender.device, "message": offender.message}
            for offender in judgement.offenders
        ],
        "accepted": [
            {"reason": accepted.reason, "paths": list(accepted.paths)}
            for accepted in judgement.accepted
        ],
    }
