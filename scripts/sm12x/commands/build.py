"""`sm12x build`: the steps of a build, one at a time, as the builder image runs them."""

from __future__ import annotations

import platform
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

import click
from click.core import ParameterSource

from sm12x.commands import find_links_option, say
from sm12x.core import progress, text
from sm12x.core.errors import BadFileError, FindingsError, UsageError
from sm12x.stack.model import base as bases
from sm12x.wheel import selection

# The steps import what they need themselves: some, such as `stand-in`, also run in the runtime
# image, which does not have the packages that the other steps use.

_FOLDER = click.Path(file_okay=False, path_type=Path)
_EXISTING_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)

_machine = click.option(
    "--machine",
    default=platform.machine,
    help="x86_64 or aarch64. Default: this machine.",
)
_python = click.option(
    "--python",
    type=_EXISTING_FILE,
    help="A Python that has the build requirements. Default: the one running this.",
)
_base = click.option("--base", "version", required=True, help="The vLLM release, such as 0.33.0.")


@click.group()
def command() -> None:
    """The steps of a build, one at a time, as the builder image runs them.

    They work outside a container as well, and pick up where a run was interrupted.

    \b
    Example:
      sm12x build source --base 0.33.0 --sdist vllm-0.33.0.tar.gz --out src
    """


@command.command()
@click.option(
    "--site-packages",
    type=_EXISTING_FOLDER,
    required=True,
    help="Where the packages of the CUDA toolkit are installed.",
)
@click.option("--out", type=_FOLDER, required=True, help="The CUDA_HOME to make.")
@_machine
@click.option(
    "--target-packages",
    type=_EXISTING_FOLDER,
    help="For another machine: where `sm12x build packages` unpacked that one's packages.",
)
def toolchain(site_packages: Path, out: Path, machine: str, target_packages: Path | None) -> None:
    """Make a CUDA_HOME of the toolkit's packages, and try its compiler.

    \b
    Example:
      sm12x build toolchain --out /opt/cuda \\
        --site-packages venv/lib/python3.13/site-packages
    """
    from sm12x.wheel.toolchain import cross
    from sm12x.wheel.toolchain import cuda_home as step

    target = None
    if cross.needed(machine):
        if target_packages is None:
            raise UsageError(
                f"a toolkit for {machine} links with packages for {machine}, and none are named",
                next_step="unpack them with `sm12x build packages`, and name them with "
                "--target-packages",
            )
        target = cross.Target(machine=machine, packages=target_packages.absolute())
    toolkit = step.assemble(site_packages, out, target=target)
    click.echo(f"{out}: nvcc {toolkit.nvcc} and a stub of libcuda; compiles and links")


@command.command()
@_base
@_machine
@click.option("--out", type=_FOLDER, required=True, help="Where to unpack them (1 GB).")
@find_links_option(help="A folder of wheels to take as well.")
def packages(version: str, machine: str, out: Path, find_links: Path | None) -> None:
    """Unpack the packages to link another machine's modules with: torch and CUDA's libraries.

    They are those of that machine's build lock, verified by hash. `sm12x build toolchain` takes the
    folder.

    \b
    Example:
      sm12x build packages --base 0.33.0 --machine aarch64 --out target
    """
    from sm12x.core import pipconfig
    from sm12x.wheel.toolchain import cross

    base = bases.load(version)
    base.lock_spec(machine)
    with progress.spinner(f"packages for {machine}"):
        done = cross.unpack(base, machine, out, uv=pipconfig.find_uv(), find_links=find_links)
    click.echo(f"{out} {'made' if done else 'unchanged'}: {', '.join(cross.PACKAGES)}")


@command.command("stand-in")
@click.option("--cuda-home", type=_EXISTING_FOLDER, required=True, help="Where include/cuda.h is.")
@click.option("--out", type=_FILE, required=True, help="The library to make, a libcuda.so.1.")
def stand_in(cuda_home: Path, out: Path) -> None:
    """Make the stand-in libcuda, for machines without a driver.

    With its folder in LD_LIBRARY_PATH, vLLM's native modules load without a GPU. Every call in it
    fails as on a machine without a device.

    \b
    Example:
      sm12x build stand-in --cuda-home /opt/cuda --out check/libcuda.so.1
    """
    from sm12x.wheel.toolchain import libcuda_stub

    api = libcuda_stub.build(cuda_home / "include", out)
    major, minor = divmod(api.version, 1000)
    click.echo(f"{out}: {len(api.symbols)} symbols of CUDA {major}.{minor // 10}")


