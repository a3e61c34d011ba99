"""A library that stands in for libcuda: generated from ``cuda.h``, compiled by the C compiler.

The driver's library comes with a driver, so a machine without a GPU has none, and no package on
the index carries one. One generated file has two uses: linking (an empty stub will not do:
``--as-needed`` drops a libcuda that defines nothing, and the module then fails to load) and loading
(a module that needs libcuda can be imported and asked what it registers).

Every function refuses as a driver does on a machine without a device: ``cuInit`` says
CUDA_ERROR_NO_DEVICE, all others CUDA_ERROR_NOT_INITIALIZED. What works without a device in the
real library works here: the version, the names of errors, ``cuGetProcAddress``.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import files, process
from sm12x.core.errors import BadFileError

SONAME = "libcuda.so.1"
# The headers that declare functions of libcuda. Those for OpenGL, EGL and VDPAU belong to it too,
# but nothing here links to them, and a package may leave them out.
_HEADERS = ("cuda.h", "cudaProfiler.h")

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DECLARED = re.compile(r"\bCUresult\s+CUDAAPI\s+(cu[A-Z]\w*)\s*\(")
_RENAMED = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+(cu[A-Z]\w*)[ \t]+"
    r"(?:(cu[A-Z]\w*)|__CUDA_API_(PTDS|PTSZ)\((cu[A-Z]\w*)\))[ \t]*$",
    re.MULTILINE,
)
_ERROR = re.compile(r"\b(CUDA_(?:SUCCESS|ERROR_\w+))\s*=\s*(\d+)")
_VERSION = re.compile(r"^[ \t]*#[ \t]*define[ \t]+CUDA_VERSION[ \t]+(\d+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class DriverApi:
    """The API of libcuda, from ``cuda.h``.

    ``version`` as cuDriverGetVersion gives it (13000 is 13.0). ``symbols`` are the exported names,
    sorted. ``current`` maps a name to the versioned one that today's callers get. ``errors`` maps
    the names of CUresult to their numbers.
    """

    version: int
    symbols: tuple[str, ...]
    current: Mapping[str, str]
    errors: Mapping[str, int]


def parse(text: str) -> DriverApi:
    """Read the text of ``cuda.h`` (and of headers appended to it).

    A function is exported under the name it is declared by and under those that the header's macros
    rename it to: the versioned one, and, for a function that takes the default stream, the forms
    for a stream per thread (``_ptds``, ``_ptsz``).

    Raises:
        BadFileError: there is no CUDA_VERSION or no function in it.
    """
    text = _COMMENT.sub(" ", text)
    version = _VERSION.search(text)
    names = set(_DECLARED.findall(text))
    if version is None or "cuInit" not in names:
        raise BadFileError(
            "cuda.h declares no CUDA_VERSION or no cuInit: it is not the header of the driver API",
            next_step="pass the CUDA_HOME that `sm12x build toolchain` made",
        )
    current: dict[str, str] = {}
    for name, plain, suffix, stream in _RENAMED.findall(text):
        target = plain or stream
        # Names that the header renames but never declares are types' or other libraries' business.
        if not any(symbol in names for symbol in (name, target)):
            continue
        names |= {name, target}
        if suffix:
            names.add(f"{target}_{suffix.lower()}")
        if target != name and not target.startswith(f"{name}_pt"):
            current[name] = target
    return DriverApi(
        version=int(version[1]),
        symbols=tuple(sorted(names)),
        current=current,
        errors={name: int(number) for name, number in _ERROR.findall(text)},
    )


def read(include: Path) -> DriverApi:
    """Parse the headers of the driver API in ``include``. Raises BadFileError."""
    main = include / _HEADERS[0]
    if not main.is_file():
        raise BadFileError(
            f"{main} is not there", next_step="pass the CUDA_HOME that `sm12x build toolchain` made"
        )
    headers = [include / name for name in _HEADERS if (include / name).is_file()]
    return parse("\n".join(path.read_text(encoding="utf-8", errors="replace") for path in headers))


# Functions that do more than refuse; the rest is one line each.
_WRITTEN = """\
int cuInit(unsigned int flags) { (void)flags; return NO_DEVICE; }

