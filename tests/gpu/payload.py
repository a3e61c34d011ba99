"""Packs a bundle for a GPU host that has no container engine and no network:

    python -m tests.gpu.payload --base 0.33.0 --have NAMES --out DIR

DIR gets the parts of one archive, of at most 55 MiB each, and `unpack.sh`, for a host with the
Python named by --python, torch's CUDA packages and the packages listed in the file NAMES, one a
line. On the host, with all parts in one folder:

    sh unpack.sh TARGET

leaves TARGET/stack and TARGET/stock, hard-linked: the packages of the base's lock that the host
lacks and vLLM, as bundled and with the release's own Python and allocator. Either is used as
PYTHONPATH, or both by tests.gpu.walk. FlashAttention 2's module is left out for its size; importing
vLLM needs one of 2 and 3.

Both have the allocator's source besides, which tests/gpu/test_allocator.py compiles: either is its
SM12X_TREE. With --source, given once for each third-party source as to `sm12x bundle`,
TARGET/source and TARGET/third-party are what tests.gpu.native compiles there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from sm12x import layout
from sm12x.core import index, lockfile
from sm12x.core.errors import Sm12xError
from sm12x.image.bundle import context, modes
from sm12x.stack import lock
from sm12x.stack.model import base as bases
from sm12x.stack.worktree import tree as source_tree
from sm12x.wheel.source import patched, third_party

PART = "55M"
# The host's torch; where the lock's is another one, it comes along.
HOST_TORCH = "2.11."
# Of the lock: what the host's own torch brings, what serving does not import, and large data. NCCL
# is taken where torch is, which may need a newer one.
LEFT_OUT = re.compile(
    r"(nvidia|cuda|tokenspeed)-.*|flashinfer-cubin|opencv-python-headless|torchcodec"
    r"|pynvvideocodec|instanttensor|sentry-sdk|fastapi-cloud-cli"
)
# Taken though the host may have some version of them.
TAKEN = {
    "annotated-doc", "anthropic", "apache-tvm-ffi", "flashinfer-python", "gguf", "tilelang",
    "z3-solver",
}  # fmt: skip
# Where the lock's torch is not the host's. FlashInfer's gated DeltaNet is in CuTe DSL there.
WITH_TORCH = {
    "huggingface-hub", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu13", "nvidia-nccl-cu13",
    "safetensors", "tokenizers", "torch", "torchvision", "transformers", "triton",
}  # fmt: skip
# What building audits and modules on the host takes (`sm12x build native`, `sm12x audit`).
TOOLS = ("beautifulsoup4", "mailbits", "pyelftools", "pypi-simple", "soupsieve", "zstandard")
# Compilers' input, other vendors' code, and what no server loads. torch/bin and
# torchvision/datasets are needed.
UNUSED = (
    "bin", "flashinfer/data/cutlass/docs", "flashinfer/data/cutlass/examples",
    "flashinfer/data/cutlass/media", "flashinfer/data/cutlass/test", "torch/include", "torch/share",
    "triton/backends/amd", "triton/backends/nvidia/lib/cupti", "vllm/vllm-rs",
    "triton/backends/nvidia/lib/cupti-blackwell", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
)  # fmt: skip
# Of the release's source, what its CMake reads; of a third-party source, what no unit includes.
NATIVE = ("CMakeLists.txt", "cmake", "csrc")
ALLOCATOR = "csrc/cumem_allocator*"
NOT_INCLUDED = shutil.ignore_patterns(".git", "docs", "media", "test", "tests", "*.pdf", "*.png")
# The CuTe DSL is found through a .pth file, which Python reads of a site folder only.
SITE = """\
import pathlib
import site

site.addsitedir(str(pathlib.Path(__file__).parent))
"""
UNPACK = """\
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cat "$here"/part.* | LD_LIBRARY_PATH="$here" "$here/zstd" -dc --long=27 | tar -x -C "$1"
cd "$1"
if [ -d stack/torch ]; then
  # The host's CUDA libraries, where torch looks for them.
  site=$(cd / && python3 -c 'import torch; print(torch.__path__[0])')/..
  mkdir -p stack/nvidia
  for folder in "$site"/nvidia/*; do
    [ -e "stack/nvidia/${folder##*/}" ] || ln -s "$folder" stack/nvidia/
  done
  [ ! -d "$site/cusparselt" ] || ln -s "$site/cusparselt" stack/
fi
# All processors compile Python here, for both trees, not each process of the first server. Some
# files are templates: an error is none of the payload's.
python3 -m compileall -qq -j 0 stack || :
cp -al stack stock
(cd stock && xargs -r rm -f < ../added.txt && rm -rf vllm_sleep_keep*)
(cd untouched && find . -type f) | while read -r path; do
  rm -f "stock/$path"
  cp "untouched/$path" "stock/$path"
