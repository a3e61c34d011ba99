"""The rendered specifications under the real Nomad: formatted, valid, placed, run to their end."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

import pytest
from tests.nomad.build import Tools
from tests.nomad.conftest import EXAMPLES, GPUS, LIMIT, Agent

from sm12x import layout
from sm12x.core import process
from sm12x.core.text import CONTROL
from sm12x.deploy import nomad
from sm12x.deploy.nomad import job_name
from sm12x.recipes import load, render

SHIPPED = load.load_all(layout.recipes())
# Every recipe that Nomad can run, and the overlay among the examples.
SPECS = {
    **{
        key: nomad.render(one, peers=[SHIPPED[name] for name in nomad.pool_of(one)])
        for key, one in SHIPPED.items()
        if not nomad.unfit(one)
    },
    **{
        path.name.removesuffix(nomad.SUFFIX): path.read_text(encoding="utf-8")
        for path in sorted(EXAMPLES.glob("*" + nomad.SUFFIX))
    },
}
ONE = "deepseek-v4-flash-rtx-pro-6000-tp4"
POOL = "rotation-pair-rtx-pro-6000-tp4"
CLUSTER = "deepseek-v4-flash-gb10-x2"
OVERLAY = "qwen3.6-27b-nvfp4-rtx-pro-6000-overlay"
# Seconds for the whole check of the image.
CHECK_LIMIT = 1800
# What a machine with no GPU can give; the share that a specification asks for is for a bigger one.
SMALL = ("-var", "cpu=100", "-var", "memory=512")


def spec(name: str) -> Path:
    return EXAMPLES / f"{name}.nomad.hcl"


def needed(path: Path, image: str = "image:tag") -> list[str]:
    """The variables without a default."""
    return ["-var", f"image={image}", *(["-var", "overlay={}"] if "overlay" in path.name else [])]


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> None:
    """Each test starts with every GPU free."""
    if "agent" in request.fixturenames:
        agent: Agent = request.getfixturevalue("agent")
        agent.clear()


@pytest.fixture(scope="module")
def specifications(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("specifications")
    for name, text in SPECS.items():
        (folder / (name + nomad.SUFFIX)).write_text(text, encoding="utf-8")
    return folder


def test_they_are_as_the_formatter_leaves_them(tools: Tools, specifications: Path) -> None:
    done = process.run([tools.nomad, "fmt", "-check", specifications], check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", SPECS)
def test_each_is_valid_with_and_without_gpus(agent: Agent, specifications: Path, name: str) -> None:
    path = specifications / (name + nomad.SUFFIX)
    for more in ([], ["-var", "gpus=0", "-var", "args=check"]):
        done = agent.call("job", "validate", *needed(path), *more, path, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stdout + done.stderr


def test_the_image_proves_itself_without_a_gpu(agent: Agent, image: str) -> None:
    """Quickly: tests/image runs the whole check, with a specification's memory and rights.

    What a specification alone decides, whether nvcc and Triton can work beside its mounts, the next
    test asks.
    """
    agent.call(
        *("job", "run", *needed(spec(ONE), image), "-var", "gpus=0", "-var", "args=check --quick"),
        spec(ONE),
        timeout=CHECK_LIMIT,
    )
    job = f"{ONE}-check"
    agent.wait("the check", CHECK_LIMIT, lambda: status(agent, job) in ("complete", "failed"))
    (allocation,) = agent.allocations(job)
    log = log_of(agent, allocation["ID"], "check: ")
    print(log)
    assert allocation["ClientStatus"] == "complete", log
    assert "check: ok," in log
    assert ", 0 failed" in log


# nvcc as the check uses it, and one of Triton's kernels into the cache of servers.
COMPILE = """
import sys, tempfile
from pathlib import Path
from sm12x.runtime.check import compiler
from sm12x.runtime.places import Places
places = Places.of_image()
with tempfile.TemporaryDirectory() as folder:
    print([line.state for line in compiler.check(places, Path(folder))])
