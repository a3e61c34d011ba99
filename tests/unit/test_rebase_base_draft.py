"""base.toml drafted for another release from made-up indexes and sources."""

from __future__ import annotations

import dataclasses
import datetime
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import requests
from urllib3 import HTTPResponse

from sm12x import layout
from sm12x.core import download, files, listing, lockfile, pipconfig
from sm12x.core.errors import FetchError
from sm12x.core.listing import ListedFile
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, Dropped, Override
from sm12x_dev.rebase import base_draft, release_facts
from sm12x_dev.rebase.release_facts import DeclaredSource, ReleaseFacts

VERSION = "9.9.0"
DAY = datetime.datetime(2027, 3, 4, 23, 30, tzinfo=datetime.UTC)


@pytest.fixture
def base() -> Base:
    return bases.load(bases.versions()[0])


def _listed(name: str, kind: str = "wheel", **more: Any) -> ListedFile:
    values: dict[str, Any] = {
        "version": VERSION,
        "sha256": name[-1] * 64,
        "uploaded": DAY,
        "requires_python": ">=3.10",
        "yanked": False,
    }
    return ListedFile(**{**values, "name": name, "kind": kind, **more})


SDIST = _listed(f"vllm-{VERSION}.tar.gz", "sdist")
FIRST = _listed(f"vllm-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl")
SECOND = _listed(f"vllm-{VERSION}-1-cp38-abi3-manylinux_2_28_x86_64.whl", sha256="1" * 64)
ARM = _listed(f"vllm-{VERSION}-cp38-abi3-manylinux_2_28_aarch64.whl")
OTHER = _listed(f"vllm-{VERSION}-cp38-abi3-macosx_11_0_arm64.whl")


def _facts(base: Base, **more: Any) -> ReleaseFacts:
    """The facts of a release in which nothing has changed."""
    values: dict[str, Any] = {
        "build_requires": base.toolchain.build_requires,
        "torch": base.toolchain.torch,
        "cuda": base.toolchain.cuda,
        "targets": tuple(module.target for module in base.modules),
        "sources": tuple(
            DeclaredSource(override=s.override, pins=(s.pin,), git="", file="cmake/x.cmake")
            for s in base.sources
        ),
        "extras": {extra.name: (extra.requirement,) for extra in base.extras},
        "files": frozenset(
            glob.replace("**", "deep").replace("*", "x") for m in base.modules for glob in m.inputs
        ),
    }
    return ReleaseFacts(**{**values, **more})


def _draft(base: Base, now: ReleaseFacts, *, cuda: str | None = None) -> tuple[dict[str, Any], str]:
    found = base_draft.release([OTHER, SECOND, FIRST, ARM, SDIST], VERSION, project="vllm")
    made = base_draft.draft(base, found, now, _facts(base), tree="f" * 40, torch_cuda=cuda)
    return tomllib.loads(made.text()), "\n".join(made.to_check)


def test_a_release_is_its_sdist_and_the_latest_build_of_each_wheel() -> None:
    found = base_draft.release([FIRST, SECOND, OTHER, ARM, SDIST], VERSION, project="vllm")
    assert found.sdist is SDIST
    assert found.wheels == {"x86_64": SECOND, "aarch64": ARM}
    assert found.released == datetime.date(2027, 3, 4)
    undated = [SDIST, _listed(ARM.name, uploaded=None)]
    assert base_draft.release(undated, VERSION, project="vllm").released is None


@pytest.mark.parametrize(
    ("listed", "version", "said"),
    [
        ([SDIST], "9.9.1", "the package index has no 9.9.1 of vllm"),
        ([FIRST], VERSION, "no sdist with a sha256 of vllm 9.9.0"),
        ([_listed(SDIST.name, "sdist", yanked=True)], VERSION, "has no 9.9.0"),
        ([_listed(SDIST.name, "sdist", sha256="")], VERSION, "no sdist with a sha256"),
    ],
)
def test_a_release_that_is_not_there_is_named(
    listed: list[ListedFile], version: str, said: str
) -> None:
    with pytest.raises(FetchError, match=said) as caught:
        base_draft.release(listed, version, project="vllm")
    # The newest that there is, if any.
    usable = any(file.kind == "sdist" and not file.yanked for file in listed)
    assert caught.value.next_step.endswith("such as 9.9.0") is usable