done
touch unpacked
"""


def wanted(base: bases.Base, have: Iterable[str]) -> tuple[list[str], list[str]]:
    """The requirements out of the lock that the host is to be given, and those of the extras.

    Args:
        have: names of packages that the host has, in any spelling.
    """
    pins = lockfile.read(base.lock_path("x86_64")).versions
    there = {canonicalize_name(name) for name in have if name.strip()} - TAKEN
    taken = {name for name in pins if name not in there and not LEFT_OUT.fullmatch(name)}
    taken |= TAKEN & pins.keys()
    if not pins["torch"].startswith(HOST_TORCH):
        taken |= WITH_TORCH & pins.keys()
    extras = {extra.package for extra in base.extras}

    def pinned(names: Iterable[str]) -> list[str]:
        return [f"{name}=={pins[name]}" for name in sorted(names)]

    return pinned(taken - extras), pinned(taken & extras)


def install(requirements: Iterable[str], folder: Path, python: str) -> None:
    """Install exactly these requirements, from wheels, for an x86_64 host."""
    words = [
        *(lock.find_uv(), "pip", "install", "--quiet", "--no-deps"),
        *("--target", f"{folder}", "--python-version", python),
        *("--python-platform", "x86_64-manylinux_2_39", *requirements),
    ]
    subprocess.run(words, check=True)


def trim(folder: Path) -> None:
    """Remove what no server loads, and the entry of the backend that is removed."""
    for name in UNUSED:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in [*folder.rglob("__pycache__")]:
        shutil.rmtree(path)
    for path in folder.rglob("*.a"):
        path.unlink()
    for path in folder.glob("triton-*.dist-info/entry_points.txt"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not line.startswith("amd")), "utf-8")


def untouched(base: bases.Base, wheel: Path, official: Path, folder: Path) -> tuple[str, ...]:
    """Put the files of the release that the bundle has otherwise into ``folder``.

    Returns:
        The files of vLLM that only the bundle has.
    """
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(official) as theirs:
        mine, others = ({i.filename: i.CRC for i in z.infolist()} for z in (ours, theirs))
        changed = [
            n for n in others if n.startswith("vllm/") and mine.get(n, others[n]) != others[n]
        ]
        theirs.extractall(folder, changed)
    return tuple(n for n in mine if n.startswith("vllm/") and n not in others)


def add_sources(base: bases.Base, given: Mapping[str, Path], tree: Path) -> None:
    """Put the allocator's source into ``tree``, and what native code is compiled of where
    third-party sources are ``given``: the release's, patched, and these.
    """
    cache = layout.cache()
    sdist = index.fetch("vllm", base.sdist.name, base.sdist.sha256, cache=cache)
    made = tree / "made"
    patched.prepare(base, sdist, made / "source")
    source_tree.unpack(sdist, made / "release")
    for source, packages in (("source", "stack"), ("release", "untouched")):
        for path in (made / source).glob(ALLOCATOR):
            place = tree / packages / path.relative_to(made / source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    if given:
        (tree / "source").mkdir()
        for name in NATIVE:
            (made / "source" / name).rename(tree / "source" / name)
        for third in third_party.collect(base, cache=cache, given=given, say=print).values():
            if third.folder:
                folder = tree / "third-party" / third.name
                shutil.copytree(third.folder, folder, ignore=NOT_INCLUDED, symlinks=True)
    shutil.rmtree(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, choices=bases.versions())
    parser.add_argument("--have", type=Path, required=True, help="the host's packages, one a line")
    parser.add_argument("--python", default="3.12", help="the host's Python (default: 3.12)")
    parser.add_argument(
        "--source", action="append", default=[], metavar="NAME=DIR", help="a third-party source"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    base = bases.load(options.base)
    wheels = sorted(layout.dist(base.version).glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"make bundle BASE={base.version} ARGS=--no-image first")
    zstd = shutil.which("zstd")
    if not zstd:
        sys.exit("the host is given this machine's zstd, and there is none: install it")
    if options.out.exists():
        sys.exit(f"{options.out} is there already: name another folder")
    try:
        given = modes.parse_given(base, options.source)
    except Sm12xError as error:
        parser.error(error.message)
    tree = options.out / "tree"
    stack = tree / "stack"
    closure, extras = wanted(base, options.have.read_text().splitlines())
    # As in the image, extras last: FlashInfer has a b12x/__init__.py too.
    install([*closure, *TOOLS], stack, options.python)
    if extras:
        install(extras, stack, options.python)
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(stack)
    # A release with a registry of sleep-mode backends. setuptools builds in the source's folder.
    if any(stack.glob("vllm/**/sleep_mode_backend.py")):
        own = options.out / "own"
        context.Context(files=context.package(), large={}, folders=()).write(own)
        install([f"{own}/sm12x/scripts/sleep-keep"], stack, options.python)
        shutil.rmtree(own)
    trim(stack)
    (stack / "sitecustomize.py").write_text(SITE, "utf-8")
    pinned = base.wheels["x86_64"]
    official = index.fetch("vllm", pinned.name, pinned.sha256, cache=layout.cache())
    added = untouched(base, wheels[0], official, tree / "untouched")
    (tree / "added.txt").write_text("".join(f"{name}\n" for name in added), "utf-8")
    add_sources(base, given, tree)
    pack(tree, options.out, zstd)
    return 0


def pack(tree: Path, out: Path, zstd: str) -> None:
    """Make ``tree`` parts of one archive, with `unpack.sh` and the ``zstd`` that it calls."""
    words = ["tar", "-C", f"{tree}", "-cf", "-", *sorted(path.name for path in tree.iterdir())]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as tar:
        words = [zstd, "-q", "-10", "--long=27", "-T0", "-o", f"{out / 'packed'}"]
        subprocess.run(words, stdin=tar.stdout, check=True)
    if tar.returncode:
        sys.exit(f"tar ended with {tar.returncode}")
    words = ["split", "-b", PART, "-d", "-a", "2", f"{out / 'packed'}", f"{out / 'part.'}"]
    subprocess.run(words, check=True)
    (out / "packed").unlink()
    shutil.rmtree(tree)
    shutil.copy(zstd, out)
    listed = subprocess.run(["ldd", zstd], check=True, stdout=subprocess.PIPE, text=True).stdout
    for library in re.findall(r"=> (\S*/lib(?:z|lz4|lzma)\.so\S*)", listed):
        shutil.copy(library, out)
    (out / "unpack.sh").write_text(UNPACK, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