@command.command()
@click.option(
    "--request", "path", type=_EXISTING_FILE, required=True, help="What to compile, as JSON."
)
@click.option("--work", type=_FOLDER, required=True, help="Work folder, kept between runs.")
@click.option("--out", type=_FOLDER, required=True, help="Where aot/ and flashinfer.json go.")
def flashinfer(path: Path, work: Path, out: Path) -> None:
    """Compile modules of the installed FlashInfer ahead of time, with its own build.

    Runs in the image, with the toolkit of CUDA_HOME. What OUT/aot holds belongs into
    flashinfer/data/aot of the installed packages.

    \b
    Example:
      sm12x build flashinfer --request flashinfer.json --work work --out out
    """
    from sm12x.core import declared
    from sm12x.wheel import flashinfer as step

    request = declared.read_json(
        step.Request, path, next_step="make it with `sm12x bundle --flashinfer`"
    )
    record = step.build(request, out, work, on_line=say)
    size = sum(library.size for library in record.libraries)
    click.echo(
        f"{out}: {text.counted(len(record.libraries), 'module')} of FlashInfer for "
        f"{record.arch_list or 'no architecture'}, {text.size(size)}"
    )


@command.command()
def requirements() -> None:
    """Check that the packages installed here fit together, as `pip check` does.

    A requirement that the lock replaces, by the ledger in the wheel, is printed and is no fault.

    Example: sm12x build requirements
    """
    from sm12x.runtime.check import report, versions
    from sm12x.wheel import ledger

    try:
        release = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        raise BadFileError(
            f"vllm is not installed in {sys.prefix}, so there is nothing to check",
            next_step="run this with the Python of the image, or of an environment with the wheel",
        ) from None
    folder = Path(str(release.locate_file("")))
    build_ledger = ledger.parse(release.read_text(ledger.NAME) or "{}", folder)
    present = versions.installed(folder)
    lines = versions.requirements(present.values(), build_ledger.overrides, build_ledger.extras)
    for line in lines:
        click.echo(f"{line.state}  {line.text}")
    if any(line.state == report.FAIL for line in lines):
        raise FindingsError(
            "the packages installed here do not fit together", next_step="see the lines above"
        )


@command.command()
@_base
@click.option("--sdist", type=_EXISTING_FILE, required=True, help="The release's sdist.")
@click.option("--out", type=_FOLDER, required=True, help="The folder of the patched source.")
def source(version: str, sdist: Path, out: Path) -> None:
    """Unpack the sdist, verify it, and apply the stack.

    OUT.json and OUT.native.json, beside the tree, say which files the stack changed.

    \b
    Example:
      sm12x build source --base 0.33.0 --sdist vllm-0.33.0.tar.gz --out src
    """
    from sm12x.wheel.source import patched as step

    base = bases.load(version)
    with progress.spinner(f"patching {base.sdist.name}"):
        record, done = step.prepare(base, sdist, out)
    targets = ", ".join(step.read_touched(out).targets) or "none"
    state = "made" if done else "unchanged"
    click.echo(
        f"{out} {state}: vLLM {base.version} + stack {record.stack_id}, {len(record.files)} files "
        f"patched; native modules to compile: {targets}"
    )


