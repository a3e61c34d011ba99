"""The locked requirements of a base: made with uv, and checked against base.toml.

Two files per machine. The closure has the packages that the release needs to run, in versions that
existed on its release day. The build lock has the packages that the builder needs besides a
compiler; a package in both locks has the same version, so that modules run with the libraries that
they were compiled against.
"""

from __future__ import annotations

import datetime
import difflib
import re
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sm12x import layout
from sm12x.core import lockfile, pipconfig, process
from sm12x.core.errors import (
    BadFileError,
    FetchError,
    Sm12xError,
    ToolFailedError,
)
from sm12x.stack.model.base import Base

_RELEASE = "vllm"


@dataclass(frozen=True, kw_only=True)
class Locks:
    """The texts of the two lock files of one machine."""

    closure: str
    build: str


def make(base: Base, machine: str) -> Locks:
    """Resolve both locks for ``machine``: package metadata only, nothing is built or run.

    Raises:
        FetchError: the package index cannot be reached, or gives no upload dates.
        ToolFailedError: uv finds no versions that fit together.
    """
    closure_head, build_head = heads(base, machine)
    spec = base.lock_spec(machine)
    closure = closure_head + _compile(
        base,
        machine,
        [release_requirement(base), base.toolchain.cuda_requirement],
        leave_out=_RELEASE,
    )
    build = build_head + _compile(
        base,
        machine,
        [
            *base.toolchain.build_requires,
            *spec.sdist_requires,
            base.toolchain.cuda_requirement,
            *_own_requirements(),
        ],
        constraint=(base.lock_path(machine).name, closure),
    )
    return Locks(closure=closure, build=build)


def release_requirement(base: Base) -> str:
    """The release with its extras: ``vllm[b12x]==0.33.0``."""
    names = ",".join(extra.name for extra in base.extras)
    return f"{_RELEASE}[{names}]=={base.version}" if names else f"{_RELEASE}=={base.version}"


def resolve(base: Base, machine: str, requirements: Iterable[str]) -> dict[str, str]:
    """The versions of ``requirements`` on ``machine`` at the release date: name -> version.

    Raises as ``make`` does.
    """
    text = _compile(base, machine, requirements)
    return lockfile.parse(text).versions


def heads(base: Base, machine: str) -> tuple[str, str]:
    """The first lines of the closure and of the build lock, up to the first requirement."""
    spec = base.lock_spec(machine)
    by = (
        f"# Made by `make lock` (sm12x lock --base {base.version} --machine {machine}) from "
        "base.toml; do not edit.\n"
    )
    fits = (
        f"# For Python {base.python} on {spec.platform}; nothing that came out after "
        f"{base.released}.\n"
    )
    # In this order: pip forgets an earlier --no-binary at `--only-binary :all:`.
    wheels_only = "--only-binary :all:\n" + "".join(
        f"--no-binary {name}\n" for name in spec.build_from_sdist
    )
    extras = "".join(
        f"# With its extra {extra.name} ({extra.requirement}, {extra.license}).\n"
        for extra in base.extras
    )
    replaced = "".join(f"# {override}.\n" for override in base.overrides_on(machine))
    return (
        f"{by}# All that {_RELEASE} {base.version} needs, and the CUDA toolkit.\n{extras}{fits}"
        f"# {_RELEASE}=={base.version} itself is not listed: the wheel made here takes its place.\n"
        f"{replaced}{wheels_only}\n",
        f"{by}# What building {_RELEASE} {base.version} needs, the CUDA toolkit, and what sm12x "
        f"itself needs.\n{fits}--only-binary :all:\n\n",
    )


def _own_requirements() -> list[str]:
    """The requirements of sm12x on a build machine, from pyproject.toml."""
    path = layout.root() / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        return [*project["dependencies"], *project["optional-dependencies"]["build"]]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise BadFileError(
            f"{path} does not have sm12x's own requirements: {error!r}",
            next_step="run from a complete checkout",
        ) from None


def verify(base: Base, machine: str, locks: Locks) -> list[str]:
    """Contradictions between ``locks`` and base.toml, one line each; needs no network."""
    closure_name, build_name = base.lock_path(machine).name, base.build_lock_path(machine).name
    closure = lockfile.parse(locks.closure, where=closure_name)
    build = lockfile.parse(locks.build, where=build_name)
    spec = base.lock_spec(machine)
    closure_head, build_head = heads(base, machine)
    findings: list[str] = []
    for name, lock, head in (
        (closure_name, closure, closure_head),
        (build_name, build, build_head),
    ):
        if lock.head != head:
            findings.append(
                f"{name}: its first lines are not those that base.toml gives (Python "
                f"{base.python}, {spec.platform}, released {base.released}, wheels only)"
            )
        findings += [f"{name}: {pin.name} has no hash" for pin in lock.pins if not pin.hashes]
        for package, version in (
            ("torch", base.toolchain.torch),
            ("cuda-toolkit", base.toolchain.cuda),
        ):
            locked = lock.versions.get(package)
            if locked != version:
                findings.append(
                    f"{name}: {package} is {locked or 'missing'}, base.toml says {version}"
                )
    if _RELEASE in closure.versions:
        findings.append(f"{closure_name}: {_RELEASE} must not be listed")
    findings += [
        f"{closure_name}: {name} must be built from its sdist, but is missing"
        for name in spec.build_from_sdist
        if name not in closure.versions
    ]
    for extra in base.extras:
        pinned = closure.versions.get(extra.package)
        if pinned is None or not Requirement(extra.requirement).specifier.contains(pinned):
            findings.append(
                f"{closure_name}: {extra.package} is {pinned or 'missing'}, base.toml's extra "
                f"{extra.name} is {extra.requirement}"
            )
    for override in base.overrides_on(machine):
        requirement = Requirement(override.requirement)
        name = canonicalize_name(requirement.name)
        findings += [
            f"{where}: {name} is {pinned}, base.toml says {override.requirement}"
            for where, pinned in (
                (closure_name, closure.versions.get(name)),
                (build_name, build.versions.get(name)),
            )
            if pinned is not None and not requirement.specifier.contains(pinned, prereleases=True)
        ]
    findings += [
        f"{build_name}: {name} is {version}, {closure_name} has {closure.versions[name]}"
        for name, version in build.versions.items()
        if closure.versions.get(name, version) != version
    ]
    return findings


