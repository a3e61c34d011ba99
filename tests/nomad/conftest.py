"""Nomad itself (tests/nomad/build.py), and an agent of it with the real docker driver."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.nomad import build
from tests.nomad.build import Tools

from sm12x import layout
from sm12x.core import process
from sm12x.core.process import Background, Completed
from sm12x.image.bundle import record
from sm12x.stack.model import base as bases

HERE = Path(__file__).resolve().parent
EXAMPLES = layout.root() / "nomad-examples"
# Of the GPUs that are not there: an RTX PRO 6000's, as NVIDIA's plugin reports it.
GPUS, GPU_MIB = 4, 97887
# Seconds for what an idle machine does in one or two: in CI other tests keep it busy.
LIMIT = 300
# The name of the task in every example; Nomad names a container `task-allocation`.
TASK = "vllm"


def _docker() -> str:
    return shutil.which("docker") or "docker"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A development agent; ``call`` runs one of Nomad's commands against it."""

    tools: Tools
    environment: dict[str, str]
    cache: Path
    log: Path

    def call(self, *words: str | Path, check: bool = True, timeout: float = LIMIT) -> Completed:
        return process.run(
            [self.tools.nomad, *words], env=self.environment, check=check, timeout=timeout
        )

    def allocations(self, job: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.call("job", "allocs", "-json", job).stdout)
        return found

    def inside(self, allocation: str, *command: str, check: bool = True) -> str:
        """What a command says in the container of an allocation.

        By docker: under load ``nomad alloc exec`` ends before all that a quick command has said is
        there, with status 0 (hashicorp/nomad#27146).
        """
        return process.run(
            [_docker(), "exec", f"{TASK}-{allocation}", *command], check=check, timeout=LIMIT
        ).stdout

    def wait(self, what: str, seconds: float, met: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while not met():
            if time.monotonic() > end:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
                pytest.fail(f"{what}: not within {seconds:g} s; the agent's last lines:\n{tail}")
            time.sleep(1)

    def clear(self) -> None:
        """Stop every job, and wait for their containers to end."""
        jobs = self.call("operator", "api", "/v1/jobs", check=False)
        for job in json.loads(jobs.stdout) if jobs.returncode == 0 else []:
            self.call("job", "stop", "-purge", job["ID"], check=False)

        def ended() -> bool:
            found = self.call("operator", "api", "/v1/allocations", check=False)
            running = json.loads(found.stdout) if found.returncode == 0 else []
            return not any(one["ClientStatus"] in ("pending", "running") for one in running)

        self.wait("the end of every container", LIMIT, ended)


def lacking(why: str) -> None:
    """Skip, and say why in pytest's summary; in CI, where nothing may be skipped, fail."""
    text = f"NOMAD IS NOT TESTED: {why}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(scope="session")
def tools() -> Tools:
    """Nomad and the stand-in for NVIDIA's plugin: built once for these pins, then cached."""
    made = build.tools()
    if made is None:
        lacking("go is not installed, and Nomad is built from its Go module")
        raise AssertionError
    return made


@pytest.fixture(scope="session")
def image() -> str:
    """SM12X_IMAGE, else the image that `make bundle` left; with docker, which Nomad drives."""
    name = os.environ.get("SM12X_IMAGE", "")
    if not name:
        base = os.environ.get("BASE") or bases.versions()[0]
        made = record.read(layout.dist(base))
        name = made.tags[0] if made and made.tags else ""
    if not name:
        lacking("there is no bundle: run `make bundle` first, or name an image in SM12X_IMAGE")
    if shutil.which("docker") is None or process.run([_docker(), "info"], check=False).returncode:
        lacking("docker does not answer, and Nomad's docker driver needs it")
    if process.run([_docker(), "image", "inspect", name], check=False).returncode:
        lacking(f"docker has no image {name}: run `make bundle ARGS='--engine docker'`")
    return name


@pytest.fixture(scope="session")
def agent(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    if os.geteuid() != 0:
        lacking("Nomad's client runs as root")
    folder = tmp_path_factory.mktemp("nomad")
    # The image's user writes to the volumes.
    folder.chmod(0o755)
    for parent in folder.parents[:2]:
        parent.chmod(parent.stat().st_mode | 0o055)
    for name in ("models", "cache"):
        (folder / name).mkdir(mode=0o777)
        (folder / name).chmod(0o777)
    ports = dict(zip(("http", "rpc", "serf"), _free_ports(3), strict=True))
    config = folder / "agent.hcl"
    config.write_text(_config(folder, tools, ports))
    environment = {"NOMAD_ADDR": f"http://127.0.0.1:{ports['http']}", "NOMAD_CLI_NO_COLOR": "1"}
    log = folder / "agent.log"
    words = ("agent", "-dev", "-bind", "127.0.0.1", "-config", config)
    running = Background([tools.nomad, *words], log=log, env={"NOMAD_CLI_NO_COLOR": "1"})
    made = Agent(tools=tools, environment=environment, cache=folder / "cache", log=log)

    def ready() -> bool:
        if running.poll() is not None:
            pytest.fail(f"the agent ended:\n{log.read_text(errors='replace')[-3000:]}")
        nodes = made.call("node", "status", "-json", check=False)
        found = json.loads(nodes.stdout) if nodes.returncode == 0 and nodes.stdout else []
        return (
            bool(found)
            and found[0]["Status"] == "ready"
            and found[0]["Drivers"].get("docker", {}).get("Healthy", False)
        )

    try:
        made.wait("an agent with docker", LIMIT, ready)
        yield made
    finally:
        made.clear()
        # The mounts of secrets go with the allocations.
        made.call("system", "gc", check=False)
        time.sleep(1)
        running.stop()
        for line in Path("/proc/mounts").read_text().splitlines():
            if line.split()[1].startswith(f"{folder}/"):
                process.run(["umount", "--lazy", line.split()[1]], check=False)


def _config(folder: Path, tools: Tools, ports: dict[str, int]) -> str:
    return f"""
disable_update_check = true
data_dir             = "{folder}/data"
plugin_dir           = "{tools.plugins}"
ports {{
  http = {ports["http"]}
  rpc  = {ports["rpc"]}
  serf = {ports["serf"]}
}}
client {{
  host_network "private" {{ cidr = "127.0.0.1/32" }}
  host_network "fabric" {{ cidr = "127.0.0.1/32" }}
  host_volume "sm12x-models" {{ path = "{folder}/models" }}
  host_volume "sm12x-cache" {{ path = "{folder}/cache" }}
  host_volume "sm12x-cache-other" {{ path = "{folder}/cache" }}
  host_volume "sm12x-cache-foreign" {{ path = "{folder}/cache" }}
  meta {{
    fabric_interface = "lo"
    fabric_hca       = "none"
  }}
  max_kill_timeout = "3m"
  # It would ask the network which cloud this is.
  options {{ "fingerprint.denylist" = "env_aws,env_azure,env_gce,env_digitalocean" }}
}}
plugin "docker" {{
  config {{
    volumes {{ enabled = true }}
    # For the GPUs that are not there.
    nvidia_runtime = "runc"
    allow_runtimes = ["runc"]
  }}
}}
plugin "standin-gpu" {{
  config {{
    count      = {GPUS}
    memory_mib = {GPU_MIB}
  }}
}}
"""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
