"""Checks for two machines: RDMA ports, the variables that tell NCCL which to use, and NCCL."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.knowledge import numbers
from sm12x.doctor.model import Facts, Finding, RdmaPort, bad, check, info, ok, unknown, warn

_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "MASTER_")
_NAMES = ("VLLM_HOST_IP",)
_RDMA = "/sys/class/infiniband"
_NET = "/sys/class/net"
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"

_NCCL = "libnccl.so.2"
# The image's environment, then what a system package installs.
_SITES = ("/opt/venv/lib", "/usr/local/lib", "/usr/lib")
_SYSTEM = ("/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
# The text that the library prints at start with NCCL_DEBUG=VERSION.
_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_EM_AARCH64 = (183).to_bytes(2, "little")
_MACHINE = slice(18, 20)


def collect(host: Host) -> tuple[RdmaPort, ...]:
    """Collect the RDMA ports of this machine."""
    ports = []
    for device in host.names(_RDMA):
        for number in filter(str.isdecimal, host.names(f"{_RDMA}/{device}/ports")):
            folder = f"{_RDMA}/{device}/ports/{number}"
            gids = {}
            for name in sorted(filter(str.isdecimal, host.names(f"{folder}/gids")), key=int):
                address = host.word(f"{folder}/gids/{name}")
                if address and address != _EMPTY_GID:
                    gids[int(name)] = (host.word(f"{folder}/gid_attrs/types/{name}"), address)
            ports.append(
                RdmaPort(
                    device=device,
                    active=host.word(f"{folder}/state").endswith("ACTIVE"),
                    ethernet=host.word(f"{folder}/link_layer") == "Ethernet",
                    rate=host.word(f"{folder}/rate"),
                    interfaces=host.names(f"{_RDMA}/{device}/device/net"),
                    gids=gids,
                )
            )
    return tuple(ports)


@check("net.rdma")
def _rdma(facts: Facts) -> Iterator[Finding]:
    active = [port for port in facts.ports if port.active]
    if not facts.ports:
        if facts.unified:
            yield info("no RDMA device: two machines would talk over TCP", "devices", "links")
        return
    if not active:
        found = warn if facts.unified else info
        down = ", ".join(port.device for port in facts.ports)
        yield found(f"no RDMA port is active: {down}", "links")
        return
    # Every port of a host speaks the same, so one finding for all that are alike.
    seen = "; ".join(_described(facts.host, port) for port in active)
    if any(port.ethernet and port.gid is None for port in active):
        seen += "; no GID of RoCE v2 over IPv4 on some: give the interface an address"
        yield warn(seen, "addresses", "links")
        return
    devices = ",".join(port.device for port in active)
    indexes = {port.gid for port in active if port.gid is not None}
    fix = ("use", "index") if len(indexes) == 1 else ("use",)
    yield ok(seen, *fix, devices=devices, index=min(indexes, default=0))


def _described(host: Host, port: RdmaPort) -> str:
    sizes = {name: host.number(f"{_NET}/{name}/mtu") for name in port.interfaces}
    links = ", ".join(
        name if isinstance(mtu, Unseen) else f"{name} MTU {mtu}" for name, mtu in sizes.items()
    )
    index = f", GID {port.gid}" if port.gid is not None else ""
    return f"{port.device} {port.rate.partition(' (')[0]} ({links or 'no interface'}{index})"


@check("net.variables")
def _variables(facts: Facts) -> Iterator[Finding]:
    values = {
        name: value
        for name, value in sorted(facts.host.env.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    }
    if not values:
        if facts.ports:
            yield info("none set in this shell: NCCL chooses for itself, or the recipe sets them")
        return
    wrong = [*_wrong_names(facts), *_wrong_gid(facts)]
    for variable, seen in wrong:
        yield warn(f"{variable}{seen}", "unset", variable=variable)
    if not wrong:
        yield ok(" ".join(f"{key}={value}" for key, value in values.items()))


def _wrong_names(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield each variable that names a device or an interface that is not here, or is down."""
    devices = [port.device for port in facts.ports]
    down = {port.device for port in facts.ports if not port.active}
    interfaces = facts.host.names(_NET)
    for variable, names in (
        ("NCCL_IB_HCA", devices),
        ("NCCL_SOCKET_IFNAME", interfaces),
        ("GLOO_SOCKET_IFNAME", interfaces),
    ):
        value = facts.host.env.get(variable, "")
        # NCCL takes the beginnings of names, unless "=" is before them.
        exact = value.startswith("=") or variable.startswith("GLOO")
        for word in filter(None, () if value[:1] == "^" else value.lstrip("=").split(",")):
            name = word.partition(":")[0]
            match = {one for one in names if one == name or (not exact and one.startswith(name))}
            if not match:
                here = ", ".join(sorted(names)) or "none"
                yield variable, f" names {name}, this machine has {here}"
            elif match <= down:
                yield variable, f" names {name}, which is not active"


