"""What every rendered text gives a server of the machine: ports, mounts, keys, capabilities.

The texts are read as their engines read them, not as they were made. docs/rendered.md is the table
of it; `SM12X_WRITE_GOLDEN=1` writes it anew: read the difference before you commit it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from sm12x import layout
from sm12x.core.errors import UsageError
from sm12x.deploy import local, mounts, nomad
from sm12x.deploy.container import Grants
from sm12x.recipes import load, options, render
from sm12x.recipes.model import Recipe

IMAGE = "vllm-sm12x:0.33.0-01234567"
DOCUMENT = layout.root() / "docs" / "rendered.md"
RECIPES = load.load_all(layout.recipes())
TARGETS = ("docker", "compose", "llama-swap", "nomad", "nomad-overlay", "shell")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One container, or one process of a shell, as its text has it."""

    address: str
    mounts: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    values: tuple[str, ...] = field(default=(), compare=False)
    dropped: str = "all of the user's stay"
    privileges: str = "as the user"
    shm: str = "the host's"
    devices: tuple[str, ...] = ()
    ipc: str = ""


def text_of(target: str, one: Recipe, grants: Grants | None = None) -> str:
    settings = {"master_addr": "10.0.0.1"} if "master_addr" in one.defaults else {}
    if one.defaults.get("revision") == "":
        settings["revision"] = COMMIT
    peers = load.pool(one)
    if target == "nomad":
        return nomad.render(one, peers=peers, image=IMAGE, settings=settings)
    if target == "nomad-overlay":
        return nomad.render_overlay(one, image=IMAGE, settings=settings)
    if target == "llama-swap":
        return local.llama_swap(
            one,
            image=IMAGE,
            settings={} if peers else settings,
            extra=(),
            peers=peers,
            grants=grants,
        )
    made = {"docker": local.docker, "compose": local.compose, "shell": local.shell}[target]
    text: str = made(one, image=IMAGE, settings=settings, extra=(), grants=grants)
    return text


def served_host(one: Recipe, words: list[str]) -> str:
    """The address that a server listens on by these words after the image's name."""
    given = dict(word.split("=", 1) for word in words if "=" in word and word[0] != "-")
    last = options.parse(words[words.index("--") :] if "--" in words else ())
    return last.get("host", given.get("host", str(one.defaults.get("host", ""))))


def of_docker(one: Recipe, text: str) -> Iterator[Seen]:
    lines = shlex.split(text.replace("\\\n", " "), comments=True)
    starts = [at for at, word in enumerate(lines) if lines[at : at + 2] == ["docker", "run"]]
    for start, end in itertools.pairwise((*starts, len(lines))):
        words = lines[start + 2 : end]
        at = words.index(IMAGE)
        given: dict[str, list[str]] = {}
        for name, value in itertools.pairwise(words[:at]):
            if name.startswith("-"):
                given.setdefault(name, []).append(value)
        env = given.get("-e", [])
        ports = given.get("-p", [])
        before = lines[:start]
        yield Seen(
            address=ports[0] if ports else f"{served_host(one, words[at + 1 :])} (host's network)",
            mounts=tuple(given.get("-v", [])),
            env=tuple(word.partition("=")[0] for word in env),
            values=tuple(word for word in env if "=" in word),
            needed=tuple(
                word.split("=")[0]
                for name, word in itertools.pairwise(before)
                if name == "export" and word.split("=")[0] in env
            ),
            dropped=" ".join(given.get("--cap-drop", ["none"])).lower(),
            privileges=" ".join(given.get("--security-opt", ["may be gained"])),
            shm=" ".join(given.get("--shm-size", ["64m"])),
            devices=tuple(given.get("--device", [])),
            ipc=" ".join(given.get("--ipc", [])),
        )


def of_compose(one: Recipe, text: str) -> Iterator[Seen]:
    for service in yaml.safe_load(text)["services"].values():
        env = service["environment"]
        ports = service.get("ports", [])
        asked = {word.split("=", 1)[0]: word for word in env if ":?" in word}
        yield Seen(
            address=ports[0]
            if ports
            else f"{served_host(one, service['command'])} (host's network)",
            mounts=tuple(service["volumes"]),
            env=tuple(word.partition("=")[0] for word in env),
            values=tuple(word for word in env if "=" in word and word not in asked.values()),
            needed=tuple(dict.fromkeys(asked)),
            dropped=" ".join(service["cap_drop"]).lower(),
            privileges=" ".join(service["security_opt"]).removesuffix(":true"),
            shm=service["shm_size"],
            devices=tuple(service.get("devices", [])),
            ipc=service.get("ipc", ""),
        )


