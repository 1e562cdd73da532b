"""Hosts on one machine: network namespaces on a bridge, each with a cable that can be pulled."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    """A namespace with one interface; `command` is what runs a program in it, under a host name of its own."""

    name: str
    cable: str  # the bridge's end of it

    @property
    def command(self) -> list[str]:
        rename = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", rename, "sh"]

    def cut_off(self) -> None:
        """Pull the cable: packets are lost, and no connection is told."""
        run_ip("link", "set", self.cable, "down")

    def heal(self) -> None:
        run_ip("link", "set", self.cable, "up")


@dataclass(frozen=True)
class Network:
    """Where servers listen, and the hosts that reach them there."""

    address: str
    hosts: list[Host]


@contextmanager
def two_hosts() -> Iterator[Network]:
    """A bridge with an address, and two hosts on it; needs root on Linux, and is skipped without."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    token = uuid.uuid4().hex[:6]
    subnet = f"10.{200 + int(token[:2], 16) % 50}.{int(token[2:4], 16)}"
    bridge, hosts = f"lbr{token}", []
    try:
        run_ip("link", "add", bridge, "type", "bridge")
        run_ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        run_ip("link", "set", bridge, "up")
        for number in (1, 2):
            host, inner = Host(f"lbh{token}{number}", f"lbv{token}{number}"), f"lbi{token}{number}"
            run_ip("netns", "add", host.name)
            hosts.append(host)
            run_ip("link", "add", host.cable, "type", "veth", "peer", "name", inner)
            run_ip("link", "set", host.cable, "master", bridge, "up")
            run_ip("link", "set", inner, "netns", host.name)
            run_ip("-n", host.name, "addr", "add", f"{subnet}.{number + 1}/24", "dev", inner)
            run_ip("-n", host.name, "link", "set", inner, "up")
            run_ip("-n", host.name, "link", "set", "lo", "up")
        yield Network(f"{subnet}.1", hosts)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)
