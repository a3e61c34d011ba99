"""The newest release against the bases: versions, wheels and the report; no index is asked."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sm12x.core import declared
from sm12x.core.errors import FetchError
from sm12x.core.listing import SDIST, WHEEL, ListedFile
from sm12x.stack.model import base as bases
from sm12x_dev.rebase import newest, status
from sm12x_dev.rebase.newest import NewestReport, PatchTrial
from sm12x_dev.rebase.status import RebaseOutcome

LAST = bases.versions()[-1]
KNOWN = [bases.load(version) for version in bases.versions()]
UPLOADED = datetime.datetime(2027, 1, 2, tzinfo=datetime.UTC)


def listed(name: str, **more: object) -> ListedFile:
    version = name.split("-")[1].removesuffix(".tar.gz")
    settings: dict[str, object] = {
        "name": name,
        "version": version,
        "kind": SDIST if name.endswith(".gz") else WHEEL,
        "sha256": "a" * 64,
        "uploaded": UPLOADED,
        "requires_python": ">=3.11,<3.15",
        "yanked": False,
    }
    return ListedFile(**{**settings, **more})  # type: ignore[arg-type]


def release(version: str, *tags: str) -> list[ListedFile]:
    wheels = tags or ("cp38-abi3-manylinux_2_28_x86_64", "cp38-abi3-manylinux_2_28_aarch64")
    return [
        listed(f"vllm-{version}.tar.gz"),
        *(listed(f"vllm-{version}-{tag}.whl") for tag in wheels),
    ]


def compared(files: Sequence[ListedFile], default: str = LAST) -> NewestReport:
    found = newest.find(files, "vllm")
    return newest.compare(files, found, KNOWN, default=default, project="vllm")


def after(number: int) -> list[ListedFile]:
    """That many releases after the newest base."""
    major, minor = LAST.split(".")[:2]
    versions = [f"{major}.{int(minor) + step}.0" for step in range(number + 1)]
    return [file for version in versions for file in release(version)]


@pytest.mark.parametrize(("number", "current"), [(0, True), (1, True), (2, False), (5, False)])
def test_one_release_behind_is_current_and_two_are_not(number: int, current: bool) -> None:
    report = compared(after(number))
    assert (report.default.behind, report.current) == (number, current)
    assert report.default.version == LAST
    assert ("no release is newer" in newest.text(report)) == (number == 0)


def test_an_older_default_counts_from_itself() -> None:
    older = replace(KNOWN[0], version="0.1.0")
    files = [*release(older.version), *after(0)]
    found = newest.find(files, "vllm")
    report = newest.compare(files, found, [older, *KNOWN], default="0.1.0", project="vllm")
    assert [(base.version, base.behind, base.default) for base in report.bases] == [
        (older.version, 1, True),
        (LAST, 0, False),
    ]
    assert report.last.version == LAST


def test_candidates_and_what_was_withdrawn_do_not_count() -> None:
    gone = [replace(file, yanked=True) for file in release("98.0.0")]
    files = [*after(1), *gone, *release("99.0.0rc1")]
    report = compared(files)
    assert report.newest == after(1)[-1].version
    assert report.default.behind == 1


def test_an_index_older_than_the_bases() -> None:
    report = compared(release("0.1.0"))
    assert report.newest == "0.1.0"
    assert report.current
    assert "no release is newer" in newest.text(report)


def test_an_index_without_a_release_is_an_error() -> None:
    with pytest.raises(FetchError, match="no final release of vllm"):
        newest.find(release("99.0.0rc1"), "vllm")


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        ("cp38-abi3-manylinux_2_28_x86_64", True),
        ("cp313-cp313-manylinux_2_28_x86_64", True),
        ("py3-none-manylinux_2_28_x86_64", True),
        ("cp314-cp314-manylinux_2_28_x86_64", False),
        ("cp314-abi3-manylinux_2_28_x86_64", False),
        ("cp313-cp313t-manylinux_2_28_x86_64", False),
        ("cp312-cp312-manylinux_2_28_x86_64", False),
        ("cp38-abi3-macosx_11_0_x86_64", False),
    ],
)
def test_a_wheel_fits_the_python_of_the_newest_base(tag: str, fits: bool) -> None:
    assert KNOWN[-1].python == "3.13"
    report = compared(release("99.0.0", tag))
    assert report.wheels == {
        "x86_64": f"vllm-99.0.0-{tag}.whl" if fits else None,
        "aarch64": None,
    }
    machines = [why.partition(":")[0] for why in report.missing]
    assert machines == (["aarch64"] if fits else ["x86_64", "aarch64"])
    if not fits and "linux" in tag:
        assert f"vllm-99.0.0-{tag}.whl" in report.missing[0]


def test_a_release_for_later_pythons_says_so() -> None:
    files = [replace(file, requires_python=">=3.14") for file in release("99.0.0")]
    report = compared(files)
    assert report.wheels == {"x86_64": None, "aarch64": None}
    assert report.missing[0].startswith("Python 3.13")
    assert ">=3.14" in report.missing[0]
    assert all(why in newest.text(report) for why in report.missing)


def test_a_later_build_of_a_wheel_is_the_one() -> None:
    files = release(
        "99.0.0", "cp38-abi3-manylinux_2_28_x86_64", "1-cp38-abi3-manylinux_2_28_x86_64"
    )
    assert compared(files).wheels["x86_64"] == "vllm-99.0.0-1-cp38-abi3-manylinux_2_28_x86_64.whl"


def test_the_report_as_text_and_as_json() -> None:
    trials = (
        PatchTrial(base=LAST, patch="0001-Keep.patch", text="merges", recorded="needed"),
        PatchTrial(base=LAST, patch="0002-Give.patch", text="conflict", conflicts=("a.py", "b.cu")),
        PatchTrial(
            base=LAST, patch="0003-Know.patch", text="follows", follows=("0002-Give.patch",)
        ),
    )
    report = replace(compared(after(2)), trials=trials)
    text = newest.text(report)
    rows = [line.split() for line in text.splitlines()]
    assert [LAST, "0001-Keep", "merges", "needed"] in rows
    assert [LAST, "0002-Give", "conflict", "-"] in rows
    assert [LAST, "0002:", "a.py,", "b.cu"] in rows
    assert [LAST, "0003:", "waits", "for", "0002"] in rows
    assert not any(row and row[0] == "applies" for row in rows)

    document = json.loads(declared.to_json(report))
    assert (document["schema"], document["current"], document["allowed"]) == (1, False, 1)
    assert document["released"] == "2027-01-02"
    assert document["bases"][-1] == {
        "version": LAST, "released": str(KNOWN[-1].released), "behind": 2, "default": True,
    }  # fmt: skip
    assert [trial["text"] for trial in document["trials"]] == ["merges", "conflict", "follows"]


def test_what_is_recorded_of_a_release_is_found_by_the_patch_without_its_number() -> None:
    outcome = RebaseOutcome(
        patch="0042-A-patch-of-nobody.patch", base=LAST, release="99.0.0", verdict="upstream",
        text="conflict", witness="2 of 2 green", since="99.0.0", why="",
    )  # fmt: skip
    known = newest.recorded("99.0.0", KNOWN, [outcome])
    assert known == {status.slug("0007-A-patch-of-nobody.patch"): "upstream"}
    assert newest.recorded("98.0.0", KNOWN, [outcome]) == {}
