"""RDMA ports and the variables that tell NCCL which of them to use."""

from __future__ import annotations

from sm12x.doctor.host import Host
from sm12x.doctor.model import Gid, Network, RdmaPort, Unseen

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
    for name in sorted(host.names(f"{folder}/gids"), key=lambda text: int(text)):
        address = _word(host, f"{folder}/gids/{name}")
        if address and address != _EMPTY_GID:
            kind = _word(host, f"{folder}/gid_attrs/types/{name}")
            gids.append(Gid(index=int(name), kind=kind, address=address))
    return tuple(gids)


def _word(host: Host, path: str) -> str:
    found = host.text(path)
    return "" if isinstance(found, Unseen) else found
