"""Container engines, and whether and how they can hand GPUs to a container."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import (
    BAD,
    INFO,
    OK,
    UNKNOWN,
    CdiSpec,
    Containers,
    Diagnosis,
    EngineAnswer,
    HostFacts,
    Unseen,
)

# The command that queries each. Not `podman info`, which would make its storage folders.
_ENGINES = {
    "docker": ("docker", "info", "--format", "{{json .}}"),
    "podman": ("podman", "version", "--format", "json"),
}
# Programs of the NVIDIA Container Toolkit; any of them shows that it is installed.
_TOOLS = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-runtime-hook")
_SPEC_FOLDERS = ("/etc/cdi", "/var/run/cdi")
_DAEMON = "/etc/docker/daemon.json"
_LIBRARY = re.compile(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)")


def collect(host: Host) -> Containers:
    engines = []
    for name in _ENGINES:
        program = host.which(name)
        if program is not None:
            engines.append(EngineAnswer(name=name, program=program, answer=_answer(host, name)))
    return Containers(
        engines=tuple(engines),
        runtimes=_runtimes(host),
        tools=tuple(name for name in _TOOLS if host.which(name)),
        specs=_specs(host),
    )


def _answer(host: Host, name: str) -> Mapping[str, object] | Unseen:
    done = host.ask(_ENGINES[name])
    if isinstance(done, Unseen):
        return done
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return Unseen(f"`{' '.join(_ENGINES[name][:2])}` does not answer in JSON")
    errors = found.get("ServerErrors")
    return Unseen(str(errors[0]).rstrip(".")) if isinstance(errors, list) and errors else found


def _runtimes(host: Host) -> tuple[str, ...] | Unseen:
    text = host.text(_DAEMON)
    if isinstance(text, Unseen):
        # A daemon without that file runs with its defaults: no runtime of its own.
        return () if not host.exists(_DAEMON) else text
    try:
        return tuple(json.loads(text or "{}").get("runtimes", {}))
    except (ValueError, AttributeError) as error:
        return Unseen(f"{_DAEMON} is not valid: {error}")


def _specs(host: Host) -> tuple[CdiSpec, ...]:
    specs = []
    for folder in _SPEC_FOLDERS:
        for name in host.names(folder):
            text = host.text(f"{folder}/{name}")
            if isinstance(text, Unseen) or "nvidia.com/gpu" not in text:
                continue
            drivers = tuple(dict.fromkeys(_LIBRARY.findall(text)))
            specs.append(CdiSpec(path=host.path(f"{folder}/{name}"), drivers=drivers))
    return tuple(specs)


_CONFIGURE = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
_GENERATE = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"


def engines(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "engine.present"
    found = facts.containers.engines
    if not found:
        # Inside a container, or where the image's files run without an engine, none is needed.
        where = f" (this is inside a container: {facts.machine.container})"
        seen = f"no docker or podman on PATH{where if facts.machine.container else ''}"
        fix = ("sudo apt install docker.io",)
        severity = INFO if facts.machine.container else BAD
        return [known.finding(name, severity, seen, fix=fix)]
    findings = []
    works = any(not isinstance(engine.answer, Unseen) for engine in found)
    for engine in found:
        if isinstance(engine.answer, Unseen):
            seen = f"{engine.name} ({engine.program}) does not answer: {engine.answer.why}"
            fix = (
                ("sudo systemctl start docker",) if engine.name == "docker" else ("podman version",)
            )
            # Another engine answers, so this one is not needed.
            findings.append(known.finding(name, INFO if works else BAD, seen, fix=fix))
        else:
            version = engine.answer.get("ServerVersion") or _podman_version(engine.answer)
            seen = f"{engine.name} {version} ({engine.program}) answers"
            findings.append(known.finding(name, OK, seen))
    return findings


def gpu_access(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "engine.gpus"
    containers = facts.containers
    if not containers.engines:
        return []
    runtimes = set() if isinstance(containers.runtimes, Unseen) else set(containers.runtimes)
    for engine in containers.engines:
        answer = engine.answer
        listed = None if isinstance(answer, Unseen) else answer.get("Runtimes")
        if isinstance(listed, dict):
            runtimes |= set(listed)
    specs = [str(spec.path) for spec in containers.specs]
    tools = ", ".join(containers.tools)
    if "nvidia" in runtimes:
        return [known.finding(name, OK, f"runtime `nvidia` is configured ({tools or 'no tools'})")]
    if specs:
        return [known.finding(name, OK, f"CDI specs: {', '.join(specs)}")]
    if tools:
        # The hook alone serves `--gpus` in docker, without any configuration.
        seen = f"{tools} installed; neither a runtime `nvidia` nor a CDI spec is configured"
        return [known.finding(name, INFO, seen, fix=(_CONFIGURE, _GENERATE))]
    if isinstance(containers.runtimes, Unseen):
        seen = f"could not see docker's configuration: {containers.runtimes.why}"
        return [known.finding(name, UNKNOWN, seen)]
    seen = "no NVIDIA Container Toolkit, no runtime `nvidia`, no CDI spec: --gpus all fails"
    fix = ("sudo apt install nvidia-container-toolkit", _CONFIGURE)
    return [known.finding(name, BAD if facts.seen_gpus else INFO, seen, fix=fix)]


def cdi(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "engine.cdi"
    findings = []
    for spec in facts.containers.specs:
        found = facts.driver.version
        if isinstance(found, Unseen) or not spec.drivers:
            seen = f"could not compare {spec.path} with the driver: a version is not known"
            findings.append(known.finding(name, UNKNOWN, seen))
        elif found in spec.drivers:
            findings.append(known.finding(name, OK, f"{spec.path} is for driver {found}"))
        else:
            seen = f"{spec.path} is for driver {', '.join(spec.drivers)}, loaded is {found}"
            fix = (f"sudo nvidia-ctk cdi generate --output={spec.path}",)
            findings.append(known.finding(name, BAD, seen, fix=fix))
    return findings


def _podman_version(answer: Mapping[str, object]) -> str:
    client = answer.get("Client")
    return str(client.get("Version", "")) if isinstance(client, dict) else ""
