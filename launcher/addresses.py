"""IP addresses of this machine's network interfaces."""

import socket
from ipaddress import ip_address

import psutil


def own_addresses(host: str) -> list[str]:
    """Addresses under which other machines reach a server that listens on `host`. Empty for a loopback host."""
    if host == "localhost" or not ip_address(host).is_unspecified:
        return [] if host == "localhost" or ip_address(host).is_loopback else [host]
    families = (socket.AF_INET,) if ip_address(host).version == 4 else (socket.AF_INET, socket.AF_INET6)
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name not in up or entry.family not in families:
                continue
            address = ip_address(entry.address.partition("%")[0])
            if not address.is_loopback and not address.is_link_local:
                found.append(str(address))
    return found
