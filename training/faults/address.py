# SPDX-License-Identifier: Apache-2.0
"""Listen on the narrowest address at which the other ranks can reach this one."""

import errno
import ipaddress
import socket
from collections.abc import Callable
from typing import Any


def resolve(host: str) -> str:
    """Return the numeric address of a name, as this host sees it. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def is_loopback(address: str) -> bool:
    """Return whether a numeric address, or "localhost", stays on this host."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(address: str, port: int, backlog: int) -> tuple[socket.socket, str]:
    """Listen on `address`; where it is not this host's own (NAT), on all interfaces.

    Returns the socket and the address it listens on, "" for all. Raises OSError if the port is
    taken.
    """
    if address:
        try:
            server = (address, port)
            return socket.create_server(server, family=family(address), backlog=backlog), address
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    kind = family(address)
    every = "::" if kind == socket.AF_INET6 else ""
    return socket.create_server((every, port), family=kind, backlog=backlog), ""


def publish_address(store: Any, host: str) -> None:
    """Write to the store, for rank 0, the address by which this rank reaches rank 0's host."""
    if not is_loopback(host):
        store.set("monitor/address", resolve(host))


def listen_as_known(host: str, world: int, get: Callable[[str], str]) -> tuple[str, socket.socket]:
    """Listen on rank 0, on an address that the other ranks can reach; return it and the socket.

    A host's name may resolve to another address on the host itself (127.0.1.1) than on other hosts,
    so the last rank, which is seldom on the same host, writes the address that it uses to the
    store. An address of "": each rank uses the one it knows. get: returns the value that another
    rank writes to the store under a key.
    """
    address = host
    if not is_loopback(host):
        address = get("monitor/address")
    listener, at_address = listen(address, 0, max(world, 128))
    return at_address, listener
