"""base.toml drafted for another release from made-up indexes and sources."""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm12x.core import lockfile
from sm12x.core.errors import FetchError
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, Dropped, Override
from sm12x_dev import base_draft
from sm12x_dev.base_draft import Draft, SourceFacts
from sm12x_dev.listing import ListedFile

VERSION = "9.9.0"
DAY = datetime.datetime(2027, 3, 4, 23, 30, tzinfo=datetime.UTC)


@pytest.fixture
def base() -> Base:
    return bases.load(bases.default())


def _listed(name: str, kind: str = "wheel", **more: Any) -> ListedFile:
    values: dict[str, Any] = {"sha256": name[-1] * 64, "uploaded": DAY, "yanked": False}
    return ListedFile(**{**values, "version": VERSION, "name": name, "kind": kind, **more})


SDIST = _listed(f"vllm-{VERSION}.tar.gz", "sdist")
FIRST = _listed(f"vllm-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl")
SECOND = _listed(f"vllm-{VERSION}-1-cp38-abi3-manylinux_2_28_x86_64.whl", sha256="1" * 64)
ARM = _listed(f"vllm-{VERSION}-cp38-abi3-manylinux_2_28_aarch64.whl")
OTHER = _listed(f"vllm-{VERSION}-cp38-abi3-macosx_11_0_arm64.whl")


def _facts(base: Base) -> SourceFacts:
    """The facts of a release in which nothing has changed."""
    requires = base.toolchain.build_requires
    return SourceFacts(
        requires={base_draft._name(text): text for text in requires},
        torch=base.toolchain.torch,
        cuda=base.toolchain.cuda,
        targets=tuple(module.target for module in base.modules),
        pins={source.override: (source.pin,) for source in base.sources},
        files=frozenset(
            glob.replace("**", "deep").replace("*", "x") for m in base.modules for glob in m.inputs
        ),
    )


def _draft(
    base: Base,
    now: SourceFacts,
    *listed: ListedFile,
    overrides: tuple[Override, ...] = (),
) -> tuple[Draft, dict[str, Any]]:
    files = listed or (OTHER, SECOND, FIRST, ARM, SDIST)
    release = base_draft.release(files, VERSION, project="vllm")
    draft = base_draft.draft(base, release, now, _facts(base), tree="f" * 40, overrides=overrides)
    return draft, tomllib.loads(draft.text)


def _parsed(text: str, folder: Path) -> Base:
    path = folder / VERSION / "base.toml"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    return bases.parse(path)


def test_a_release_is_its_sdist_and_the_latest_build_of_each_wheel() -> None:
    release = base_draft.release([FIRST, SECOND, OTHER, ARM, SDIST], VERSION, project="vllm")
    assert release.sdist is SDIST
    assert release.wheels == {"x86_64": SECOND, "aarch64": ARM}
    assert release.released == datetime.date(2027, 3, 4)
    undated = [SDIST, replace(ARM, uploaded=None)]
    assert base_draft.release(undated, VERSION, project="vllm").released is None
    day = datetime.date(2027, 5, 6)
    assert base_draft.release(undated, VERSION, project="vllm", released=day).released == day


@pytest.mark.parametrize(
    ("listed", "version", "newest"),
    [
        ([SDIST], "9.9.1", VERSION),
        ([FIRST], VERSION, "none"),
        ([replace(SDIST, yanked=True)], VERSION, "none"),
        ([replace(SDIST, sha256="")], VERSION, VERSION),
    ],
)
def test_a_release_that_is_not_there_is_an_error(
    listed: list[ListedFile], version: str, newest: str
) -> None:
    with pytest.raises(FetchError) as caught:
        base_draft.release(listed, version, project="vllm")
    assert version in caught.value.message
    assert newest in caught.value.next_step