def test_where_nothing_changed_the_draft_is_the_old_base_with_new_files(base: Base) -> None:
    values, check = _draft(base, _facts(base))
    old = tomllib.loads((base.folder / "base.toml").read_text())
    assert values["version"] == VERSION
    assert values["released"] == DAY.date()
    assert values["sdist"] == {"name": SDIST.name, "sha256": SDIST.sha256, "tree": "f" * 40}
    assert values["wheel"]["x86_64"]["name"] == SECOND.name
    for key in ("toolchain", "module", "source", "image", "lock"):
        assert values[key] == old[key]
    assert {line.split(" ")[0].split(":")[0] for line in check.splitlines()} == {"module", "image"}


def test_a_draft_is_a_base_that_reads(base: Base, tmp_path: Path) -> None:
    found = base_draft.release([ARM, SECOND, SDIST], VERSION, project="vllm")
    made = base_draft.draft(
        base, found, _facts(base), _facts(base), tree="f" * 40, torch_cuda="13.1"
    )
    path = tmp_path / VERSION / "base.toml"
    path.parent.mkdir()
    left = [
        Dropped(patch="0003-Wait.patch", state="upstream", since="9.8.0", why='its "witness"'),
        Dropped(patch="0004-Let.patch", state="conflict", since="", why="does not merge"),
    ]
    text = base_draft.amended(
        made.text(), dropped=left, packages=["torch"], upstream=["t.py::test_a"]
    )
    path.write_text(text)
    read = bases.parse(path)
    assert read.toolchain.cuda == "13.1"
    assert list(read.dropped) == left
    assert read.witness.packages == ("torch",)
    assert text.startswith(f"# Everything that is specific to vLLM {VERSION}.")
    # Filling in more twice leaves what was there.
    assert base_draft.amended(text) == text


def test_what_changed_is_taken_over_and_what_is_unclear_is_listed(base: Base) -> None:
    requires = [f"{r}0" if r.startswith("cmake") else r for r in base.toolchain.build_requires]
    first, *others = _facts(base).sources
    gone, kept = others[0], others[1:]
    moved = DeclaredSource(override=first.override, pins=("ab" * 20,), git="", file="a.cmake")
    fresh = DeclaredSource(
        override="NEW_SRC_DIR", pins=("v1", "v2"), git="", file="cmake/new.cmake"
    )
    now = _facts(
        base,
        torch="2.99.0",
        cuda="13.9.9",
        build_requires=(*requires[1:], "setuptools-rust>=1"),
        targets=("_new_C", *(module.target for module in base.modules[1:])),
        sources=(moved, *kept, fresh),
        files=frozenset({"CMakeLists.txt"}),
    )
    values, check = _draft(base, now, cuda="13.9.1")
    assert values["toolchain"]["torch"] == "2.99.0"
    assert values["toolchain"]["cuda"] == "13.9.1"
    assert "torch asks for 13.9.1, the release's image has 13.9.9" in check
    assert "not taken over: setuptools-rust>=1" in check
    assert "the release no longer asks for cmake" in check
    assert base.modules[0].target not in [module["target"] for module in values["module"]]
    assert f"module {base.modules[0].target}: no longer a target" in check
    assert "new targets, not listed, so official: _new_C" in check
    assert f"inputs {base.modules[1].inputs[-1]} matches no file" in check
    names = {source["name"]: source for source in values["source"]}
    assert names[base.sources[0].name]["pin"] == "abababa"
    assert gone.override not in [source["override"] for source in values["source"]]
    assert names["new"] == {
        "name": "new", "pin": "v1", "override": "NEW_SRC_DIR", "stand_in": []
    }  # fmt: skip
    assert "source new: its pin is one of v1, v2 (cmake/new.cmake)" in check


def test_what_neither_index_nor_source_says_is_kept_and_said(base: Base) -> None:
    now = _facts(base, torch=None, cuda=None, build_requires=None)
    sdist = _listed(SDIST.name, "sdist", uploaded=None, requires_python=">=3.99")
    found = base_draft.release([sdist], VERSION, project="vllm")
    made = base_draft.draft(base, found, now, _facts(base), tree="", torch_cuda=None)
    assert made.values["released"] == base.released
    assert made.values["toolchain"]["torch"] == base.toolchain.torch
    check = "\n".join(made.to_check)
    for said in (
        "released: the index gives no upload times",
        "wheel.aarch64: the release has no such wheel",
        f"python: {base.python} is not in what the release asks for, >=3.99",
        "toolchain.torch: not found",
        "toolchain.cuda: not found",
        "toolchain.build_requires: not found",
    ):
        assert said in check


