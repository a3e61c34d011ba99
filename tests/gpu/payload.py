"""Packs a bundle for a GPU host that has no container engine and no network:

    python -m tests.gpu.payload --base 0.33.0 --have NAMES --out DIR

DIR gets the parts of one archive, of at most 55 MiB each, `stack.tar.zst` and `unpack.sh`, for a
host with the Python named by --python, torch's CUDA packages and the packages listed in the file
NAMES, one a line. On the host, with all of them in one folder:

    sh unpack.sh TARGET

leaves TARGET/stock, the packages of the base's lock that the host lacks and the official wheel of
vLLM, and TARGET/stack, hard-linked: the same with the bundle's wheel in its place. Either is used
as PYTHONPATH, or both by tests.gpu.walk. FlashAttention 2's module is left out for its size;
importing vLLM needs one of 2 and 3.

The parts have nothing of the stack: --stack-only makes `stack.tar.zst` of DIR again, in seconds,
with what of the bundle's wheel is not in the official one. Where TARGET/stock is there,
`unpack.sh` makes TARGET/stack alone.

Both trees have the allocator's source besides, which tests/gpu/test_allocator.py compiles: either
is its SM12X_TREE. With --source, given once for each third-party source as to `sm12x bundle`,
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
from sm12x.core import index, lockfile, pipconfig
from sm12x.core.errors import Sm12xError
from sm12x.image.bundle import context, modes
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
# The CuTe DSL is found through a .pth file, which Python reads of a site folder only. A folder with
# sm12x_hook.py on the path has the processes of a run do something besides.
SITE = """\
import importlib
import importlib.util
import pathlib
import site

site.addsitedir(str(pathlib.Path(__file__).parent))
if importlib.util.find_spec("sm12x_hook"):
    importlib.import_module("sm12x_hook")