def test_where_nothing_changed_the_draft_is_the_old_base_with_new_files(
    base: Base, tmp_path: Path
) -> None:
    draft, values = _draft(base, _facts(base))
    text = (base.folder / "base.toml").read_text()
    old = tomllib.loads(text)
    assert (values["version"], values["released"]) == (VERSION, DAY.date())
    assert values["sdist"] == {"name": SDIST.name, "sha256": SDIST.sha256, "tree": "f" * 40}
    assert values["wheel"]["x86_64"]["name"] == SECOND.name
    for key in ("toolchain", "module", "source", "image", "lock"):
        assert values[key] == old[key]
    # Of its release alone.
    assert not {"dropped", "override"} & values.keys()
    assert not {"upstream", "needed"} & values["witness"].keys()
    assert _parsed(draft.text, tmp_path).version == VERSION
    comments = [line for line in text.splitlines()[1:] if line.startswith("#")]
    missing = [line for line in comments if line not in draft.text.splitlines()]
    # Above [[dropped]] and [[override]].
    assert len(missing) <= 3, missing
    assert draft.text.splitlines()[0].count(VERSION) == 1


def test_what_is_filled_in_is_read_again(base: Base, tmp_path: Path) -> None:
    overrides = (
        Override(requirement="a==1", instead_of="a>=2", why="there is no 2"),
        Override(
            of="torch", requirement="b>=2", instead_of="b==1", machines=("aarch64",), why="1 hangs"
        ),
    )
    draft, values = _draft(base, _facts(base), overrides=overrides)
    assert "machines" not in values["override"][0]
    dropped = [
        Dropped(patch="0003-Wait.patch", state="upstream", since="9.8.0", why='its "witness"'),
        Dropped(patch="0004-Let.patch", state="conflict", why="does not merge"),
    ]
    text = base_draft.amended(
        draft.text, cuda="13.1", dropped=dropped, packages=["torch"], upstream=["t.py::test_a"]
    )
    read = _parsed(text, tmp_path)
    assert read.overrides == overrides
    assert list(read.dropped) == dropped
    assert read.toolchain.cuda == "13.1"
    assert (read.witness.packages, read.witness.upstream) == (("torch",), ("t.py::test_a",))
    # Filling in more twice leaves what was there.
    assert base_draft.amended(text) == text


def test_what_changed_is_taken_over_and_what_is_unclear_is_listed(base: Base) -> None:
    same = _facts(base)
    cmake = next(name for name in same.requires if name.startswith("cmake"))
    requires = {name: f"{text}0" for name, text in same.requires.items() if name != cmake}
    first, gone = base.sources[0], base.sources[1]
    pins = {key: value for key, value in same.pins.items() if key != gone.override}
    now = replace(
        same,
        torch="2.99.0",
        cuda="13.9.9",
        requires={**requires, "setuptools-rust": "setuptools-rust>=1"},
        targets=("_new_C", *same.targets[1:]),
        pins={**pins, first.override: ("ab" * 20,), "NEW_SRC_DIR": ("v1", "v2")},
        files=frozenset({"CMakeLists.txt"}),
    )
    draft, values = _draft(base, now)
    check = "\n".join(draft.to_check)
    tools = values["toolchain"]
    assert (tools["torch"], tools["cuda"]) == ("2.99.0", "13.9.9")
    assert f"torch=={base.toolchain.torch}0" in tools["build_requires"]
    assert base.modules[0].target not in [module["target"] for module in values["module"]]
    sources = {source["name"]: source for source in values["source"]}
    assert sources[first.name]["pin"] == "abababa"
    assert gone.name not in sources
    for fact in (
        "setuptools-rust>=1",
        f"ask for {cmake}",
        f"module {base.modules[0].target}",
        "_new_C",
        f"inputs {base.modules[1].inputs[-1]}",
        f"source {gone.name}",
        "NEW_SRC_DIR",
    ):
        assert fact in check


