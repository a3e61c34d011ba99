"""Checks for two machines: RDMA ports, and the variables that tell NCCL which to use."""

from __future__ import annotations

from collections.abc import Iterator

from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import Knowledge, check
from sm12x.doctor.model import INFO, OK, WARN, Finding, Gid, HostFacts, Network, RdmaPort, Unseen

_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "MASTER_")
_NAMES = ("VLLM_HOST_IP",)
_RDMA = "/sys/class/infiniband"
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def collect(host: Host) -> Network:
    ports = [
        _port(host, device, int(port))
        for device in host.names(_RDMA)
        for port in host.names(f"{_RDMA}/{device}/ports")
        if port.isdecimal()
    ]
    mtu = {name: host.number(f"/sys/class/net/{name}/mtu") for name in host.names("/sys/class/net")}
    return Network(
        ports=tuple(ports),
        mtu={name: size for name, size in mtu.items() if not isinstance(size, Unseen)},
        variables={
            name: value
            for name, value in sorted(host.env.items())
            if name.startswith(_PREFIXES) or name in _NAMES
        },
    )


def _port(host: Host, device: str, port: int) -> RdmaPort:
    folder = f"{_RDMA}/{device}/ports/{port}"
    return RdmaPort(
        device=device,
        port=port,
        active=_word(host, f"{folder}/state").endswith("ACTIVE"),
        ethernet=_word(host, f"{folder}/link_layer") == "Ethernet",
        rate=_word(host, f"{folder}/rate"),
        interfaces=host.names(f"{_RDMA}/{device}/device/net"),
        gids=_gids(host, folder),
    )


def _gids(host: Host, folder: str) -> tuple[Gid, ...]:
    gids = []
    for name in sorted(filter(str.isdecimal, host.names(f"{folder}/gids")), key=int):
        address = _word(host, f"{folder}/gids/{name}")
        if address and address != _EMPTY_GID:
            kind = _word(host, f"{folder}/gid_attrs/types/{name}")
            gids.append(Gid(index=int(name), kind=kind, address=address))
    return tuple(gids)


def _word(host: Host, path: str) -> str:
    text = host.text(path)
    return "" if isinstance(text, Unseen) else text


_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@check("net.rdma")
def rdma(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    ports = facts.network.ports
    if not ports:
        if not facts.unified:
            return []
        seen = "no RDMA device: two machines would talk over TCP"
        return [Finding(INFO, seen, fix=("devices", "links"))]
    active = [port for port in ports if port.active]
    if not active:
        down = ", ".join(port.device for port in ports)
        severity = WARN if facts.unified else INFO
        seen = f"no RDMA port is active: {down}"
        return [Finding(severity, seen, fix=("links",))]
    # Every port of a host speaks the same, so one finding for all that are alike.
    seen = "; ".join(_checked(facts, port) for port in active)
    if any(port.ethernet and _gid(port) is None for port in active):
        seen += "; no GID of RoCE v2 over IPv4 on some: give the interface an address"
        return [Finding(WARN, seen, fix=("addresses", "links"))]
    devices = ",".join(port.device for port in active)
    indexes = {gid for gid in map(_gid, active) if gid is not None}
    fix = ("use", "index") if len(indexes) == 1 else ("use",)
    return [
        Finding(OK, seen, fix=fix, values={"devices": devices, "index": min(indexes, default=0)})
    ]


@check("net.variables")
def variables(facts: HostFacts, knowledge: Knowledge) -> list[Finding]:
    values = facts.network.variables
    if not values:
        if not facts.network.ports:
            return []
        seen = "none set in this shell: NCCL chooses for itself, or the recipe sets them"
        return [Finding(INFO, seen)]
    wrong = [*_wrong_devices(facts), *_wrong_interfaces(facts), *_wrong_gid(facts)]
    assignments = " ".join(f"{key}={value}" for key, value in values.items())
    return [
        Finding(WARN, seen, fix=("unset",), values={"variable": variable})
        for variable, seen in wrong
    ] or [Finding(OK, assignments)]


def _wrong_devices(facts: HostFacts) -> Iterator[tuple[str, str]]:
    variable = "NCCL_IB_HCA"
    value = facts.network.variables.get(variable, "")
    if not value or value.startswith("^"):
        return
    here = {port.device for port in facts.network.ports}
    down = {port.device for port in facts.network.ports if not port.active}
    exact = value.startswith("=")
    for word in value.lstrip("=").split(","):
        device = word.partition(":")[0]
        match = {name for name in here if name == device or (not exact and name.startswith(device))}
        if not match:
            devices = ", ".join(sorted(here)) or "none"
            yield variable, f"{variable} names {device}, this machine has {devices}"
        elif match <= down:
            yield variable, f"{variable} names {device}, which is not active"


def _wrong_interfaces(facts: HostFacts) -> Iterator[tuple[str, str]]:
    for variable in _INTERFACES:
        value = facts.network.variables.get(variable, "")
        exact = value.startswith("=") or variable.startswith("GLOO")
        for word in filter(None, value.lstrip("=").split(",") if value[:1] != "^" else ()):
            here = (name if exact else name[: len(word)] for name in facts.network.mtu)
            if word not in here:
                yield variable, f"{variable} names {word}, which is not here"


def _wrong_gid(facts: HostFacts) -> Iterator[tuple[str, str]]:
    variable = "NCCL_IB_GID_INDEX"
    value = facts.network.variables.get(variable, "")
    active = [port for port in facts.network.ports if port.active and port.ethernet]
    for port in active if value.isdecimal() else ():
        gid = next((gid for gid in port.gids if gid.index == int(value)), None)
        if gid is None or not gid.routable:
            what = f"{gid.kind} {gid.address}" if gid else "empty"
            better = _gid(port)
            hint = f"; RoCE v2 over IPv4 is index {better}" if better is not None else ""
            yield variable, f"{variable}={value} is {what} on {port.device}{hint}"


def _gid(port: RdmaPort) -> int | None:
    return next((gid.index for gid in port.gids if gid.routable), None)


def _checked(facts: HostFacts, port: RdmaPort) -> str:
    links = ", ".join(
        f"{name} MTU {facts.network.mtu[name]}" if name in facts.network.mtu else name
        for name in port.interfaces
    )
    gid = _gid(port)
    index = f", GID {gid}" if gid is not None else ""
    return f"{port.device} {port.rate.partition(' (')[0]} ({links or 'no interface'}{index})"