@command.command()
@_base
@click.option("--source", type=_EXISTING_FOLDER, required=True, help="The patched source.")
@click.option("--cuda-home", type=_EXISTING_FOLDER, required=True, help="The CUDA toolkit.")
@click.option("--out", type=_FOLDER, required=True, help="Where the modules and native.json go.")
@_machine
@click.option(
    "--arch-list",
    envvar="TORCH_CUDA_ARCH_LIST",
    help="Targets, such as 12.0a;12.1a; also from TORCH_CUDA_ARCH_LIST. Default: base.toml's.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Units at a time. Default: all cores.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0.1),
    metavar="GIB",
    help="Memory that units may take together. Default: what is free.",
)
@click.option(
    "--mode",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="quick: modules that the stack changes and that compile quickly; full: every module.",
)
@click.option(
    "--third-party",
    type=_EXISTING_FOLDER,
    help="The third-party sources, each in a folder of its name.",
)
@click.option(
    "--accept-patch-level",
    "patch_levels",
    multiple=True,
    envvar="SM12X_ACCEPT_PATCH_LEVEL",
    metavar="NAME",
    help="A third-party source that may be another patch level of the pinned minor release.",
)
@click.option("--work", type=_FOLDER, help="Work folder, kept between runs. Default: OUT.work.")
@_python
def native(
    version: str,
    source: Path,
    cuda_home: Path,
    out: Path,
    machine: str,
    arch_list: str | None,
    jobs: int | None,
    memory: float | None,
    mode: str,
    third_party: Path | None,
    patch_levels: tuple[str, ...],
    work: Path | None,
    python: Path | None,
) -> None:
    """Compile the native modules with the release's own CMake.

    A module that lacks one of its third-party sources stays the official one. Cores and memory
    limit how many units compile at a time. Logs are in OUT.work/logs.

    \b
    Example:
      sm12x build native --base 0.33.0 --source src \\
        --cuda-home /opt/cuda --out native
    """
    from sm12x.wheel.compile import cmake
    from sm12x.wheel.compile import native as step
    from sm12x.wheel.source import patched as sources
    from sm12x.wheel.toolchain import arch, cross

    base = bases.load(version)
    default = base.toolchain.arch_list
    given_by = click.get_current_context().get_parameter_source("arch_list")
    if given_by is ParameterSource.ENVIRONMENT and arch_list != default:
        # CUDA images often set it for their own device, so the user may not know of the list.
        say(f"targets from TORCH_CUDA_ARCH_LIST: {arch_list} (unset: {default})")
    settings = cmake.Settings(
        cuda_home=cuda_home,
        work=work or out.with_name(f"{out.name}.work"),
        # Not resolved: a virtual environment's python is a link, and knows its packages by it.
        python=(python or Path(sys.executable)).absolute(),
        archs=arch.validate(default if arch_list is None else arch_list, default=default),
        jobs=jobs or 0,
        memory_gib=memory or 0.0,
        third_party=third_party,
        target=cross.find(cuda_home, machine),
    )
    touched = sources.read_touched(source)
    sources.verify(source, touched.files)
    choice = selection.choose(
        base,
        touched.targets,
        mode=mode,
        available=cmake.available(base, third_party),
    )
    start = time.monotonic()
    with progress.steps() as advance:
        record = step.build(
            base,
            source,
            out,
            choice,
            settings,
            mode=mode,
            patch_levels=selection.require_patch_levels(base, patch_levels),
            on_step=advance,
            say=say,
        )
    seconds = time.monotonic() - start
    for module in record.modules:
        click.echo(f"{out / module.path}: {module.size} bytes, needs glibc {module.glibc}")
    if not record.modules:
        click.echo(f"{out}: nothing to compile in {mode} mode")
    for kept in record.kept:
        click.echo(f"{kept.path}: the official one is kept: {kept.reason}")
    click.echo(f"nvcc {record.nvcc}, {record.compiler}, {record.arch_list}: {seconds:.1f} s")


@command.command()
@_base
@_machine
@click.option("--official", type=_EXISTING_FILE, required=True, help="The release's own wheel.")
@click.option("--source", type=_EXISTING_FOLDER, required=True, help="The patched source.")
@click.option("--native", type=_EXISTING_FOLDER, required=True, help="The compiled modules.")
@click.option("--out", type=_FOLDER, required=True, help="Where the wheel and ledger.json go.")
@_python
def wheel(
    version: str,
    machine: str,
    official: Path,
    source: Path,
    native: Path,
    out: Path,
    python: Path | None,
) -> None:
    """Make the wheel: the official one, patched, with the compiled modules in place of its own.

    \b
    Example:
      sm12x build wheel --base 0.33.0 --source src --native native \\
        --official vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl --out dist
    """
    from sm12x.wheel.assemble import assemble
    from sm12x.wheel.compile import cmake

    interpreter = (python or Path(sys.executable)).absolute()
    parts = assemble.Parts(
        base=bases.load(version),
        machine=machine,
        official=official,
        source=source,
        native=native,
        python=interpreter,
        purelib=cmake.purelib(interpreter),
    )
    start = time.monotonic()
    with progress.steps() as advance:
        path, build_ledger = assemble.build(parts, out, on_phase=lambda name: advance(name, 0, 0))
    origins = Counter(file.origin for file in build_ledger.files)
    what = ", ".join(f"{number} {origin}" for origin, number in sorted(origins.items()))
    count = sum(len(entry.ops) for entry in build_ledger.libraries)
    click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    click.echo(f"files other than the official wheel's: {what}")
    click.echo(
        f"{len(build_ledger.libraries)} libraries, {count} torch ops; "
        f"{time.monotonic() - start:.1f} s"
    )