def of_llama_swap(one: Recipe, text: str) -> Iterator[Seen]:
    for name, model in yaml.safe_load(text)["models"].items():
        served = next(
            (peer for peer in load.pool(one) if peer.defaults["served_model_name"] == name), one
        )
        yield from of_docker(served, model["cmd"])


def of_nomad(text: str) -> Iterator[Seen]:
    secrets = re.findall(r"(\w+)=\{\{ ?\.", text)
    for group in re.split(r'\n  group "', text)[1:]:
        host = re.search(r'SM12X_HOST += "\$\{(\w+)\}"|"(?:--host=)?\$\{(NOMAD_IP_\w+)\}"', text)
        found = dict(
            re.findall(r'(?m)^ +(\w+) += "(\$\{meta\.\w+\}|\$\{NOMAD_IP_(?:link|master)\})"', group)
        )
        mounts = re.findall(
            r'volume_mount \{\s+volume += "(\w+)"\s+destination = "([^"]+)"(\s+read_only += true)?',
            group,
        )
        needed = re.search(r"error_on_missing_key = true", group)
        assert host
        shm = re.search(r"shm_size +=( \d+)", group)
        drop = re.search(r"cap_drop +=(.*)", group)
        options_ = re.search(r"security_opt +=(.*)", group)
        assert shm
        assert drop
        assert options_
        yield Seen(
            address=f"{host[1] or host[2]} (host's network)",
            mounts=tuple(
                f"{volume_name(text, name)}:{place}{':ro' if only else ''}"
                for name, place, only in mounts
            ),
            env=tuple(dict.fromkeys((*secrets, *found))),
            needed=("VLLM_API_KEY",) if needed else (),
            dropped=" ".join(json.loads(drop[1])),
            privileges=" ".join(json.loads(options_[1])),
            shm=f"{int(shm[1]) >> 30}g",
            devices=("/dev/infiniband",) if "/dev/infiniband" in group else (),
            ipc="host" if "ipc_mode" in group else "",
        )


def volume_name(text: str, name: str) -> str:
    found = re.search(rf'variable "{name}_volume" .*?default +=( "[^"]+")', text, re.DOTALL)
    assert found
    return str(json.loads(found[1]))


def of_shell(one: Recipe, text: str) -> Iterator[Seen]:
    words = shlex.split(text, comments=True)
    hosts = [words[at + 1] for at, word in enumerate(words) if word == "--host"]
    hosts += [word.removeprefix("host=") for word in words if word.startswith("host=")]
    yield Seen(address=" ".join(dict.fromkeys(hosts)))


def seen(target: str, one: Recipe, grants: Grants | None = None) -> list[Seen]:
    text = text_of(target, one, grants)
    readers = {
        "docker": of_docker,
        "compose": of_compose,
        "llama-swap": of_llama_swap,
        "shell": of_shell,
    }
    return list(readers[target](one, text) if target in readers else of_nomad(text))


def sleeps(one: Recipe) -> bool:
    return any(
        "enable-sleep-routes" in options.parse(render.arguments(part))
        for part in load.pool(one) or [one]
    )


def remote(one: Recipe) -> bool:
    return any(
        "trust-remote-code" in options.parse(render.arguments(part))
        for part in load.pool(one) or [one]
    )


CASES = [(target, key) for key in RECIPES for target in TARGETS]


@pytest.mark.parametrize(("target", "key"), CASES)
def test_a_rendered_recipe_opens_nothing(target: str, key: str) -> None:
    one = RECIPES[key]
    try:
        containers = seen(target, one)
    except UsageError:
        # Several machines in llama-swap, a pool in an overlay, Ray in Nomad.
        return
    assert containers
    for found in containers:
        if target == "shell":
            assert found.address in ("127.0.0.1", "::1"), found
            continue
        # Clients reach it on the loopback, in Nomad on the address of its private network.
        assert re.match(r"127\.0\.0\.1(:| \()|NOMAD_IP_", found.address), found
        assert "VLLM_API_KEY" in found.env
        pool = bool(one.sm12x and one.sm12x.pool) and target != "llama-swap"
        assert ("VLLM_SLEEP_API_KEY" in found.env) == (sleeps(one) and not pool)
        assert ("SM12X_POOL_ADMIN_KEY" in found.env) == pool
        # By name: the value is in the environment of who starts it.
        assert not [one for one in found.values if re.search("KEY|TOKEN", one)]
        assert found.dropped == "all"
        assert found.privileges == "no-new-privileges"
        assert (found.shm, found.ipc) == ("16g", "")
        # Caches, and folders of models which are only read.
        volume, *models = found.mounts
        wanted = "sm12x-cache-other" if remote(one) else "sm12x-cache"
        if target == "nomad-overlay":
            wanted = "sm12x-cache-foreign"
        if target != "llama-swap":
            assert volume.split(":")[0] == wanted
        if not target.startswith("nomad"):
            assert all(re.fullmatch(r"(/models/[\w.-]+):\1:ro", mount) for mount in models)
            if target != "llama-swap":
                assert ("HF_TOKEN" in found.env) <= (not remote(one))
        if target == "nomad":
            assert ("VLLM_API_KEY" in found.needed) == sleeps(one)
        if one.sm12x and one.sm12x.machines > 1:
            assert {"VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= {
                *found.needed,
                *(found.env if target == "nomad" else ()),
            }