sys.path.insert(0, str((places.site / compiler.PACKAGE).parent))
from portable_mla import block_fp8_einsum, compile
print(compile.compile_for(block_fp8_einsum.configurations()[0], 120).shared_memory > 0)
"""


def test_compilers_work_beside_what_a_specification_mounts(agent: Agent, image: str) -> None:
    words = (*needed(spec(ONE), image), "-var", "gpus=0", "-var", "args=timeout 900 sleep 900")
    agent.call("job", "run", "-detach", *words, spec(ONE))
    answers = said_inside(agent, f"{ONE}-check", "python", "-P", "-c", COMPILE)
    assert answers.splitlines() == ["['pass']", "True"]


def test_a_server_gets_its_gpus_its_address_and_its_secrets(agent: Agent, image: str) -> None:
    job = job_name(ONE)
    agent.call("var", "put", "-force", f"nomad/jobs/{job}", "hf_token=hf_one", "api_key=key one")
    # A server that answers /health, and nothing more. As process 1, Python would ignore SIGTERM.
    (agent.cache / "health").write_text("")
    serve = "timeout 900 python -m http.server 18000 --bind 127.0.0.1 --directory /cache"
    words = (*needed(spec(ONE), image), *SMALL, "-var", "port=18000", "-var", f"args={serve}")
    agent.call("job", "run", *words, spec(ONE), timeout=LIMIT)
    (allocation,) = agent.allocations(job)
    assert allocation["DeploymentStatus"]["Healthy"] is True

    def inside(*command: str) -> str:
        return agent.inside(allocation["ID"], *command).strip()

    environment = dict(line.split("=", 1) for line in inside("env").splitlines() if "=" in line)
    assert sorted(environment["NVIDIA_VISIBLE_DEVICES"].split(",")) == [
        f"GPU-{n}" for n in range(GPUS)
    ]
    assert environment["SM12X_HOST"] == "127.0.0.1"
    assert environment["SM12X_PORT"] == "18000"
    assert environment["VLLM_API_KEY"] == "key one"
    assert "HF_TOKEN" not in environment
    # As the image's user, for whom the file is.
    assert inside("cat", environment["HF_TOKEN_PATH"]) == "hf_one"
    services = agent.call("service", "info", job).stdout
    assert "127.0.0.1:18000" in services

    # Every GPU is taken: nothing else is placed, and Nomad says why.
    done = agent.call(
        "job", "plan", *needed(spec("smoke"), image), *SMALL, spec("smoke"), check=False
    )
    assert "Failed to place all allocations" in done.stdout
    assert 'Dimension "devices: no devices match request" exhausted' in done.stdout


def test_a_server_that_sleeps_waits_for_its_key(agent: Agent, image: str) -> None:
    job = job_name(ONE)
    agent.call("var", "purge", f"nomad/jobs/{job}", check=False)
    words = (*needed(spec(ONE), image), *SMALL, "-var", "args=timeout 900 sleep 900")
    agent.call("job", "run", "-detach", *words, spec(ONE))
    agent.wait("an allocation", LIMIT, lambda: bool(agent.allocations(job)))

    end = time.monotonic() + 10
    while time.monotonic() < end:
        assert status(agent, job) == "pending"
        time.sleep(1)
    # Another secret is no key.
    agent.call("var", "put", "-force", f"nomad/jobs/{job}", "hf_token=hf_one")
    agent.wait("the task to fail", LIMIT, lambda: status(agent, job) == "failed")
    agent.clear()
    agent.call("var", "put", "-force", f"nomad/jobs/{job}", "api_key=one", "sleep_api_key=two")
    agent.call("job", "run", "-detach", *words, spec(ONE))
    environment = said_inside(agent, job, "env")
    assert "VLLM_API_KEY=one\n" in environment
    assert "VLLM_SLEEP_API_KEY=two\n" in environment


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        (ONE, ["gpu_memory=200 GiB"], 'Constraint "missing devices": 1 nodes excluded'),
        (ONE, [f"gpus={GPUS + 1}"], 'Constraint "missing devices": 1 nodes excluded'),
        (ONE, ["models_volume=elsewhere"], "missing compatible host volumes"),
        (ONE, ["host_network=public"], 'missing host network \\"public\\" for port'),
        (ONE, ['datacenters=["moon"]'], "No nodes were eligible"),
        (CLUSTER, [], "${attr.cpu.arch} = arm64"),
    ],
)
def test_what_cannot_be_placed_says_why(
    agent: Agent, name: str, more: list[str], reason: str
) -> None:
    words = [*needed(spec(name)), *SMALL, *(word for one in more for word in ("-var", one))]
    done = agent.call("job", "plan", *words, spec(name), check=False)
    assert "Failed to place all allocations" in done.stdout, done.stdout + done.stderr
    assert reason in done.stdout, done.stdout


@pytest.mark.parametrize("name", [ONE, POOL])
def test_what_fits_is_placed(agent: Agent, name: str) -> None:
    done = agent.call("job", "plan", *needed(spec(name)), *SMALL, spec(name), check=False)
    assert "All tasks successfully allocated" in done.stdout, done.stdout + done.stderr


def test_an_overlaid_file_is_read_only_and_the_cache_is_not(agent: Agent, image: str) -> None:
    where = "/opt/overlaid.py"
    file = agent.cache / "overlaid.py"
    file.write_text("patched = True\n")
    done = agent.call(
        *("job", "run", "-var", f"image={image}", "-var", f'overlay={{"{where}"="{file}"}}'),
        *("-var", "gpus=0", "-var", "args=timeout 900 sleep 900"),
        *("-detach", spec(OVERLAY)),
    )
    assert done.returncode == 0
    job = f"{job_name(OVERLAY.removesuffix('-overlay'))}-check"
    # Asked while it runs: the log of a task that ends at once may lack its end.
    log = said_inside(agent, job, "cat", where, "/proc/mounts")
    assert log.startswith("patched = True\n")
    mounts = {line.split()[1]: line.split()[3].split(",")[0] for line in log.splitlines()[1:]}
    assert mounts["/"] == "ro"
    assert mounts[where] == "ro"
    assert mounts["/root/.cache"] == "rw"
    assert mounts["/tmp"] == "rw"  # noqa: S108


def log_of(agent: Agent, allocation: str, last: str) -> str:
    """What a task has said, once ``last`` is in it: it may come after the task's end."""
    said = [""]

    def complete() -> bool:
        said[0] = agent.call("alloc", "logs", allocation, check=False).stdout
        return last in said[0]

    agent.wait(f"{last!r} in the log", LIMIT, complete)
    return said[0]


