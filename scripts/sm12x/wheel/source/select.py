"""Which native modules a stack touches, and which of all are compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sm12x.core import files, text
from sm12x.core.declared import Declared
from sm12x.core.errors import BuildFailedError, UsageError
from sm12x.stack.model.base import Base, Module, ThirdPartySource
from sm12x.stack.model.series import Stack

# Where native code and its build description live in the tree. A change anywhere here must reach
# a compiled module, or it would be in the ledger and not in the image.
_NATIVE_FOLDERS = ("csrc/", "cmake/")
_NATIVE_FILES = ("CMakeLists.txt",)

MODES = ("quick", "full")


@dataclass(frozen=True, kw_only=True)
class Kept(Declared):
    """A module that stays the official wheel's although the mode or the stack asks for it.

    ``missing`` names the third-party sources that it would need and that are not there.
    """

    target: str
    path: str
    reason: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModuleChoice:
    """What is compiled, and what is kept. ``allowed`` are sources to do without (by target)."""

    modules: tuple[Module, ...]
    kept: tuple[Kept, ...]
    allowed: dict[str, tuple[str, ...]]


def is_native(path: str) -> bool:
    """Whether ``path`` (relative to the source tree) is compiled, or says how to compile."""
    return path in _NATIVE_FILES or path.startswith(_NATIVE_FOLDERS)


def takes(module: Module, path: str) -> bool:
    """Whether a change of ``path`` makes a rebuild of ``module`` necessary.

    ``*`` in a glob matches within a folder, ``**`` across folders.
    """
    return any(files.matches(path, glob) for glob in module.inputs)


def touched(base: Base, paths: Iterable[str]) -> tuple[Module, ...]:
    """The modules to compile when ``paths`` are changed, in the order of base.toml.

    Raises:
        BuildFailedError: a native file belongs to no module that base.toml describes.
    """
    native = [path for path in paths if is_native(path)]
    for path in native:
        if not any(takes(module, path) for module in base.modules):
            known = ", ".join(module.target for module in base.modules)
            raise BuildFailedError(
                f"the stack changes {path}, which belongs to no native module of {base.version} "
                f"(known: {known}): the change would not be in the wheel",
                next_step=f"describe its module in {base.folder / 'base.toml'} or drop the change",
            )
    return tuple(module for module in base.modules if any(takes(module, path) for path in native))


def require_source(base: Base, name: str) -> ThirdPartySource:
    """The third-party source of ``base`` called ``name``. Raises UsageError where none is."""
    declared = {source.name: source for source in base.sources}
    if name not in declared:
        raise UsageError(
            f"{base.version} has no third-party source {name!r}",
            next_step=f"use {text.near(name, declared) or text.either(declared)}",
        )
    return declared[name]


def choose(
    base: Base,
    targets: Collection[str],
    *,
    mode: str,
    available: Collection[str] = (),
    allowed: Collection[str] = (),
) -> ModuleChoice:
    """What to compile of ``base`` when the stack touches ``targets``.

    Quick mode takes what the stack touches, if it is cheap; full mode takes all. A module of which
    a third-party source is neither ``available`` nor ``allowed`` to be missing is kept.

    Raises:
        UsageError: ``allowed`` names no source of the base, or one that cannot be done without.
    """
    for name in allowed:
        if not require_source(base, name).ops:
            raise UsageError(
                f"nothing that {base.version} makes of {name} can be compiled without it",
                next_step=f"leave {name} out of --allow-missing: the official module is kept",
            )
    compiled: list[Module] = []
    kept: list[Kept] = []
    without: dict[str, tuple[str, ...]] = {}
    for module in base.modules:
        if mode == "quick" and module.target not in targets:
            continue
        if mode == "quick" and not module.quick:
            reason = "the stack touches it, and quick mode does not compile it"
            kept.append(Kept(target=module.target, path=module.path, reason=reason))
            continue
        gone = tuple(name for name in module.sources if name not in available)
        needed = tuple(name for name in gone if name not in allowed)
        if needed:
            reason = f"{' and '.join(needed)} not found, and what is made of it would be lost"
            entry = Kept(target=module.target, path=module.path, reason=reason, missing=needed)
            kept.append(entry)
            continue
        compiled.append(module)
        if gone:
            without[module.target] = gone
    return ModuleChoice(modules=tuple(compiled), kept=tuple(kept), allowed=without)


def for_stack(base: Base, stack: Stack) -> tuple[Module, ...]:
    """The modules that a stack makes necessary to compile. Raises as ``touched`` does.

    By what the patches name, before anything is unpacked; a patch that the base already has counts
    here and is not compiled later.
    """
    return touched(base, sorted({file.path for patch in stack.patches for file in patch.files}))