@pytest.mark.parametrize("target", ["docker", "compose"])
@pytest.mark.parametrize("key", list(RECIPES))
def test_an_address_that_others_reach_needs_the_key(target: str, key: str) -> None:
    for found in seen(target, RECIPES[key], Grants(publish="192.168.1.5")):
        assert found.address.startswith("192.168.1.5")
        assert "VLLM_API_KEY" in found.needed
        assert "VLLM_API_KEY" in found.env


def table() -> str:
    """Recipes whose texts give the same are one row."""
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for target, key in CASES:
        try:
            containers = seen(target, RECIPES[key])
        except UsageError:
            continue
        for found in dict.fromkeys(replace(one, values=()) for one in containers):
            env = [f"**{name}**" if name in found.needed else name for name in found.env]
            cells: tuple[str, ...] = (
                re.sub(r"\d{4}", "PORT", found.address),
                "<br>".join(found.mounts) or "-",
                "<br>".join(env) or "those of the user",
                f"dropped: {found.dropped}; {found.privileges}",
                "<br>".join((found.shm, *found.devices)),
            )
            cells = tuple(re.sub(r"/models/[\w.-]+", "/models/NAME", cell) for cell in cells)
            rows.setdefault(cells, {}).setdefault(target, []).append(key)
    lines = []
    for cells, targets in rows.items():
        keys = ["; ".join(dict.fromkeys(names)) for names in targets.values()]
        for target, names in zip(targets, keys, strict=True):
            lines.append((target, names, cells))
    made = [HEAD]
    for target in TARGETS:
        made += [f"\n## {target}\n", COLUMNS]
        made += [
            f"| {' | '.join((*cells, names))} |" for kind, names, cells in lines if kind == target
        ]
    return "\n".join(made) + "\n"


HEAD = """\
# Rendered texts

What the text of each recipe gives its server: where clients reach it, what of the machine it sees
and which variables it gets. `SM12X_WRITE_GOLDEN=1 pytest tests/unit/test_rendered.py` writes this
from the texts themselves, and every test run compares it with them. A text names variables; their
values are in the environment of who starts it. It does not start without those in **bold**. PORT is
the recipe's. podman takes the words of docker.

`sm12x recipe render --publish ADDRESS` serves other machines, and then needs VLLM_API_KEY; `--pass
NAME` passes a further variable; `--cache VOLUME` names another cache."""
COLUMNS = """\
| clients reach it at | mounts | variables | capabilities | /dev/shm, devices | recipes |
| --- | --- | --- | --- | --- | --- |"""


def test_the_table_of_the_documents_is_what_the_texts_give() -> None:
    made = table()
    if os.environ.get("SM12X_WRITE_GOLDEN"):
        DOCUMENT.write_text(made)
    assert made == DOCUMENT.read_text()


# A stranger's recipe: each is refused, or cannot get what it asks for.
STRANGER = """\
recipe_version: "1"
name: strange
container: vllm-sm12x
model: some/Model
defaults: {host: 127.0.0.1, port: 8000, model: %s}
command: vllm serve {model} --host {host} --port {port}
"""


def stranger(folder: Path, model: str = "some/Model", **changes: str) -> Recipe:
    path = folder / "strange.yaml"
    text = STRANGER % json.dumps(model)
    for key, value in changes.items():
        text = re.sub(rf"(?m)^{key}: .*", f"{key}: {value}", text)
    path.write_text(text)
    return load.load(path)