def said_inside(agent: Agent, job: str, *command: str) -> str:
    """What a command says inside the job's one container, once that runs."""
    agent.wait(f"{job} to run", LIMIT, lambda: status(agent, job) == "running")
    (allocation,) = agent.allocations(job)
    return agent.inside(allocation["ID"], *command)


def status(agent: Agent, job: str) -> str:
    found = agent.allocations(job)
    return str(found[0]["ClientStatus"]) if found else ""


def test_the_two_states_of_a_job_have_two_names(tools: Tools) -> None:
    for more, name, kind in (([], job_name(ONE), "service"), (["gpus=0"], f"{ONE}-check", "batch")):
        words = [word for one in more for word in ("-var", one)]
        made = process.run(
            [tools.nomad, "job", "run", "-output", *needed(spec(ONE)), *words, spec(ONE)]
        )
        job = json.loads(made.stdout)["Job"]
        assert (job["ID"], job["Type"]) == (name, kind)


HOSTILE = (
    *('"', "\\", "\\${x}", "${x}", "$${x}", "$$${x}", "%{ if true }", "%%{x}", "$", "%", "#", "//"),
    *('a"\n}\njob "b" {', "\r\t\n", "<<<< env >>>>", "{{ env }}", "[[ x ]]", "a\nEOT\n", "~}"),
    *("/* x", "\x01\x7f\x85\u2028", "\ufeff"),
)


