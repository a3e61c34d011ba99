"""Container engines, and whether and how they can hand GPUs to a container."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.model import Engine, Facts, Finding, bad, check, info, ok, unknown, warn

# The command that queries each. Not `podman info`, which would make its storage folders.
_ENGINES = {
    "docker": ("docker", "info", "--format", "{{json .}}"),
    "podman": ("podman", "version", "--format", "json"),
}
# Programs of the NVIDIA Container Toolkit; any of them shows that it is installed.
_TOOLS = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-runtime-hook")
_SPEC_FOLDERS = ("/etc/cdi", "/var/run/cdi")
_DAEMON = "/etc/docker/daemon.json"
_TOOLKIT = "/etc/nvidia-container-runtime/config.toml"
_NO_CGROUPS = re.compile(r"^\s*no-cgroups\s*=\s*true", re.MULTILINE)
_LIBRARY = re.compile(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)")


def collect(host: Host) -> tuple[Engine, ...]:
    """Collect the container engines on PATH, and what each answers."""
    engines: dict[str, Engine] = {}
    for command in _ENGINES:
        program = host.which(command)
        if program is not None:
            answer = _answer(host, command)
            # The package podman-docker has a `docker` that answers as podman does.
            emulated = not isinstance(answer, Unseen) and "host" in answer
            name = "podman" if emulated else command
            engines.setdefault(name, Engine(name=name, program=program, answer=answer))
    return tuple(engines.values())


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


def _specs(host: Host) -> dict[Path, tuple[str, ...] | Unseen]:
    """Return the files that tell engines how to hand out GPUs, with the drivers that each names."""
    specs: dict[Path, tuple[str, ...] | Unseen] = {}
    for folder in _SPEC_FOLDERS:
        for name in host.names(folder):
            text = host.text(f"{folder}/{name}")
            path = host.path(f"{folder}/{name}")
            if isinstance(text, Unseen):
                if "nvidia" in name:
                    specs[path] = text
            elif "nvidia.com/gpu" in text:
                specs[path] = tuple(dict.fromkeys(_LIBRARY.findall(text)))
    return specs


@check("engine.present")
def _present(facts: Facts) -> Iterator[Finding]:
    container = facts.machine.container
    if not facts.engines and container:
        # Where the image's files run without an engine, none is needed.
        seen = f"no docker or podman on PATH (this is inside a container: {container})"
        yield info(seen, "install")
    elif not facts.engines:
        yield bad("no docker or podman on PATH", "install")
    works = any(not isinstance(engine.answer, Unseen) for engine in facts.engines)
    for engine in facts.engines:
        if isinstance(engine.answer, Unseen):
            seen = f"{engine.name} ({engine.program}) does not answer: {engine.answer.why}"
            # Another engine answers, so this one is not needed.
            yield info(seen, engine.name) if works else bad(seen, engine.name)
        else:
            client = engine.answer.get("Client") or engine.answer.get("version")
            of_podman = client.get("Version", "") if isinstance(client, dict) else ""
            version = engine.answer.get("ServerVersion") or of_podman
            yield ok(f"{engine.name} {version} ({engine.program}) answers")


@check("engine.gpus")
def _gpu_access(facts: Facts) -> list[Finding]:
    """Check that engines hand out GPUs: docker by a runtime, its hook or CDI, podman by CDI."""
    engines = facts.engines
    # Where one answers, another that does not hands out nothing.
    working = [one for one in engines if not isinstance(one.answer, Unseen)] or engines
    tools = ", ".join(name for name in _TOOLS if facts.host.which(name))
    findings = [
        _docker(facts.host, one, tools) if one.name == "docker" else _podman(facts.host, tools)
        for one in working
    ]
    # Where one engine hands out GPUs, or no GPU is here, another that does not is no failure.
    served = any(one.severity == "ok" for one in findings) or not facts.seen_gpus
    return [
        replace(one, severity="info") if served and one.severity == "bad" else one
        for one in findings
    ]


def _docker(host: Host, engine: Engine, tools: str) -> Finding:
    answer = {} if isinstance(engine.answer, Unseen) else engine.answer
    listed = answer.get("Runtimes")
    rootless = "name=rootless" in str(answer.get("SecurityOptions"))
    on_file = _runtimes(host)
    # A rootless daemon has a configuration of its own.
    configured = () if rootless or isinstance(on_file, Unseen) else on_file
    if "nvidia" in (listed if isinstance(listed, dict) else configured):
        seen = f"docker's runtime `nvidia` is configured ({tools or 'no tools'})"
        # It may not change device cgroups either, which the toolkit can leave alone.
        if rootless and not _NO_CGROUPS.search(host.word(_TOOLKIT)):
            seen += "; rootless, and no-cgroups is not set, without which older toolkits fail"
            return info(seen, "no-cgroups")
        return ok(seen)
    if by_specs := _by_specs(host):
        return by_specs
    if "nvidia" in configured:
        return info(f"{_DAEMON} has a runtime `nvidia`, and docker runs without it", "restart")
    if tools:
        seen = f"{tools} installed; neither a runtime `nvidia` nor a CDI spec is configured"
        if rootless:
            return warn(f"rootless docker: {seen}", "rootless", "no-cgroups")
        # The hook alone serves `--gpus` in docker, without any configuration.
        return info(seen, "configure", "generate")
    if isinstance(on_file, Unseen) and not rootless:
        return unknown(f"could not see docker's configuration: {on_file.why}")
    seen = "no NVIDIA Container Toolkit, no runtime `nvidia`, no CDI spec: --gpus all fails"
    return bad(seen, "toolkit", *(("rootless", "no-cgroups") if rootless else ("configure",)))


def _runtimes(host: Host) -> tuple[str, ...] | Unseen:
    """Return the runtimes in the configuration of the docker daemon."""
    text = host.text(_DAEMON)
    if isinstance(text, Unseen):
        # A daemon without that file runs with its defaults: no runtime of its own.
        return () if not host.exists(_DAEMON) else text
    try:
        return tuple(json.loads(text or "{}").get("runtimes", {}))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        return Unseen(f"{_DAEMON} is not valid: {error}")


def _podman(host: Host, tools: str) -> Finding:
    if by_specs := _by_specs(host):
        return by_specs
    seen = f"podman hands out GPUs by CDI alone, and no spec is in {' or '.join(_SPEC_FOLDERS)}"
    seen += f" ({tools or 'no toolkit'})"
    return bad(seen, "generate") if tools else bad(seen, "toolkit", "generate")


def _by_specs(host: Host) -> Finding | None:
    specs = _specs(host)
    readable = [str(path) for path, drivers in specs.items() if not isinstance(drivers, Unseen)]
    if readable:
        return ok(f"CDI specs: {', '.join(readable)}")
    for path, drivers in specs.items():
        why = getattr(drivers, "why", "")
        return unknown(f"could not see CDI specs: {why}", "readable", path=path)
    return None


@check("engine.cdi")
def _cdi(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver.version
    for path, drivers in _specs(facts.host).items():
        if isinstance(drivers, Unseen):
            yield unknown(f"could not see a CDI spec: {drivers.why}")
        elif isinstance(driver, Unseen) or not drivers:
            yield unknown(f"could not compare {path} with the driver: a version is not known")
        elif driver in drivers:
            yield ok(f"{path} is for driver {driver}")
        else:
            seen = f"{path} is for driver {', '.join(drivers)}, loaded is {driver}"
            yield bad(seen, "generate", path=path)
