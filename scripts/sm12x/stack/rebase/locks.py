"""The locks of a drafted base, and its witnesses' packages from one of them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping

from sm12x.core import files, lockfile
from sm12x.core.errors import Sm12xError
from sm12x.stack import lock
from sm12x.stack.model.base import Base
from sm12x.stack.rebase import base_draft


def closure_of_torch(new: Base) -> dict[str, str]:
    """All that the release's torch asks for, name -> version; empty where it cannot be resolved."""
    try:
        return lock.resolve(new, next(iter(new.locks)), [f"torch=={new.toolchain.torch}"])
    except Sm12xError:
        # Making the locks fails for the same reason, and reports it.
        return {}


def make(
    base: Base,
    new: Base,
    torch: Mapping[str, str],
    to_check: list[str],
    say: Callable[[str], None],
    *,
    machine: str = platform.machine(),
) -> tuple[str, ...]:
    """Write the locks of ``new`` into its folder; the machines that have one.

    A failure for one machine is added to ``to_check``; the other machines' locks are still made.

    Args:
        base: whose witnesses' packages are looked for in the new lock.
        torch: what the release's torch asks for.
        machine: the one whose lock the packages are taken from, where it was made.
    """
    made: list[str] = []
    for name in new.locks:
        say(f"resolving the lock for {name}")
        try:
            texts = lock.make(new, name)
        except Sm12xError as error:
            to_check.append(f"lock.{name}: {error.message}")
            continue
        files.write_text(new.lock_path(name), texts.closure)
        files.write_text(new.build_lock_path(name), texts.build)
        to_check += [f"lock.{name}: {fault}" for fault in lock.verify(new, name, texts)]
        made.append(name)
    if len(made) < len(new.locks):
        to_check.append(
            "lock: for a package that cannot be installed add an [[override]] to base.toml, and "
            "run this again with --force, which keeps the overrides"
        )
    chosen = machine if machine in made else next(iter(made), None)
    if chosen is not None and base.lock_path(chosen).is_file():
        packages, notes = base_draft.witness_packages(
            base.witness.packages,
            lockfile.read(base.lock_path(chosen)),
            lockfile.read(new.lock_path(chosen)),
            torch=torch,
        )
        to_check += notes
        path = new.folder / "base.toml"
        files.write_text(
            path, base_draft.amended(path.read_text(encoding="utf-8"), packages=packages)
        )
    return tuple(made)
