# SPDX-License-Identifier: Apache-2.0
"""Listen on the narrowest address at which the other ranks reach this one."""

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

    Returns the socket and the address it listens on, "" for all. Raises OSError where the port is
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
    """Tell rank 0, in the store, by which address this rank knows its host."""
    if not is_loopback(host):
        store.set("monitor/address", resolve(host))


def listen_as_known(host: str, world: int, get: Callable[[str], str]) -> tuple[str, socket.socket]:
    """Listen, on rank 0, on a port where the other ranks reach it; return the address, too.

    A host may know itself by another address (127.0.1.1) than the others know it by, so the last
    rank, which seldom shares it, says which address it uses. "": each takes what it knows.
    get: returns what another rank writes into the store under a key.
    """
    address = host
    if not is_loopback(host):
        address = get("monitor/address")
    listener, at_address = listen(address, 0, max(world, 128))
    return at_address, listener