FORBIDDEN = (
    *(
        "/",
        "//",
        "/etc",
        "/etc/ssh",
        "/var",
        "/var/run",
        "/var/run/m",
        "/run/docker.sock",
        "/proc/1",
    ),
    *("/sys/fs", "/dev/disk", "/root", "/root/.ssh", "/home", "/home/alice", "/home/alice/.ssh"),
    *("/home/alice/.cache/huggingface", "/models/../etc", "/models/./../root", "/x/../../etc"),
    *(
        "/var/lib/docker/volumes",
        "/boot",
        "/usr",
        "/opt",
        "/srv",
        "/cache/../etc/x",
        "/var/spool/m",
    ),
    *("/models/x:/host", "/m:/etc:rw,z"),
)


@pytest.mark.parametrize("target", ["docker", "compose", "llama-swap"])
@pytest.mark.parametrize("model", FORBIDDEN)
@pytest.mark.parametrize("image", [IMAGE, "quay.io/evil/vllm:1"])
def test_a_recipe_chooses_no_mount(tmp_path: Path, target: str, model: str, image: str) -> None:
    one = stranger(tmp_path, model)
    made = {"docker": local.docker, "compose": local.compose, "llama-swap": local.llama_swap}
    with pytest.raises(UsageError, match=r"not mounted|cannot be mounted"):
        made[target](one, image=image, settings={}, extra=())


def test_a_link_does_not_lead_into_a_system_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").symlink_to("/etc")
    (tmp_path / "deep").symlink_to(tmp_path / "m")
    for name in ("a\nb", "\x1b]52;c;eA==\x07", "a\u202eb"):
        with pytest.raises(UsageError, match="cannot be mounted"):
            mounts.of_model(f"{tmp_path}/{name}")
    for name in ("m", "deep", "m/ssh"):
        with pytest.raises(UsageError, match="through a link to /etc"):
            mounts.of_model(f"{tmp_path}/{name}")
    # Nor does the home of who renders, by any name.
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    for path in (home, home / ".ssh", home / ".ssh" / "x"):
        with pytest.raises(UsageError, match="home"):
            mounts.of_model(str(path))
    # What is linked is what is mounted.
    (home / "m").mkdir()
    (home / "link").symlink_to("m")
    assert str(mounts.of_model(f"{home}/link")) == f"{home}/m:{home}/link:ro"


def test_the_models_folder_alone_is_mounted(tmp_path: Path) -> None:
    text = local.docker(stranger(tmp_path, "/data/models/m"), image=IMAGE, settings={}, extra=())
    assert "-v /data/models/m:/data/models/m:ro" in text
    assert "# Mounts sm12x-cache-other (written), /data/models/m (read only)," in text
    # Snapshots of the Hub's cache link to files two folders up.
    hub = "/home/a/.cache/huggingface/hub/models--o--m"
    text = local.docker(
        stranger(tmp_path, f"{hub}/snapshots/{COMMIT}"), image=IMAGE, settings={}, extra=()
    )
    assert f"-v {hub}:{hub}:ro" in text


@pytest.mark.parametrize("image", [IMAGE, "quay.io/evil/vllm:1"])
def test_the_address_is_that_of_the_command(tmp_path: Path, image: str) -> None:
    """Settings that say loopback, and a command that listens everywhere."""
    hard = "vllm serve some/Model --host 0.0.0.0 --port 8000"
    for command in (hard, f"sleep 0 && {hard}", "nc -l 0.0.0.0", "vllm serve some/Model"):
        one = stranger(tmp_path, command=command)
        text = local.docker(one, image=image, settings={}, extra=())
        assert "--network host" not in text
        assert "-p 127.0.0.1:8000:8000" in text
        assert "network_mode" not in local.compose(one, image=image, settings={}, extra=())
        shell = local.shell(one, image=image, settings={}, extra=())
        assert command == "nc -l 0.0.0.0" or "export VLLM_API_KEY=" in shell
    # A setting that the command uses is given the container's own addresses.
    one = stranger(tmp_path)
    assert "host=0.0.0.0" in local.docker(one, image=IMAGE, settings={}, extra=())
    # Sleep routes in a container need a key, as the image's entry point says as well.
    one = stranger(tmp_path, command="vllm serve x/y --host {host} --enable-sleep-routes")
    assert "export VLLM_API_KEY=" in local.docker(one, image=IMAGE, settings={}, extra=())
    assert "export" not in local.llama_swap(one, image=IMAGE, settings={}, extra=())


