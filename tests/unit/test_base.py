"""base.toml: what is read, and what each fault in it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import lockfile
from sm12x.core.errors import BadFileError, UnknownBaseError
from sm12x.stack.model import base


def _copy(tmp_path: Path, old: str, new: str) -> Path:
    text = (layout.patches() / "0.33.0" / "base.toml").read_text()
    assert old in text
    folder = tmp_path / "0.33.0"
    folder.mkdir()
    path = folder / "base.toml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize("version", base.versions())
def test_every_committed_base_reads(version: str) -> None:
    loaded = base.load(version)
    assert loaded.version == version
    assert set(loaded.wheels) == {"x86_64", "aarch64"} == set(loaded.locks)
    assert all(len(pinned.sha256) == 64 for pinned in (loaded.sdist, *loaded.wheels.values()))


@pytest.mark.parametrize("version", base.versions())
def test_what_the_witnesses_install_is_locked_for_every_machine(version: str) -> None:
    loaded = base.load(version)
    for machine in loaded.locks:
        locked = lockfile.read(loaded.lock_path(machine)).versions
        assert set(loaded.witness.packages) <= set(locked)


def test_an_unknown_base_names_the_nearest() -> None:
    with pytest.raises(UnknownBaseError, match=r"0\.33\.1.*0\.33\.0"):
        base.load("0.33.1")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('python = "3.13"', 'pyton = "3.13"', "pyton .* python .*1"),
        ('python = "3.13"', "", "python is missing"),
        ('python = "3.13"', 'python = "3.13"\npyton = "3.13"', r"pyton .* python"),
        ('python = "3.13"', 'python = "3.13"\nfolder = "/tmp"', ": folder "),
        ('python = "3.13"', "python = 3.13", ": python "),
        ("cpu_seconds = ", "cpu_secnds = ", r"module\[0\].cpu_secnds .* cpu_sec"),
        ('tree = "', "tree = 3\n#", "sdist.tree "),
        ("schema = 1", "schema = 2", ": schema .*2.* 1"),
        ('version = "0.33.0"', 'version = "0.22.0"', "0.22.0.* 0.33.0"),
        ("[wheel.aarch64]", "[wheel.arm]", ": wheel.arm .*x86_64"),
        ("peak_gib = 0.1", 'peak_gib = "a"', r"module\[0\].peak_gib "),
        ("schema = 1", "schema = ", "base.toml"),
        (
            'auto_needs = ["cutlass"]',
            'auto_needs = ["cutlas"]',
            "auto_needs .*cutlas'.*cutlass",
        ),
    ],
)
def test_a_fault_names_its_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(BadFileError, match=said):
        base.parse(_copy(tmp_path, old, new))


def test_what_a_stack_leaves_out_is_read_with_its_reason(tmp_path: Path) -> None:
    text = (
        '\n[[dropped]]\npatch = "0003-x.patch"\nstate = "upstream"\nsince = "0.22.0"\nwhy = "a"\n'
        '\n[[dropped]]\npatch = "0004-y.patch"\nstate = "conflict"\nwhy = "b"\n'
    )
    path = _copy(tmp_path, "[image]\n", "[image]\n")
    path.write_text(path.read_text() + text)
    dropped = base.parse(path).dropped
    assert [(entry.patch, entry.state, entry.since) for entry in dropped] == [
        ("0003-x.patch", "upstream", "0.22.0"),
        ("0004-y.patch", "conflict", ""),
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            'state = "upstream"',
            'state = "gone"',
            r"dropped\[0\]\.state ",
        ),
        ('since = "0.22.0"\n', "", r"dropped\[0\]\.since "),
        ('why = "a"', 'why = "a"\nwhen = "b"', r"dropped\[0\]\.when "),
    ],
)
def test_a_fault_in_what_is_left_out_is_named(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = '[[dropped]]\npatch = "0003-x.patch"\nstate = "upstream"\nsince = "0.22.0"\nwhy = "a"\n'
    path = _copy(tmp_path, "[image]\n", "[image]\n")
    path.write_text(f"{path.read_text()}\n{text.replace(old, new)}")
    with pytest.raises(BadFileError, match=said):
        base.parse(path)


EXTRA = """
[[extra]]
name = "b12x"
requirement = "b12x==1.5.1"
license = "Apache-2.0"
modules = ["b12x"]
why = "kernels"
"""


def _with_extra(tmp_path: Path, text: str) -> Path:
    """A base.toml whose only extra is this."""
    path = _copy(tmp_path, "schema = 1", "schema = 1")
    own = re.sub(r"\[\[extra\]\]\n(?:.+\n)+", "", path.read_text())
    path.write_text(own + text)
    return path


def test_an_extra_is_read(tmp_path: Path) -> None:
    (extra,) = base.parse(_with_extra(tmp_path, EXTRA)).extras
    assert (extra.name, extra.package, extra.license) == ("b12x", "b12x", "Apache-2.0")
    assert extra.modules == ("b12x",)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('name = "b12x"', 'name = "B12_x"', "name"),
        ("b12x==1.5.1", "b12x>=1.5.1", "requirement"),
        ("b12x==1.5.1", "b12x==1.5.*", "requirement"),
        ("b12x==1.5.1", "b12x", "requirement"),
        ("b12x==1.5.1", "b12x==1.5.1,!=2", "requirement"),
        ("b12x==1.5.1", "b12x[dev]==1.5.1", "requirement"),
        ("b12x==1.5.1", "b12x==1; python_version>'3'", "requirement"),
        ("b12x==1.5.1", "b12x ==", "requirement"),
        ('"Apache-2.0"', '" "', "license"),
        ('"kernels"', '""', "why"),
        ('["b12x"]', "[]", "modules"),
        ('modules = ["b12x"]\n', "", "modules"),
        ("license =", "licence =", "licence"),
        ("\nwhy", f"\nwhy = 'a'\n{EXTRA}#", "name"),
    ],
)
def test_a_fault_in_an_extra_names_its_key(tmp_path: Path, old: str, new: str, key: str) -> None:
    text = EXTRA.replace(old, new)
    assert text != EXTRA
    with pytest.raises(BadFileError, match=rf": extra\[[01]\]\.{key} "):
        base.parse(_with_extra(tmp_path, text))


def test_one_file_names_the_default_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert base.default() in base.versions()
    # What `make` builds is what the commands call the default.
    assert "BASE ?= $(shell cat patches/default)\n" in (layout.root() / "Makefile").read_text()
    (tmp_path / "1.2.3").mkdir()
    (tmp_path / "1.2.3" / "base.toml").touch()
    monkeypatch.setattr(layout, "patches", lambda: tmp_path)
    with pytest.raises(BadFileError, match=re.escape(f"{tmp_path / 'default'}")):
        base.default()
    (tmp_path / "default").write_text("9.9.9\n")
    with pytest.raises(BadFileError, match=r"9\.9\.9.*1\.2\.3"):
        base.default()
    (tmp_path / "default").write_text("1.2.3\n")
    assert base.default() == "1.2.3"
