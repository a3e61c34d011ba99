"""Which native modules a stack touches."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from sm12x.core.errors import BuildFailedError
from sm12x.stack.base import Base, Module
from sm12x.stack.series import Stack

# Where native code and its build description live in the tree. A change anywhere here must reach
# a compiled module, or it would be in the ledger and not in the image.
_NATIVE_FOLDERS = ("csrc/", "cmake/")
_NATIVE_FILES = ("CMakeLists.txt",)


def is_native(path: str) -> bool:
    """Whether ``path`` (relative to the source tree) is compiled, or says how to compile."""
    return path in _NATIVE_FILES or path.startswith(_NATIVE_FOLDERS)


def takes(module: Module, path: str) -> bool:
    """Whether a change of ``path`` makes a rebuild of ``module`` necessary.

    ``*`` in a glob matches within a folder, ``**`` across folders.
    """
    return any(_matches(path.split("/"), glob.split("/")) for glob in module.inputs)


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


def for_stack(base: Base, stack: Stack) -> tuple[Module, ...]:
    """The modules that a stack makes necessary to compile. Raises as ``touched`` does.

    By what the patches name, before anything is unpacked; a patch that the base already has counts
    here and is not compiled later.
    """
    return touched(base, sorted({file.path for patch in stack.patches for file in patch.files}))


def _matches(path: list[str], glob: list[str]) -> bool:
    if not glob:
        return not path
    if glob[0] == "**":
        return _matches(path, glob[1:]) or (bool(path) and _matches(path[1:], glob))
    return bool(path) and fnmatch.fnmatchcase(path[0], glob[0]) and _matches(path[1:], glob[1:])
