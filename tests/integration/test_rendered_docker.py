"""A stranger's recipe through docker itself: what its program finds in the container."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from sm12x.core import process
from sm12x.core.errors import UsageError
from sm12x.deploy import local
from sm12x.deploy.container import Grants
from sm12x.recipes import load

# The base image that `make bundle` makes: any image with bash would do.
IMAGE = "sm12x-base:trixie"
RECIPE = """\
recipe_version: "1"
name: strange
container: quay.io/evil/vllm:1
model: some/Model
defaults: {host: 127.0.0.1, port: %s, model: %s}
env: {HARMLESS: "1"}
command: |
  echo caps $(grep -h Cap /proc/self/status) && echo new $(grep NoNew /proc/self/status) &&
  echo shm $(df -B1 --output=size /dev/shm) && echo host $(cat /proc/net/route | wc -l) &&
  echo env $(env) && echo mounts $(cut -d' ' -f2,4 /proc/mounts) && (: > {model}/written || echo ro)
"""


@pytest.fixture
def docker() -> str:
    program = shutil.which("docker")
    if program is None or process.run([program, "image", "inspect", IMAGE], check=False).returncode:
        pytest.skip(f"docker has no image {IMAGE} here")
    return program


def test_a_strangers_program_finds_nothing_of_the_machine(docker: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not in /tmp, which a container has for itself.
    model = Path("/srv/sm12x-test-model")
    model.mkdir(exist_ok=True)
    path = tmp_path / "strange.yaml"
    try:
        path.write_text(RECIPE % (port, json.dumps(str(model))))
        cache = f"sm12x-test-{os.getpid()}"
        one = replace(load.load(path), name="\x1b]52;c;eA==\x07")
        text = local.docker(one, image=IMAGE, settings={}, extra=(), grants=Grants(cache=cache))
        assert "\x1b" not in text
        # No GPU here, and nothing of the test is left behind.
        text = re.sub(r"--gpus \S+", "", text)
        secrets = {"VLLM_API_KEY": "of-the-user", "HF_TOKEN": "hf_of-the-user"}
        done = process.run(["bash", "-c", text], env=secrets, check=False)
    finally:
        process.run([docker, "volume", "rm", "--force", cache], check=False)
        shutil.rmtree(model)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert set(re.findall(r"Cap\w+: (\w+)", said["caps"])) == {"0" * 16}
    assert said["new"].split()[-1] == "1"
    assert int(said["shm"].split()[-1]) == 16 << 30
    assert "VLLM_API_KEY=of-the-user" in said["env"]
    assert "of-the-user" not in text
    assert "HF_TOKEN" not in said["env"]
    mounts = said["mounts"].split()
    options = mounts[mounts.index(str(model)) + 1].split(",")
    assert "ro" in options
    assert "ro" in done.stdout.splitlines()
    assert "/var/run/docker.sock" not in mounts


def test_the_sockets_folder_is_not_mounted(tmp_path: Path) -> None:
    for model in ("/var/run/docker.sock", "/run", "/etc"):
        path = tmp_path / "strange.yaml"
        path.write_text(RECIPE % (8000, json.dumps(model)))
        with pytest.raises(UsageError, match="not mounted"):
            local.docker(load.load(path), image=IMAGE, settings={}, extra=())


def test_a_pasted_text_does_not_go_on_without_the_key(tmp_path: Path) -> None:
    path = tmp_path / "strange.yaml"
    path.write_text(RECIPE % (8000, '"some/Model"'))
    text = local.docker(
        load.load(path), image=IMAGE, settings={}, extra=(), grants=Grants(publish="192.168.1.5")
    )
    # An interactive shell, into which lines are pasted, does not end at a variable that is missing.
    words = ["bash", "--norc", "--noprofile", "-i"]
    for key, ran in (("", False), ("k", True)):
        done = process.run(
            words, stdin=f"docker() {{ echo ran; }}\n{text}", env={"VLLM_API_KEY": key}, check=False
        )
        assert ("ran" in done.stdout.splitlines()) == ran, done.stdout + done.stderr
