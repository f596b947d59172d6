# SPDX-License-Identifier: Apache-2.0
"""Hosts of a test: network namespaces at one switch, whose links the test can cut (root, Linux)."""

import os
import subprocess


class Networks:
    """`count` hosts at 10.99.0.1, 10.99.0.2, ..., each with an interface e0."""

    def __init__(self, count: int) -> None:
        self.names = [f"weft{os.getpid()}-{i}" for i in range(count)]
        self.switch = f"weft{os.getpid()}-s"
        self.made: list[str] = []
        for name in [self.switch, *self.names]:
            run("ip", "netns", "add", name)
            self.made.append(name)
        run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for i, name in enumerate(self.names):
            pair = ["type", "veth", "peer", "name", "e0", "netns", name]
            run("ip", "-n", self.switch, "link", "add", f"p{i}", *pair)
            run("ip", "-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "e0")
            run("ip", "-n", name, "link", "set", "e0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def env(self) -> dict[str, str]:
        """Return the variables of ranks that meet at the first host."""
        return {"MASTER_ADDR": "10.99.0.1", "GLOO_SOCKET_IFNAME": "e0"}

    def cut_off(self, host: int) -> None:
        """Let the switch carry nothing from or to a host, in silence."""
        run("ip", "-n", self.switch, "link", "set", f"p{host}", "nomaster")

    def cut_between(self, *hosts: int) -> None:
        """Let the switch carry nothing between these hosts; the others still reach each."""
        for host in hosts:
            command = ["bridge", "link", "set", "dev", f"p{host}", "isolated", "on"]
            run("ip", "netns", "exec", self.switch, *command)

    def reset(self, host: int) -> None:
        """Reset every TCP connection of a host."""
        run("ip", "netns", "exec", self.names[host], "ss", "-K", "state", "established")

    def close(self) -> None:
        for name in self.made:
            run("ip", "netns", "del", name)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