int cuDriverGetVersion(int *version)
{
  if (!version) return INVALID_VALUE;
  *version = VERSION;
  return 0;
}

int cuGetErrorName(int error, const char **text)
{
  if (!text) return INVALID_VALUE;
  *text = name_of(error);
  return *text ? 0 : INVALID_VALUE;
}

int cuGetErrorString(int error, const char **text)
{
  return cuGetErrorName(error, text);
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                        int *status)
{
  unsigned int low = 0, high = sizeof table / sizeof *table;
  (void)version; (void)flags;
  if (!name || !function) return INVALID_VALUE;
  while (low < high) {
    unsigned int middle = (low + high) / 2;
    int order = strcmp(name, table[middle].name);
    if (!order) {
      *function = table[middle].function;
      if (status) *status = 0;
      return 0;
    }
    if (order < 0) high = middle; else low = middle + 1;
  }
  *function = 0;
  if (status) *status = 1;
  return status ? 0 : NOT_FOUND;
}

int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags)
{
  return cuGetProcAddress_v2(name, function, version, flags, 0);
}
"""
_WRITTEN_NAMES = (
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
)


def source(api: DriverApi) -> str:
    """Return the C source of the stand-in. The same header gives the same text."""
    names = sorted({*api.symbols, *_WRITTEN_NAMES})
    refuse = [name for name in names if name not in _WRITTEN_NAMES]
    constants = {
        "VERSION": api.version,
        "NO_DEVICE": api.errors.get("CUDA_ERROR_NO_DEVICE", 100),
        "NOT_INITIALIZED": api.errors.get("CUDA_ERROR_NOT_INITIALIZED", 3),
        "INVALID_VALUE": api.errors.get("CUDA_ERROR_INVALID_VALUE", 1),
        "NOT_FOUND": api.errors.get("CUDA_ERROR_NOT_FOUND", 500),
    }
    parts = [
        "/* Made by sm12x.wheel.toolchain.libcuda_stub from cuda.h; not the NVIDIA driver. */",
        "#include <string.h>",
        *(f"#define {name} {value}" for name, value in constants.items()),
        # No argument is read, so one prototype fits all in the C calling conventions used here.
        "#define REFUSE(name) int name(void) { return NOT_INITIALIZED; }",
        *(f"REFUSE({name})" for name in refuse),
        *_prototypes(),
        "static const struct { const char *name; void *function; } table[] = {",
        *(f'  {{ "{name}", (void *){api.current.get(name, name)} }},' for name in names),
        "};",
        "static const char *name_of(int error)",
        "{",
        "  switch (error) {",
        *_cases(api.errors),
        "  }",
        "  return 0;",
        "}",
        _WRITTEN,
    ]
    return "\n".join(parts)


def build(include: Path, out: Path, *, compiler: str = "cc") -> DriverApi:
    """Generate the stand-in from the headers in ``include`` and compile it to ``out``.

    Raises:
        BadFileError: the header is missing or of another kind.
        ToolMissingError, ToolFailedError: the C compiler is missing or fails.
    """
    api = read(include)
    with tempfile.TemporaryDirectory(prefix="sm12x-standin-") as folder:
        # A fixed relative name: the result must not depend on where it was made.
        name = "standin.c"
        (Path(folder) / name).write_text(source(api), encoding="utf-8")
        with files.replacing(out) as temporary:
            process.run(
                [
                    compiler,
                    "-shared",
                    "-fPIC",
                    "-O1",
                    "-s",
                    f"-Wl,-soname,{SONAME}",
                    "-Wl,--build-id=none",
                    "-o",
                    temporary.resolve(),
                    name,
                ],
                cwd=Path(folder),
                next_step="install a C compiler (gcc) that can make shared libraries",
            )
    return api


def _prototypes() -> Iterable[str]:
    for name in _WRITTEN_NAMES:
        head = re.search(rf"^int {name}\([^)]*\)", _WRITTEN, re.MULTILINE)
        if head is not None:
            yield f"{' '.join(head[0].split())};"


def _cases(errors: Mapping[str, int]) -> Iterable[str]:
    seen: set[int] = set()
    for name, number in errors.items():
        # Two names may share a number (renamed errors); a switch may not.
        if number not in seen:
            seen.add(number)
            yield f'  case {number}: return "{name}";'