def test_no_value_of_a_recipe_becomes_hcl(tools: Tools, tmp_path: Path) -> None:
    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=False) if text.isprintable() else json.dumps(text)

    path = tmp_path / "mine.yaml"
    # A recipe with a control character is not read; a setting may have some.
    readable = [CONTROL.sub("", text) for text in HOSTILE]
    env = "".join(f"  V{at}: {quoted(text)}\n" for at, text in enumerate(readable))
    path.write_text(
        f'recipe_version: "1"\nname: x\ncontainer: y\ndescription: {quoted("".join(readable))}\n'
        f"defaults: {{host: 127.0.0.1, port: 8000, note: x}}\nenv:\n{env}"
        "command: vllm serve m --host {host} --port {port}\n# <<<< EOT\n\n  # EOT\n",
        encoding="utf-8",
    )
    one = load.load(path)
    settings = {"note": "\n".join(HOSTILE)}
    for text, overlay in (
        (nomad.render(one, settings=settings, extra=HOSTILE), False),
        (nomad.render_overlay(one, extra=HOSTILE), True),
    ):
        spec = tmp_path / "mine.nomad.hcl"
        spec.write_text(text, encoding="utf-8")
        assert process.run([tools.nomad, "fmt", "-check", spec]).stdout == ""
        words = ["-var", "image=i", *(["-var", "overlay={}"] if overlay else [])]
        made = process.run([tools.nomad, "job", "run", "-output", *words, spec])
        (group,) = json.loads(made.stdout)["Job"]["TaskGroups"]
        (task,) = group["Tasks"]
        assert task["Config"]["args"][-len(HOSTILE) :] == list(HOSTILE)
        if overlay:
            # A value that needs the container's shell is not expanded.
            assert {k: v for k, v in task["Env"].items() if k[0] == "V"} == {
                f"V{at}": render.render(one, settings={}, environ={}, solo=False).env[f"V{at}"]
                for at in range(len(HOSTILE))
            }
        else:
            assert task["Config"]["args"][:2] == ["/local/mine.yaml", f"note={settings['note']}"]
            own = task["Templates"][0]
            assert own["EmbeddedTmpl"] == path.read_text(encoding="utf-8")
            assert own["LeftDelim"] not in own["EmbeddedTmpl"]


# What two GB10 have and this machine has not.
ELSEWHERE = {
    '"arm64"': '"amd64"' if platform.machine() == "x86_64" else '"arm64"',
    'value    = "true"': 'value    = "false"',
    "/dev/infiniband": "/dev/null",
    'memlock = "-1"': 'memlock = "65536:65536"',
}


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_second_machine_learns_where_the_first_is(
    agent: Agent, image: str, tmp_path: Path, gpus: int
) -> None:
    path = tmp_path / "cluster.nomad.hcl"
    text = spec(CLUSTER).read_text(encoding="utf-8")
    for there, here in ELSEWHERE.items() if gpus else ():
        assert there in text
        text = text.replace(there, here)
    path.write_text(text, encoding="utf-8")
    words = (*needed(path, image), *SMALL, "-var", f"gpus={gpus}", "-var", "port=18001")
    agent.call("job", "run", "-detach", *words, "-var", "args=timeout 900 sleep 900", path)
    job = CLUSTER if gpus else f"{CLUSTER}-check"

    def environment(group: str, wanted: str) -> str:
        """That of the group's container, once it has ``wanted``; it may be starting again."""
        seen = [""]

        def has() -> bool:
            found = [one["ID"] for one in agent.allocations(job) if one["TaskGroup"] == group]
            if found:
                seen[0] = agent.inside(found[0], "env", check=False)
            return wanted in seen[0]

        agent.wait(f"{wanted} in {group}", LIMIT, has)
        return seen[0]

    environment("rank-0", "SM12X_HOST=127.0.0.1")
    second = environment("rank-1", "SM12X_MASTER_ADDR=127.0.0.1")
    assert "SM12X_HOST=" not in second
    assert "VLLM_HOST_IP=127.0.0.1" in second
    assert "NCCL_SOCKET_IFNAME=lo" in second


def test_a_recipe_of_ones_own_travels_with_the_job(
    agent: Agent, image: str, tmp_path: Path
) -> None:
    text = (layout.recipes() / f"{ONE}.yaml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.yaml"
    mine.write_text(text + "# ${braces} {{ of all }} %{kinds}\n\n# end\n", encoding="utf-8")
    path = tmp_path / "mine.nomad.hcl"
    path.write_text(nomad.render(load.load(mine)), encoding="utf-8")
    assert process.run([agent.tools.nomad, "fmt", "-check", path]).stdout == ""
    words = (*needed(path, image), "-var", "gpus=0", "-var", "args=timeout 900 sleep 900")
    agent.call("job", "run", "-detach", *words, path)
    assert said_inside(agent, "mine-check", "cat", "/local/mine.yaml") == mine.read_text()