"""
STACK = "stack.tar.zst"
UNPACK = """\
set -eu
here=$(cd "$(dirname "$0")" && pwd)
unpacked() {
  LD_LIBRARY_PATH="$here" "$here/zstd" -dc --long=27
}
mkdir -p "$1"
rm -rf "$1/unpacked" "$1/stack" "$1/laid"
[ -d "$1/stock" ] || cat "$here"/part.* | unpacked | tar -x -C "$1"
(
  cd "$1/stock"
  if [ -d torch ]; then
    # The host's CUDA libraries, where torch looks for them.
    site=$(cd / && python3 -c 'import torch; print(torch.__path__[0])')/..
    mkdir -p nvidia
    for folder in "$site"/nvidia/*; do
      [ -e "nvidia/${folder##*/}" ] || ln -s "$folder" nvidia/
    done
    [ -e cusparselt ] || [ ! -d "$site/cusparselt" ] || ln -s "$site/cusparselt" .
  fi
  # All processors compile Python here, for both trees, not each process of the first server. Some
  # files are templates: an error is none of the payload's.
  python3 -m compileall -qq -j 0 . || :
)
cp -al "$1/stock" "$1/stack"
mkdir "$1/laid"
unpacked <"$here/STACK" | tar -x -C "$1/laid"
# A file that is written to would change in the other tree too.
cp -a --remove-destination "$1/laid/." "$1"
rm -rf "$1/laid"
cd "$1/stack"
xargs -r rm -f <../removed.txt
# Python takes a folder of metadata without files for a package.
find . -depth -path './vllm*' -type d -empty -delete
python3 -m compileall -qq -i ../changed.txt </dev/null || :
cd ..
touch unpacked
""".replace("STACK", STACK)


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
        *(pipconfig.find_uv(), "pip", "install", "--quiet", "--no-deps"),
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


def changes(wheel: Path, official: Path) -> tuple[list[str], list[str]]:
    """The files of ``wheel`` that ``official`` lacks or has otherwise, and those it has not."""
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(official) as theirs:
        mine, others = ({i.filename: i.CRC for i in z.infolist()} for z in (ours, theirs))
    return [name for name in mine if others.get(name) != mine[name]], sorted({*others} - {*mine})


def add_packages(
    base: bases.Base, have: Iterable[str], python: str, official: Path, tree: Path
) -> None:
    """Make ``tree``/stock: the closure that the host lacks, and the official wheel."""
    stock = tree / "stock"
    closure, extras = wanted(base, have)
    # As in the image, extras last: FlashInfer has a b12x/__init__.py too.
    install([*closure, *TOOLS], stock, python)
    if extras:
        install(extras, stock, python)
    with zipfile.ZipFile(official) as archive:
        archive.extractall(stock)
    trim(stock)
    (stock / "sitecustomize.py").write_text(SITE, "utf-8")


def add_stack(wheel: Path, official: Path, python: str, tree: Path) -> None:
    """Make ``tree``/stack: what the bundle has, and the official wheel has not."""
    stack = tree / "stack"
    changed, removed = changes(wheel, official)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(stack, changed)
    # setuptools builds in the source's folder.
    own = tree / "own"
    context.Context(files=context.package(), large={}, folders=()).write(own)
    install([f"{own}/sm12x/scripts/sleep-keep"], stack, python)
    shutil.rmtree(own)
    trim(stack)
    (tree / "removed.txt").write_text("".join(f"{name}\n" for name in removed), "utf-8")
    paths = sorted(path.relative_to(stack) for path in stack.rglob("*.py"))
    (tree / "changed.txt").write_text("".join(f"{path}\n" for path in paths), "utf-8")


def add_source(base: bases.Base, tree: Path, name: str, *, native: bool = False) -> None:
    """Put the allocator's source into ``tree``/NAME: the patched one into "stack", else the
    release's. With ``native``, ``tree``/source is what native code is compiled of.
    """
    sdist = index.fetch("vllm", base.sdist.name, base.sdist.sha256, cache=layout.cache())
    made = tree / "made" / name
    if name == "stack":
        patched.prepare(base, sdist, made)
    else:
        source_tree.unpack(sdist, made)
    for path in made.glob(ALLOCATOR):
        place = tree / name / path.relative_to(made)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    if native:
        (tree / "source").mkdir()
        for part in NATIVE:
            (made / part).rename(tree / "source" / part)
    shutil.rmtree(made.parent)


def add_third_party(base: bases.Base, given: Mapping[str, Path], tree: Path) -> None:
    """Make ``tree``/third-party of the sources that are ``given``."""
    found = third_party.collect(base, cache=layout.cache(), given=given, say=print)
    for third in found.values():
        if third.folder:
            folder = tree / "third-party" / third.name
            shutil.copytree(third.folder, folder, ignore=NOT_INCLUDED, symlinks=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, choices=bases.versions())
    parser.add_argument("--have", type=Path, help="the host's packages, one a line")
    parser.add_argument("--python", default="3.12", help="the host's Python (default: 3.12)")
    parser.add_argument(
        "--source", action="append", default=[], metavar="NAME=DIR", help="a third-party source"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--stack-only", action="store_true", help=f"make {STACK} of an earlier DIR again"
    )
    options = parser.parse_args()
    base = bases.load(options.base)
    wheels = sorted(layout.dist(base.version).glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"make bundle BASE={base.version} ARGS=--no-image first")
    zstd = shutil.which("zstd")
    if not zstd:
        sys.exit("the host is given this machine's zstd, and there is none: install it")
    if options.stack_only != options.out.exists():
        has = "has no packages yet: without --stack-only they are made"
        sys.exit(f"{options.out} {has if options.stack_only else 'is there already'}")
    if not (options.stack_only or options.have):
        parser.error("--have says what the host is not given")
    try:
        given = modes.parse_given(base, options.source)
    except Sm12xError as error:
        parser.error(error.message)
    pinned = base.wheels["x86_64"]
    official = index.fetch("vllm", pinned.name, pinned.sha256, cache=layout.cache())
    tree = options.out / "tree"
    if not options.stack_only:
        add_packages(base, options.have.read_text().splitlines(), options.python, official, tree)
        add_source(base, tree, "stock")
        if given:
            add_third_party(base, given, tree)
        pack(tree, options.out / "packed", zstd)
        words = ["split", "-b", PART, "-d", "-a", "2", f"{options.out / 'packed'}"]
        subprocess.run([*words, f"{options.out / 'part.'}"], check=True)
        (options.out / "packed").unlink()
        add_unpack(options.out, zstd)
    add_stack(wheels[0], official, options.python, tree)
    add_source(base, tree, "stack", native=bool(given))
    pack(tree, options.out / STACK, zstd)
    return 0


def pack(tree: Path, archive: Path, zstd: str) -> None:
    """Make ``tree`` an archive, by ``zstd``."""
    words = ["tar", "-C", f"{tree}", "-cf", "-", *sorted(path.name for path in tree.iterdir())]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as tar:
        words = [zstd, "-q", "-10", "--long=27", "-T0", "-f", "-o", f"{archive}"]
        subprocess.run(words, stdin=tar.stdout, check=True)
    if tar.returncode:
        sys.exit(f"tar ended with {tar.returncode}")
    shutil.rmtree(tree)


def add_unpack(out: Path, zstd: str) -> None:
    """Put `unpack.sh` into ``out``, with the ``zstd`` that it calls."""
    shutil.copy(zstd, out)
    listed = subprocess.run(["ldd", zstd], check=True, stdout=subprocess.PIPE, text=True).stdout
    for library in re.findall(r"=> (\S*/lib(?:z|lz4|lzma)\.so\S*)", listed):
        shutil.copy(library, out)
    (out / "unpack.sh").write_text(UNPACK, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