def test_a_machine_without_a_wheel_has_no_lock(base: Base) -> None:
    found = base_draft.release([SECOND, SDIST], VERSION, project="vllm")
    made = base_draft.draft(base, found, _facts(base), _facts(base), tree="", torch_cuda=None)
    assert list(made.values["lock"]) == ["x86_64"]
    assert "lock.aarch64: cannot be made without that wheel; left out" in made.to_check
    # With none at all nobody has looked for wheels.
    found = base_draft.release([SDIST], VERSION, project="vllm")
    made = base_draft.draft(base, found, _facts(base), _facts(base), tree="", torch_cuda=None)
    assert list(made.values["lock"]) == ["x86_64", "aarch64"]


def test_the_witnesses_packages_follow_the_lock() -> None:
    def lock(*pins: str) -> lockfile.Lockfile:
        lines = []
        for pin in pins:
            name, _, via = pin.partition(" ")
            lines.append(f"{name}==1 \\\n    --hash=sha256:{'0' * 64}\n    # via {via or 'vllm'}\n")
        return lockfile.parse("".join(lines))

    old = lock("torch", "nvidia-a torch", "gguf", "triton torch")
    new = lock("torch", "nvidia-b torch", "deep nvidia-b", "triton torch", "server")
    packages, notes = base_draft.witness_packages(["torch", "nvidia-a", "gguf"], old, new)
    # triton was left out on purpose before; what only vllm asks for, nobody knows.
    assert packages == ["deep", "nvidia-b", "torch"]
    assert "left out: nvidia-a, gguf" in notes[0]
    assert notes[1].endswith(": nvidia-b, deep")
    torch = {"torch": "2", "nvidia-b": "1", "nvidia-c": "1", "triton": "3", "nvidia-d": "1"}
    new = lock("torch", "nvidia-b torch", "nvidia-c cuda-toolkit", "triton torch")
    packages, _ = base_draft.witness_packages(["torch"], new, new, torch=torch)
    assert packages == ["nvidia-b", "nvidia-c", "torch"]