def test_what_neither_index_nor_source_has_is_kept_and_listed(base: Base) -> None:
    now = replace(_facts(base), torch=None, cuda=None, requires={})
    draft, values = _draft(base, now, replace(SDIST, uploaded=None))
    assert values["released"] == base.released
    assert values["toolchain"]["torch"] == base.toolchain.torch
    assert values["wheel"]["x86_64"]["name"] == base.wheels["x86_64"].name
    keys = {line.split(":")[0] for line in draft.to_check}
    assert {
        *("released", "wheel.x86_64", "wheel.aarch64"),
        *("toolchain.torch", "toolchain.cuda", "toolchain.build_requires"),
    } <= keys


def test_a_machine_without_a_wheel_has_no_lock(base: Base) -> None:
    draft, values = _draft(base, _facts(base), SECOND, SDIST)
    assert list(values["wheel"]) == list(values["lock"]) == ["x86_64"]
    assert "wheel.aarch64" in {line.split(":")[0] for line in draft.to_check}


def test_a_source_that_is_gone_is_not_needed_for_a_full_build(base: Base) -> None:
    (name,) = base.toolchain.auto_needs
    override = next(source.override for source in base.sources if source.name == name)
    pins = {key: value for key, value in _facts(base).pins.items() if key != override}
    _, values = _draft(base, replace(_facts(base), pins=pins))
    assert values["toolchain"]["auto_needs"] == []


def test_the_witnesses_packages_follow_the_lock() -> None:
    def lock(*pins: str) -> lockfile.Lockfile:
        lines = []
        for pin in pins:
            name, _, via = pin.partition(" ")
            lines.append(f"{name}==1 \\\n    --hash=sha256:{'0' * 64}\n    # via {via or 'vllm'}\n")
        return lockfile.parse("".join(lines))

    old = lock("torch", "nvidia-a torch", "gguf", "triton torch")
    new = lock("torch", "nvidia-b torch", "deep nvidia-b", "triton torch", "server")
    packages = base_draft.witness_packages(["torch", "nvidia-a", "gguf"], old, new, ())
    # triton was left out on purpose before; `server` is of vllm alone.
    assert packages == ["deep", "nvidia-b", "torch"]
    torch = {"torch": "2", "nvidia-b": "1", "nvidia-c": "1", "triton": "3", "nvidia-d": "1"}
    new = lock("torch", "nvidia-b torch", "nvidia-c cuda-toolkit", "triton torch")
    packages = base_draft.witness_packages(["torch"], new, new, torch)
    assert packages == ["nvidia-b", "nvidia-c", "torch"]


def test_facts_are_read_from_a_source(tmp_path: Path) -> None:
    texts = {
        "requirements/build/cuda.txt": "# mirrored\ncmake>=3.26.1\ntorch==2.14.0  # pinned\n",
        "docker/Dockerfile": "ARG CUDA_VERSION=13.0.3\nFROM x\nARG CUDA_VERSION\n",
        "CMakeLists.txt": (
            'set(TAG "v4.7.1")\nif(DEFINED ENV{CUT_SRC_DIR})\nendif()\n'
            "# GIT_TAG in a comment\nGIT_TAG ${TAG}\n"
            "define_extension_target(\n  _C\n  DESTINATION vllm\n  LANGUAGE ${VLLM_GPU_LANG})\n"
            "define_extension_target(_rocm_C DESTINATION vllm LANGUAGE HIP)\n"
        ),
        "cmake/external_projects/two.cmake": (
            'if(DEFINED ENV{TWO_SRC_DIR})\nset(T "a")\nset(T "b")\nGIT_TAG ${T}\n'
        ),
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = SourceFacts.read(tmp_path)
    assert (facts.torch, facts.cuda, facts.targets) == ("2.14.0", "13.0.3", ("_C",))
    assert facts.requires == {"cmake": "cmake>=3.26.1", "torch": "torch==2.14.0"}
    assert facts.pins == {"CUT_SRC_DIR": ("v4.7.1",), "TWO_SRC_DIR": ("a", "b")}
    assert facts.files == texts.keys()
    empty = SourceFacts.read(tmp_path / "docker")
    assert (empty.torch, empty.cuda, empty.requires, empty.targets) == (None, None, {}, ())
