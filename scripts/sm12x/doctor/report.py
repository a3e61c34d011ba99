"""The findings as JSON, version 1 (data/schemas/doctor-1.json)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sm12x.doctor.model import SEVERITIES, Diagnosis, Gpu, HostFacts, Unseen

SCHEMA = 1


def document(facts: HostFacts, findings: Sequence[Diagnosis]) -> dict[str, Any]:
    """Plain data. A number that could not be read is null, never 0."""
    counted = Counter(finding.severity for finding in findings)
    image = facts.image
    return {
        "schema": SCHEMA,
        "machine": {
            "architecture": facts.machine.name,
            "kernel": facts.machine.kernel,
            "container": facts.machine.container or None,
            "driver": None if isinstance(facts.driver.version, Unseen) else facts.driver.version,
            "unified_memory": None if isinstance(facts.gpus, Unseen) else facts.unified,
        },
        "gpus": None if isinstance(facts.gpus, Unseen) else [_gpu(gpu) for gpu in facts.gpus],
        "image": None
        if isinstance(image, Unseen)
        else {"name": image.name, "stack_id": image.stack_id or None, "machine": image.machine},
        "summary": {severity: counted[severity] for severity in SEVERITIES},
        "findings": [
            {
                "id": finding.id,
                "severity": finding.severity,
                "seen": finding.seen,
                "why": finding.why,
                "sources": list(finding.sources),
                "fix": list(finding.fix),
            }
            for finding in findings
        ],
    }


def to_json(facts: HostFacts, findings: Sequence[Diagnosis]) -> str:
    return json.dumps(document(facts, findings), indent=1) + "\n"


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "bus": gpu.bus,
        "capability": str(gpu.capability) if gpu.capability else None,
        "hardware": gpu.hardware or None,
        "unified": gpu.unified,
        "memory_total": gpu.memory_total,
        "memory_used": gpu.memory_used,
        "told_by": gpu.told_by,
    }