def test_facts_are_read_from_a_source(tmp_path: Path) -> None:
    files = {
        "requirements/build/cuda.txt": "# mirrored\ncmake>=3.26.1\ntorch==2.14.0  # pinned\n",
        "docker/Dockerfile": "ARG CUDA_VERSION=13.0.3\nFROM x\nARG CUDA_VERSION\n",
        "CMakeLists.txt": (
            'set(TAG "v4.7.1")\nif(DEFINED ENV{CUT_SRC_DIR})\nendif()\n'
            "# GIT_TAG in a comment\nGIT_REPOSITORY https://example.org/cut.git\n"
            "GIT_TAG ${TAG}\n"
            "define_extension_target(\n  _C\n  DESTINATION vllm\n  LANGUAGE ${VLLM_GPU_LANG})\n"
            "define_extension_target(_rocm_C DESTINATION vllm LANGUAGE HIP)\n"
        ),
        "cmake/external_projects/two.cmake": (
            'if(DEFINED ENV{TWO_SRC_DIR})\nset(T "a")\nset(T "b")\nGIT_TAG ${T}\n'
        ),
        "csrc/core/x.h": "",
        "PKG-INFO": (
            "Metadata-Version: 2.4\nName: vllm\nRequires-Dist: a>=1\n"
            'Provides-Extra: b12x\nRequires-Dist: b12x==1.5.1; extra == "b12x"\n'
            'Provides-Extra: Two_Of\nRequires-Dist: c>=1; extra == "two-of"\n'
            'Requires-Dist: d; extra == "two-of"\nProvides-Extra: none\n\nRequires-Dist: not it\n'
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = release_facts.read(tmp_path)
    assert (found.torch, found.cuda, found.targets) == ("2.14.0", "13.0.3", ("_C",))
    assert [(s.override, s.pins) for s in found.sources] == [
        ("CUT_SRC_DIR", ("v4.7.1",)),
        ("TWO_SRC_DIR", ("a", "b")),
    ]
    assert release_facts.unmatched(["csrc/**", "csrc/*.h", "CMakeLists.txt"], found.files) == [
        "csrc/*.h"
    ]
    assert found.extras == {"b12x": ("b12x==1.5.1",), "two-of": ("c>=1", "d"), "none": ()}
    empty = release_facts.read(tmp_path / "csrc")
    assert empty.extras is None
    assert (empty.torch, empty.cuda, empty.build_requires, empty.targets) == (None, None, None, ())


@pytest.mark.parametrize(
    ("path", "glob", "fits"),
    [
        ("a/b.c", "a/*.c", True),
        ("a/b/c.c", "a/*.c", False),
        ("a/b/c.c", "a/**", True),
        ("a/c.c", "a/**/*.c", True),
        ("a/b/d/c.c", "a/**/*.c", True),
        ("b/c.c", "a/**", False),
        ("a", "a/b", False),
    ],
)
def test_globs(path: str, glob: str, fits: bool) -> None:
    assert files.matches(path, glob) is fits


@pytest.mark.parametrize(
    ("extras", "requirement", "said"),
    [
        ({"b12x": ("b12x==1.5.1",)}, "b12x==1.5.1", ""),
        ({"b12x": ("b12x==1.6",)}, "b12x==1.6", "license and modules are those of b12x==1.5.1"),
        ({"b12x": ("b12x>=1.6",)}, "b12x==1.5.1", "it has no single pin; b12x==1.5.1 is kept"),
        ({"b12x": ("b12x==1.6", "c==1")}, "b12x==1.5.1", "it has no single pin"),
        ({"b12x": ()}, "b12x==1.5.1", "it has no single pin"),
        (None, "b12x==1.5.1", "its metadata is missing; b12x==1.5.1 is kept"),
        ({"other": ()}, None, "the release no longer has it; left out"),
    ],
)
def test_an_extra_follows_the_release(
    extras: dict[str, tuple[str, ...]] | None, requirement: str | None, said: str
) -> None:
    base = bases.load("0.33.0")
    values, check = _draft(base, _facts(base, extras=extras))
    assert [entry["requirement"] for entry in values.get("extra", [])] == (
        [requirement] if requirement else []
    )
    lines = [line for line in check.splitlines() if line.startswith("extra ")]
    assert len(lines) == (1 if said else 0)
    assert said in "".join(lines)


@pytest.mark.parametrize("version", bases.versions())
def test_a_draft_keeps_the_comments_of_its_base(version: str) -> None:
    base = bases.load(version)
    made = base_draft.draft(
        base,
        base_draft.release([SECOND, ARM, SDIST], VERSION, project="vllm"),
        _facts(base),
        _facts(base),
        tree="f" * 40,
        torch_cuda=None,
    )
    text = made.text()
    old = (layout.patches() / version / "base.toml").read_text(encoding="utf-8")
    # What [[override]] says of the old base goes with it.
    old = re.sub(r"\[\[override\]\]\n(?:[^\n]+\n)+", "", old)
    kept = [line for line in old.splitlines()[1:] if line.startswith("#")]
    missing = [line for line in kept if line not in text.splitlines()]
    # Above [[dropped]] and [[override]], which are of the old base.
    assert len(missing) <= 3, missing
    assert text.splitlines()[0].count(VERSION) == 1
    assert "\n\n\n" not in text


def test_overrides_that_are_given_are_written_and_read_again(tmp_path: Path) -> None:
    given = (
        Override(requirement="a==1", instead_of="a>=2", why="there is no 2"),
        Override(
            of="torch", requirement="b>=2", instead_of="b==1", machines=("aarch64",), why="1 hangs"
        ),
    )
    base = bases.load(bases.default())
    found = base_draft.release([SECOND, ARM, SDIST], VERSION, project="vllm")
    facts = _facts(base)
    made = base_draft.draft(
        base, found, facts, facts, tree="f" * 40, torch_cuda=None, overrides=given
    )
    assert base.overrides[0].why not in made.text()
    path = tmp_path / VERSION / "base.toml"
    path.parent.mkdir()
    path.write_text(made.text(), encoding="utf-8")
    assert bases.parse(path).overrides == given
    assert "machines" not in str(made.values["override"][0])


@pytest.mark.parametrize("version", bases.versions())
def test_a_draft_without_wheels_is_read_as_one(version: str, tmp_path: Path) -> None:
    base = bases.load(version)
    made = base_draft.draft(
        base,
        base_draft.release([SDIST], VERSION, project="vllm"),
        _facts(base),
        _facts(base),
        tree="f" * 40,
        torch_cuda=None,
    )
    path = tmp_path / VERSION / "base.toml"
    path.parent.mkdir()
    path.write_text(made.text(), encoding="utf-8")
    assert bases.parse(path).wheels == {}
    assert bases.parse(path).version == VERSION


class _Index(requests.adapters.BaseAdapter):
    def __init__(self, body: str, kind: str, status: int = 200) -> None:
        super().__init__()
        self.reply = (body, kind, status)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> Any:
        body, kind, status = self.reply
        response = requests.Response()
        response.status_code = status
        response.headers["Content-Type"] = kind
        response.raw = HTTPResponse(io.BytesIO(body.encode()), preload_content=False)
        response.url = request.url or ""
        response.request = request
        return response

    def close(self) -> None:
        pass


def _index(monkeypatch: pytest.MonkeyPatch, adapter: _Index) -> None:
    def session(config: pipconfig.PipConfig) -> requests.Session:
        web = requests.Session()
        web.mount("https://", adapter)
        return web

    config = pipconfig.load()
    monkeypatch.setattr(download, "session", session)
    changed = {"indexes": ("https://index.test/simple/",), "ca_bundle": None}
    monkeypatch.setattr(
        pipconfig, "load", lambda: pipconfig.PipConfig(**{**vars(config), **changed})
    )


HTML = (
    '<!DOCTYPE html><html><body><a href="../../f/{name}#sha256={sha}" data-upload-time="{time}" '
    'data-requires-python="&gt;=3.10">{name}</a></body></html>'
)
JSON = (
    '{{"meta":{{"api-version":"1.1"}},"name":"vllm","versions":["9.9.0"],"files":[{{"filename":'
    '"{name}","url":"f/{name}","hashes":{{"sha256":"{sha}"}},"upload-time":"{time}",'
    '"requires-python":">=3.10","size":1}}]}}'
)


@pytest.mark.parametrize(
    ("body", "kind"), [(HTML, "text/html"), (JSON, "application/vnd.pypi.simple.v1+json")]
)
def test_an_index_is_listed_in_either_form(
    body: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = body.format(name=SDIST.name, sha="a" * 64, time="2027-03-04T23:30:00Z")
    _index(monkeypatch, _Index(text, kind))
    (file,) = listing.of_index("vllm")
    assert file == _listed(SDIST.name, "sdist", sha256="a" * 64)
    assert listing.releases((file, FIRST, _listed("x", "sdist", version="9.10.0rc1"))) == ["9.9.0"]


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (_Index("", "text/html", 404), "has no project vllm"),
        (_Index("", "text/html", 403), "vllm"),
        (_Index("%PDF", "application/pdf"), "does not answer as a package index"),
    ],
)
def test_an_index_that_does_not_list_is_an_error(
    adapter: _Index, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _index(monkeypatch, adapter)
    with pytest.raises(FetchError, match=said):
        listing.of_index("vllm")


def test_a_folder_is_listed_with_the_hashes_of_what_is_in_it(tmp_path: Path) -> None:
    for name in (SDIST.name, FIRST.name, "other-1.0.tar.gz", "note.txt"):
        (tmp_path / name).write_text(name)
    found = listing.of_folder("vllm", tmp_path)
    assert [(file.name, file.version, file.uploaded) for file in found] == [
        (FIRST.name, VERSION, None),
        (SDIST.name, VERSION, None),
    ]
    assert len(found[0].sha256) == 64


def test_why_a_base_is_never_built_in_full_is_looked_at_again(base: Base) -> None:
    _, check = _draft(base, _facts(base))
    assert "not_full" not in check
    tools = dataclasses.replace(base.toolchain, not_full="12.1a is dropped")
    _, check = _draft(dataclasses.replace(base, toolchain=tools), _facts(base))
    assert f"toolchain.not_full: the reason is that of {base.version}" in check


def test_what_a_full_build_needs_and_loses_is_looked_at_again() -> None:
    base = bases.load("0.33.0")
    (name,) = base.toolchain.auto_needs
    made, check = _draft(base, _facts(base))
    assert made["toolchain"]["auto_needs"] == [name]
    losing = [module.target for module in base.modules if module.other_gpus]
    assert [line for line in check.splitlines() if "other_gpus" in line] == [
        f"module {target}: other_gpus are those of 0.33.0" for target in losing
    ]
    left = tuple(
        DeclaredSource(override=s.override, pins=(s.pin,), git="", file="cmake/x.cmake")
        for s in base.sources
        if s.name != name
    )
    made, _ = _draft(base, _facts(base, sources=left))
    assert "auto_needs" not in made["toolchain"]


def test_a_patch_that_is_in_is_dropped_no_more_and_all_else_stays() -> None:
    text = (
        '# head\nschema = 1\n\n[[dropped]]\npatch = "0001-A.patch"\nstate = "conflict"\n'
        'why = "[x]"\n\n[[dropped]]\npatch = "0002-B.patch"\nstate = "upstream"\n\n# by hand\n'
        "[witness]\npackages = []\n"
    )
    assert base_draft.without_dropped(text, {"A.patch"}) == text.replace(
        '[[dropped]]\npatch = "0001-A.patch"\nstate = "conflict"\nwhy = "[x]"\n\n', ""
    )
    assert base_draft.without_dropped(text, {"C.patch"}) == text
    assert "dropped" not in base_draft.without_dropped(text, {"A.patch", "B.patch"})
    only = '[[dropped]]\npatch = "0001-A.patch"\n'
    assert base_draft.without_dropped(only, {"A.patch"}) == ""
    assert base_draft.without_dropped(only, ()) == only