def test_an_image_of_others_gets_no_token_and_no_cache_of_ours(tmp_path: Path) -> None:
    # A registry of his own does not make it ours.
    disguised = stranger(tmp_path, container="quay.io/evil/vllm-sm12x:1")
    text = local.docker(disguised, image="", settings={}, extra=())
    assert "-v sm12x-cache-foreign:/root" in text
    one = stranger(tmp_path, container="quay.io/evil/vllm:1")
    (found,) = of_docker(one, local.docker(one, image=IMAGE, settings={}, extra=()))
    assert found.mounts[0] == "sm12x-cache-other:/cache"
    assert "HF_TOKEN" not in found.env
    text = local.docker(one, image="", settings={}, extra=())
    assert "-e HF_TOKEN" not in text
    assert "-v sm12x-cache-foreign:/root/.cache/huggingface" in text
    assert "$HOME" not in text
    text = local.docker(
        one, image="", settings={}, extra=(), grants=Grants(passed=("HF_TOKEN",), cache="~/hf")
    )
    assert "-e HF_TOKEN" in text
    assert '-v "$HOME/hf:/root/.cache/huggingface"' in text


@pytest.mark.parametrize(
    "image",
    [
        "-v=/:/host",
        "a b",
        "--privileged",
        "a\tb",
        "$(id)",
        "`id`",
        "a;id",
        "\x1b[2J",
        "a\u202eb",
        "é",
    ],
)
def test_an_image_is_one_plain_word(tmp_path: Path, image: str) -> None:
    path = tmp_path / "strange.yaml"
    path.write_text(
        (STRANGER % '"m"').replace("container: vllm-sm12x", f"container: {json.dumps(image)}")
    )
    assert load.inspect(path)[1]


@pytest.mark.parametrize("target", ["docker", "compose", "shell", "llama-swap"])
def test_names_carry_no_escapes_into_a_text(tmp_path: Path, target: str) -> None:
    escape = "\x1b]52;c;ZXZpbA==\x07\u202e\x9b2J name\nrm -rf /"
    # Reading a file may refuse these; rendering does not rely on it.
    one = replace(
        stranger(tmp_path), name=escape, description=escape, mods=(escape,), env={"A": escape}
    )
    made = {"docker": local.docker, "compose": local.compose, "shell": local.shell}
    if target == "llama-swap":
        text = local.llama_swap(one, image=IMAGE, settings={}, extra=())
    else:
        text = made[target](one, image=IMAGE, settings={}, extra=())
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert all(line.isprintable() for line in comments)
    # In a shell's text the value of a variable is one word.
    assert "rm" not in shlex.split(text, comments=True)


def test_a_bomb_of_aliases_is_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    assert load.inspect(path)[0] is None
    path.write_text("a: " + "[" * 20_000)
    assert load.inspect(path)[0] is None
    path.write_text("a: &a [*a]\n")
    assert load.inspect(path)[0] is None


@pytest.mark.parametrize(
    "grants",
    [
        {"publish": "0.0.0.0:1:2"},
        {"publish": "eth0"},
        {"publish": ""},
        {"passed": ("A=b",)},
        {"passed": ("-v",)},
        {"cache": "/:/host"},
        {"cache": "a b"},
        {"cache": "-v"},
        {"cache": "$HOME"},
    ],
)
def test_a_grant_is_no_option(grants: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Grants(**grants)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "repository"),
    [
        ("", ""),
        ("--trust-remote-code", "some/Model"),
        ("--trust_remote_code", "some/Model"),
        ("--trust-remote", "some/Model"),
        ("--trust-remote-code --revision main", "some/Model"),
        (f"--trust-remote-code --revision {COMMIT}", ""),
        (f"--trust-remote-code --revision={COMMIT}", ""),
        (
            f"--trust-remote-code --revision {COMMIT} --speculative-config "
            '\'{"model": "other/Draft"}\'',
            "other/Draft",
        ),
        (
            f"--trust-remote-code --revision {COMMIT} --speculative-config.model other/Draft",
            "other/Draft",
        ),
        (f"--trust-remote-code --revision {COMMIT} --speculative-config '[1'", "a draft model"),
    ],
)
def test_code_of_a_repository_needs_its_commit(flags: str, repository: str) -> None:
    words = shlex.split(f"some/Model {flags}")
    found = render.unpinned_code(words)
    assert found.startswith(repository) if repository else not found
    assert (
        not render.unpinned_code(shlex.split(f"/models/m {flags}"))
        or "Draft" in flags
        or "[" in flags
    )


def test_a_pin_is_the_commit_of_the_code_too() -> None:
    pinned = [one for one in RECIPES.values() if remote(one) and one.model_revision]
    assert len(pinned) == 3
    for one in pinned:
        given = options.parse(render.arguments(one))
        assert given["revision"] == given["code-revision"] == one.model_revision
        assert re.fullmatch("[0-9a-f]{40}", one.model_revision)