def _wrong_gid(facts: Facts) -> Iterator[tuple[str, str]]:
    variable = "NCCL_IB_GID_INDEX"
    value = facts.host.env.get(variable, "")
    active = [port for port in facts.ports if port.active and port.ethernet]
    for port in active if value.isdecimal() else ():
        if not port.routable(int(value)):
            what = " ".join(port.gids.get(int(value), ("empty",)))
            hint = f"; RoCE v2 over IPv4 is index {port.gid}" if port.gid is not None else ""
            yield variable, f"={value} is {what} on {port.device}{hint}"


@check("net.nccl")
def _nccl(facts: Facts) -> Iterator[Finding]:
    """Judge NCCL by the version that its library prints, else by that in the image's ledger."""
    if facts.machine.name != "aarch64":
        return
    least = facts.known.thresholds.nccl_aarch64
    # Bad where NCCL is used at all: ranks on other machines, or several GPUs here.
    talks = any(port.active for port in facts.ports) or len(facts.seen_gpus) > 1
    old = bad if talks else warn
    libraries = _libraries(facts.host)
    for path, version in libraries.items():
        seen = f"NCCL {version} in {path}"
        if isinstance(version, Unseen):
            yield unknown(f"could not see the version of NCCL in {path}: {version.why}")
        elif numbers(version) >= numbers(least):
            yield ok(seen)
        else:
            yield old(f"{seen}, older than {least}", "newer", least=least)
    by_ledger = facts.versions.get("nvidia-nccl-cu13", "")
    if by_ledger and not libraries:
        seen = f"the image has NCCL {by_ledger} by its ledger"
        sound = numbers(by_ledger) >= numbers(least)
        yield ok(seen) if sound else old(f"{seen}, older than {least}", "audit")


def _libraries(host: Host) -> dict[Path, str | Unseen]:
    """Return the NCCL libraries here for AArch64, each with the version in its code."""
    places = [host.path(place) for place in (host.env.get("VLLM_NCCL_SO_PATH"),) if place]
    for site in _SITES:
        for name in host.names(site):
            if name.startswith("python3"):
                for packages in ("site-packages", "dist-packages"):
                    folder = f"{site}/{name}/{packages}/nvidia/nccl/lib"
                    places.append(host.path(f"{folder}/{_NCCL}"))
    places += [host.path(f"{folder}/{_NCCL}") for folder in _SYSTEM]
    libraries: dict[Path, str | Unseen] = {}
    files: set[Path] = set()
    for path in places:
        if path.is_file() and path.resolve() not in files:
            version = _version(path)
            if version is not None:
                files.add(path.resolve())
                libraries[path] = version
    return libraries


def _version(path: Path) -> str | Unseen | None:
    """Return the version in a library; None for one of another machine."""
    try:
        with (
            path.open("rb") as handle,
            mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            if data[_MACHINE] != _EM_AARCH64:
                return None
            version = _VERSION.search(data)
            return version[1].decode() if version else Unseen("no version is in it")
    except (OSError, ValueError) as error:
        # An empty file cannot be mapped.
        return Unseen(str(error))