def contradictions(base: Base, machines: Iterable[str] = ()) -> list[str]:
    """Return what the committed locks of ``base`` lack of base.toml; of all machines by default."""
    faults: list[str] = []
    for name in machines or base.locks:
        paths = base.lock_path(name), base.build_lock_path(name)
        missing = [path for path in paths if not path.is_file()]
        if missing:
            faults += [f"{path.name}: is missing" for path in missing]
            continue
        closure, build = (path.read_text(encoding="utf-8") for path in paths)
        faults += verify(base, name, Locks(closure=closure, build=build))
    return faults


def difference(path: Path, committed: str, fresh: str) -> str:
    """A unified diff from the committed file to a new one; "" if they are the same."""
    label = path.relative_to(layout.root()) if path.is_relative_to(layout.root()) else path
    return "".join(
        difflib.unified_diff(
            committed.splitlines(keepends=True),
            fresh.splitlines(keepends=True),
            f"{label} (committed)",
            f"{label} (made now)",
        )
    )


def _compile(
    base: Base,
    machine: str,
    requirements: Iterable[str],
    *,
    leave_out: str | None = None,
    constraint: tuple[str, str] | None = None,
) -> str:
    """Run `uv pip compile` in a folder of its own, so that the lock has no path of this machine."""
    spec = base.lock_spec(machine)
    overrides = base.overrides_on(machine)
    end = base.released + datetime.timedelta(days=1)
    argv: list[str | Path] = [
        pipconfig.find_uv(),
        *("pip", "compile", "requirements.in", "--quiet", "--no-header", "--generate-hashes"),
        *("--python-version", base.python, "--python-platform", spec.platform),
        # With a time and a zone: uv reads a bare date in the zone of the machine.
        *("--exclude-newer", f"{end}T00:00:00Z"),
        *("--only-binary", ":all:"),
    ]
    for name in spec.build_from_sdist:
        argv += ["--no-binary", name]
    if leave_out:
        argv += ["--no-emit-package", leave_out]
    with tempfile.TemporaryDirectory(prefix="sm12x-lock-") as folder:
        (Path(folder) / "requirements.in").write_text("".join(f"{r}\n" for r in requirements))
        if constraint:
            (Path(folder) / constraint[0]).write_text(constraint[1])
            argv += ["--constraint", constraint[0]]
        if overrides:
            lines = "".join(f"{override.requirement}\n" for override in overrides)
            (Path(folder) / "overrides.txt").write_text(lines)
            argv += ["--override", "overrides.txt"]
        done = process.run(
            argv,
            cwd=Path(folder),
            check=False,
            # Resolving runs no Python of the target; uv would fetch one to have it at hand.
            env={**pipconfig.load().uv_environment(), "UV_PYTHON_DOWNLOADS": "never"},
        )
    if done.returncode != 0:
        raise uv_error(done.stderr, what=f"the lock of {base.version} for {spec.platform}")
    return done.stdout


def uv_error(stderr: str, *, what: str) -> Sm12xError:
    """The error in uv's output, in one line."""
    message = stderr[stderr.rfind("error:") :] if "error:" in stderr else stderr
    address = re.search(r"Failed to fetch:? [`']?(\S+?)[`']?(?=\s|$)", message)
    if address:
        shown = pipconfig.without_credentials(address[1])
        reason = [line.strip().removeprefix("cause: ") for line in message.splitlines()][-1]
        return FetchError(
            f"{what} cannot be made: no answer from {shown} ({reason})",
            next_step="check network, proxy and index address, and run it again",
        )
    if "upload date" in stderr:
        return FetchError(
            f"{what} cannot be made: the package index gives no upload dates",
            next_step="use an index that has them (JSON form of the Simple API)",
        )
    line = re.sub(r"\s*cause: ", ": ", " ".join(message.removeprefix("error:").split()))
    return ToolFailedError(
        f"{what} cannot be made: uv: {line[:600]}",
        next_step="correct the requirements in base.toml or pyproject.toml",
    )
