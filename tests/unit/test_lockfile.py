"""Reading lock files, cutting them down, and what contradicts base.toml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import lockfile
from sm12x.core.errors import BadFileError, FetchError, ToolFailedError
from sm12x.stack.model import base as bases
from sm12x_dev import lock

TEXT = """\
# Made by something.
--only-binary :all:
--no-binary old_thing

anyio==4.1 \\
    --hash=sha256:aa11 \\
    --hash=sha256:aa22
    # via
    #   httpx
    #   starlette[full]
Fast_API==1.0 \\
    --hash=sha256:bb11
    # via vllm
httpx==0.28.1 ; python_version > "3" \\
    --hash=sha256:cc11
    # via fast-api
idna==3.1 \\
    --hash=sha256:dd11
    # via
    #   -c other.lock
    #   -r requirements.in
    #   anyio
loop-a==1 \\
    --hash=sha256:ee11
    # via loop-b
loop-b==1 \\
    --hash=sha256:ff11
    # via loop-a
torch==2.11.0+cu130 \\
    --hash=sha256:0011
    # via -r requirements.in

# The following packages were excluded from the output:
# vllm
"""


def test_names_versions_hashes_and_who_asked() -> None:
    read = lockfile.parse(TEXT)
    assert read.versions == {
        "anyio": "4.1",
        "fast-api": "1.0",
        "httpx": "0.28.1",
        "idna": "3.1",
        "loop-a": "1",
        "loop-b": "1",
        "torch": "2.11.0+cu130",
    }
    assert read.options == ("--only-binary :all:", "--no-binary old_thing")
    by_name = {pin.name: pin for pin in read.pins}
    assert by_name["anyio"].hashes == ("sha256:aa11", "sha256:aa22")
    assert by_name["anyio"].via == ("httpx", "starlette")
    assert by_name["idna"].via == ("anyio",)
    assert by_name["torch"].via == ()


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["httpx"], ["anyio", "httpx", "idna"]),
        (["FAST.api[standard]", "torch"], ["anyio", "fast-api", "httpx", "idna", "torch"]),
        (["loop_a"], ["loop-a", "loop-b"]),
        (["idna"], ["idna"]),
        ([], []),
    ],
)
def test_a_lock_cut_down_is_a_lock_of_all_that_is_needed(names: list[str], kept: list[str]) -> None:
    text = lockfile.restrict(TEXT, names)
    cut = lockfile.parse(text)
    assert list(cut.versions) == kept
    assert cut.options == lockfile.parse(TEXT).options
    whole = {pin.name: pin for pin in lockfile.parse(TEXT).pins}
    assert all(pin == whole[pin.name] for pin in cut.pins)


def test_cutting_down_to_what_is_not_there() -> None:
    with pytest.raises(BadFileError, match="nothing, tensorflow"):
        lockfile.restrict(TEXT, ["torch", "tensorflow", "nothing"])


@pytest.mark.parametrize("line", ["torch>=2", "git+https://x.test/y", "<<<<<<< ours"])
@pytest.mark.parametrize("before", ["", "a==1 \\\n    --hash=sha256:aa\n"])
def test_what_is_no_pin_is_named_with_its_line(before: str, line: str) -> None:
    number = before.count("\n") + 1
    with pytest.raises(BadFileError, match=f"some.lock:{number}: ") as caught:
        lockfile.parse(f"{before}{line}\n", where="some.lock")
    assert line in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match=r"no\.lock"):
        lockfile.read(tmp_path / "no.lock")


BASES = bases.versions()


@pytest.mark.parametrize("machine", bases.MACHINES)
@pytest.mark.parametrize("version", BASES)
def test_committed_locks_agree_with_their_base(version: str, machine: str) -> None:
    base = bases.load(version)
    assert lock.verify(base, machine, committed(base, machine)) == []


@pytest.mark.parametrize("machine", bases.MACHINES)
@pytest.mark.parametrize("version", BASES)
def test_the_commands_inside_the_image_add_nothing_to_the_closure(
    version: str, machine: str
) -> None:
    closure = lockfile.read(bases.load(version).lock_path(machine))
    assert {"click", "packaging", "pyyaml", "requests", "rich"} <= set(closure.versions)


def committed(base: bases.Base, machine: str) -> lock.Locks:
    return lock.Locks(
        closure=base.lock_path(machine).read_text(encoding="utf-8"),
        build=base.build_lock_path(machine).read_text(encoding="utf-8"),
    )


@pytest.fixture
def base() -> bases.Base:
    return bases.load(BASES[0])


def test_each_contradiction_is_one_finding(base: bases.Base) -> None:
    spec = replace(base.locks["aarch64"], build_from_sdist=("ninja",))
    base = replace(base, locks={**base.locks, "aarch64": spec})
    plain = committed(base, "aarch64")
    made_with, head = (lock.heads(one, "aarch64")[0] for one in (bases.load(BASES[0]), base))
    assert plain.closure.startswith(made_with)
    good = replace(plain, closure=head + plain.closure.removeprefix(made_with))
    torch = f"torch=={base.toolchain.torch}"

    def found(closure: str = good.closure, build: str = good.build) -> list[str]:
        return lock.verify(base, "aarch64", lock.Locks(closure=closure, build=build))

    (first, second) = found(
        closure=good.closure.replace(torch, "torch==9.9"),
        build=good.build.replace(torch, "torch==9.9"),
    )
    assert "torch is 9.9" in first
    assert "torch is 9.9" in second
    (own, differing) = found(build=good.build.replace(torch, "torch==9.9"))
    assert own.startswith("build-aarch64.lock: torch is 9.9, base.toml says")
    assert differing.startswith("build-aarch64.lock: torch is 9.9, requirements-aarch64.lock has")
    assert found(closure=good.closure + "vllm==1 \\\n    --hash=sha256:00\n") == [
        "requirements-aarch64.lock: vllm must not be listed"
    ]
    assert found(closure=good.closure + "bare==1\n") == [
        "requirements-aarch64.lock: bare has no hash"
    ]
    (line,) = found(closure=good.closure.replace("--no-binary ninja\n", ""))
    assert "wheels only" in line
    (line,) = found(closure=good.closure.replace(f"Python {base.python}", "Python 3.9"))
    assert f"Python {base.python}" in line
    assert found(closure=good.closure.replace("\nninja==", "\nother==")) == [
        "requirements-aarch64.lock: ninja must be built from its sdist, but is missing"
    ]


def test_no_table_for_a_machine(base: bases.Base) -> None:
    with pytest.raises(BadFileError, match=r"lock\.aarch64"):
        replace(base, locks={}).lock_spec("aarch64")


def test_what_a_base_replaces_is_said_in_the_lock(base: bases.Base) -> None:
    odd = bases.Override(requirement="a==1", instead_of="a>=2", why="there is no newer one")
    closure, build = lock.heads(replace(base, overrides=(odd,)), "x86_64")
    assert "\n# a==1 instead of a>=2: there is no newer one.\n" in closure
    assert "a==1" not in build


def test_extras_are_asked_for_and_must_be_in_the_lock() -> None:
    base = bases.load("0.33.0")
    (extra,) = base.extras
    assert lock.release_requirement(base) == f"vllm[{extra.name}]==0.33.0"
    assert lock.release_requirement(replace(base, extras=())) == "vllm==0.33.0"
    pin = f"\n{extra.requirement} \\\n"
    for machine in base.locks:
        good = committed(base, machine)
        assert lock.verify(base, machine, good) == []
        head, build_head = lock.heads(base, machine)
        assert f"\n# With its extra b12x ({extra.requirement}, Apache-2.0).\n" in head
        assert extra.name not in build_head
        assert good.closure.count(pin) == 1
        for new, found in (("\nb12x==1.5.0 \\\n", "1.5.0"), ("\nother==1 \\\n", "missing")):
            bad = replace(good, closure=good.closure.replace(pin, new))
            assert lock.verify(base, machine, bad) == [
                f"requirements-{machine}.lock: b12x is {found}, base.toml's extra b12x is "
                f"{extra.requirement}"
            ]
        # A lock that was made without the extra says so in its head too.
        without = lock.heads(replace(base, extras=()), machine)[0]
        assert without != head


def test_a_lock_without_what_its_base_replaces_is_a_contradiction(base: bases.Base) -> None:
    (override,) = base.overrides
    old = "certifi==2026.10.19"
    good = committed(base, "aarch64")
    assert lock.verify(base, "aarch64", good) == []
    assert f"\n{override.requirement} \\\n" in good.closure
    bad = replace(good, closure=good.closure.replace(f"\n{override.requirement} ", f"\n{old} "))
    found = lock.verify(base, "aarch64", bad)
    assert any(line.startswith("requirements-aarch64.lock: certifi is") for line in found), found


def test_a_requirement_may_be_replaced_on_one_machine_alone(base: bases.Base) -> None:
    odd = bases.Override(
        requirement="a>=2", instead_of="a==1", why="1 hangs", of="torch", machines=("aarch64",)
    )
    both = bases.Override(requirement="b==1", instead_of="b==2", why="there is no 2")
    changed = replace(base, overrides=(odd, both))
    assert changed.overrides_on("aarch64") == (odd, both)
    assert changed.overrides_on("x86_64") == (both,)
    arm, intel = (lock.heads(changed, machine)[0] for machine in ("aarch64", "x86_64"))
    assert "\n# a>=2 instead of a==1 of torch: 1 hangs.\n" in arm
    assert "a>=2" not in intel


@pytest.mark.parametrize(
    ("file", "lock_file"),
    [("Dockerfile.builder", "/opt/build.lock"), ("Dockerfile.bundle", "requirements.lock")],
)
def test_a_lock_is_installed_as_it_is(file: str, lock_file: str) -> None:
    """uv refuses a lock that replaces what a package asks for, unless it is told not to look."""
    text = (layout.root() / file).read_text(encoding="utf-8").replace("\\\n", " ")
    steps = [part for line in text.splitlines() for part in line.split("&&")]
    (install,) = [step for step in steps if "uv pip install" in step and f"{lock_file}" in step]
    assert "--no-deps" in install.split()
    assert "--require-hashes" in install.split()


def test_pip_would_forget_an_exception_before_wheels_only(base: bases.Base) -> None:
    spec = replace(base.locks["aarch64"], build_from_sdist=("ninja",))
    base = replace(base, locks={**base.locks, "aarch64": spec})
    closure, build = lock.heads(base, "aarch64")
    assert closure.index("--only-binary") < closure.index("--no-binary")
    assert "--no-binary" not in build


@pytest.mark.parametrize(
    ("stderr", "kind", "said"),
    [
        (
            "warning: odd\nerror: Request failed after 3 retries in 7.5s\n"
            "  cause: Failed to fetch: https://u:secret@h.test/simple/torch/\n"
            "  cause: client error (Connect)\n  cause: Connection refused (os error 111)\n",
            FetchError,
            "no answer from https://h.test/simple/torch/ (Connection refused (os error 111))",
        ),
        (
            "error: No solution found when resolving dependencies\n  cause: Because there is no "
            "version of torch==9, your requirements\n      are unsatisfiable.\n",
            ToolFailedError,
            "uv: No solution found when resolving dependencies: Because there is no version",
        ),
        ("warning: a.whl is missing an upload date\nerror: No", FetchError, "no upload dates"),
    ],
)
def test_what_uv_says_in_one_line(stderr: str, kind: type[Exception], said: str) -> None:
    error = lock.uv_error(stderr, what="the lock")
    assert isinstance(error, kind)
    assert said in str(error)
    assert "\n" not in str(error)
    assert "secret" not in str(error)
