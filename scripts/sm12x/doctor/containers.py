"""Container engines, and whether and how they can hand GPUs to a container."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import Knowledge, check
from sm12x.doctor.model import (
    BAD,
    INFO,
    OK,
    UNKNOWN,
    WARN,
    CdiSpec,
    Containers,
    EngineAnswer,
    Finding,
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
_NO_CGROUPS = re.compile(r"^\s*no-cgroups\s*=\s*true", re.MULTILINE)
_LIBRARY = re.compile(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)")


def collect(host: Host) -> Containers:
    engines: dict[str, EngineAnswer] = {}
    for command in _ENGINES:
        program = host.which(command)
        if program is not None:
            answer = _answer(host, command)
            # The package podman-docker has a `docker` that answers as podman does.
            emulated = not isinstance(answer, Unseen) and "host" in answer
            name = "podman" if emulated else command
            engines.setdefault(name, EngineAnswer(name=name, program=program, answer=answer))
    config = host.text("/etc/nvidia-container-runtime/config.toml")
    return Containers(
        engines=tuple(engines.values()),
        no_cgroups=not isinstance(config, Unseen) and bool(_NO_CGROUPS.search(config)),
        runtimes=_runtimes(host),
        tools=tuple(name for name in _TOOLS if host.which(name)),
        specs=_specs(host),
    )


def _answer(host: Host, name: str) -> Mapping[str, object] | Unseen:
    done = host.ask(_ENGINES[name])
    if isinstance(done, Unseen):
        return done
    try:
        document = json.loads(done.stdout)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        return Unseen(f"`{' '.join(_ENGINES[name][:2])}` does not answer in JSON")
    errors = document.get("ServerErrors")
    return Unseen(str(errors[0]).rstrip(".")) if isinstance(errors, list) and errors else document


def _runtimes(host: Host) -> tuple[str, ...] | Unseen:
    text = host.text(_DAEMON)
    if isinstance(text, Unseen):
        # A daemon without that file runs with its defaults: no runtime of its own.
        return () if not host.exists(_DAEMON) else text
    try:
        return tuple(json.loads(text or "{}").get("runtimes", {}))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        return Unseen(f"{_DAEMON} is not valid: {error}")


def _specs(host: Host) -> tuple[CdiSpec, ...]:
    specs = []
    for folder in _SPEC_FOLDERS:
        for name in host.names(folder):
            text = host.text(f"{folder}/{name}")
            path = host.path(f"{folder}/{name}")
            if isinstance(text, Unseen):
                if "nvidia" in name:
                    specs.append(CdiSpec(path=path, drivers=text))
            elif "nvidia.com/gpu" in text:
                drivers = tuple(dict.fromkeys(_LIBRARY.findall(text)))
                specs.append(CdiSpec(path=path, drivers=drivers))
    return tuple(specs)


# A rootless daemon has a configuration of its own, and may not change device cgroups.
_ROOTLESS = ("rootless", "no-cgroups")


@check("engine.present")
def engines(facts: HostFacts, knowledge: Knowledge) -> Iterator[Finding]:
    answers = facts.containers.engines
    if not answers:
        # Inside a container, or where the image's files run without an engine, none is needed.
        where = f" (this is inside a container: {facts.machine.container})"
        seen = f"no docker or podman on PATH{where if facts.machine.container else ''}"
        severity = INFO if facts.machine.container else BAD
        yield Finding(severity, seen, fix=("install",))
    works = any(not isinstance(engine.answer, Unseen) for engine in answers)
    for engine in answers:
        if isinstance(engine.answer, Unseen):
            seen = f"{engine.name} ({engine.program}) does not answer: {engine.answer.why}"
            # Another engine answers, so this one is not needed.
            yield Finding(INFO if works else BAD, seen, fix=(engine.name,))
        else:
            version = engine.answer.get("ServerVersion") or _podman_version(engine.answer)
            yield Finding(OK, f"{engine.name} {version} ({engine.program}) answers")


@check("engine.gpus")
def gpu_access(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    """Check that engines hand out GPUs: docker by a runtime, its hook or CDI, podman by CDI."""
    engines = facts.containers.engines
    # Where one answers, another that does not hands out nothing.
    working = [one for one in engines if not isinstance(one.answer, Unseen)] or engines
    findings = [_docker(facts, one) if one.name == "docker" else _podman(facts) for one in working]
    # Where one engine hands out GPUs, or no GPU is here, another that does not is no failure.
    served = any(one.severity == OK for one in findings) or not facts.seen_gpus
    return [
        replace(one, severity=INFO) if served and one.severity == BAD else one for one in findings
    ]


def _docker(facts: HostFacts, engine: EngineAnswer) -> Finding:
    containers = facts.containers
    answer = {} if isinstance(engine.answer, Unseen) else engine.answer
    listed, tools = answer.get("Runtimes"), ", ".join(containers.tools)
    rootless = "name=rootless" in str(answer.get("SecurityOptions"))
    on_file = () if rootless or isinstance(containers.runtimes, Unseen) else containers.runtimes
    if "nvidia" in (listed if isinstance(listed, dict) else on_file):
        seen = f"docker's runtime `nvidia` is configured ({tools or 'no tools'})"
        if rootless and not containers.no_cgroups:
            seen += "; rootless, and no-cgroups is not set, without which older toolkits fail"
            return Finding(INFO, seen, fix=_ROOTLESS[-1:])
        return Finding(OK, seen)
    if containers.specs:
        return _by_specs(facts)
    if "nvidia" in on_file:
        seen = f"{_DAEMON} has a runtime `nvidia`, and docker runs without it"
        return Finding(INFO, seen, fix=("restart",))
    if tools:
        seen = f"{tools} installed; neither a runtime `nvidia` nor a CDI spec is configured"
        if rootless:
            return Finding(WARN, f"rootless docker: {seen}", fix=_ROOTLESS)
        # The hook alone serves `--gpus` in docker, without any configuration.
        return Finding(INFO, seen, fix=("configure", "generate"))
    if isinstance(containers.runtimes, Unseen) and not rootless:
        seen = f"could not see docker's configuration: {containers.runtimes.why}"
        return Finding(UNKNOWN, seen)
    seen = "no NVIDIA Container Toolkit, no runtime `nvidia`, no CDI spec: --gpus all fails"
    fix = ("toolkit", *(_ROOTLESS if rootless else ("configure",)))
    return Finding(BAD, seen, fix=fix)


def _podman(facts: HostFacts) -> Finding:
    if facts.containers.specs:
        return _by_specs(facts)
    tools = ", ".join(facts.containers.tools)
    seen = f"podman hands out GPUs by CDI alone, and no spec is in {' or '.join(_SPEC_FOLDERS)}"
    fix = ("generate",) if tools else ("toolkit", "generate")
    return Finding(BAD, f"{seen} ({tools or 'no toolkit'})", fix=fix)


def _by_specs(facts: HostFacts) -> Finding:
    specs = facts.containers.specs
    readable = [str(one.path) for one in specs if not isinstance(one.drivers, Unseen)]
    if readable:
        return Finding(OK, f"CDI specs: {', '.join(readable)}")
    seen = f"could not see CDI specs: {getattr(specs[0].drivers, 'why', '')}"
    return Finding(UNKNOWN, seen, fix=("readable",), values={"path": specs[0].path})


@check("engine.cdi")
def cdi(facts: HostFacts, knowledge: Knowledge) -> Iterator[Finding]:
    for spec in facts.containers.specs:
        driver = facts.driver.version
        if isinstance(spec.drivers, Unseen):
            seen = f"could not see a CDI spec: {spec.drivers.why}"
            yield Finding(UNKNOWN, seen)
        elif isinstance(driver, Unseen) or not spec.drivers:
            seen = f"could not compare {spec.path} with the driver: a version is not known"
            yield Finding(UNKNOWN, seen)
        elif driver in spec.drivers:
            yield Finding(OK, f"{spec.path} is for driver {driver}")
        else:
            seen = f"{spec.path} is for driver {', '.join(spec.drivers)}, loaded is {driver}"
            yield Finding(BAD, seen, fix=("generate",), values={"path": spec.path})


def _podman_version(answer: Mapping[str, object]) -> str:
    client = answer.get("Client") or answer.get("version")
    return str(client.get("Version", "")) if isinstance(client, dict) else ""
