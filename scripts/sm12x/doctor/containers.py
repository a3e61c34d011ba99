"""Container engines, and whether they can hand GPUs to a container."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from sm12x.doctor.host import Host
from sm12x.doctor.model import CdiSpec, Containers, EngineAnswer, Unseen

# How to ask each. `podman info` would make its storage folders, so it is not used.
ENGINES = {
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
    for name in ENGINES:
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
    done = host.ask(ENGINES[name])
    if isinstance(done, Unseen):
        return done
    try:
        found: dict[str, object] = json.loads(done.stdout)
    except ValueError:
        return Unseen(f"`{' '.join(ENGINES[name][:2])}` does not answer in JSON")
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
