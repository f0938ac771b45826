"""The network of a node: every pod has an address on one bridge, and knows Services by name.

A Service's name leads to the pods that it selects, as a headless one does; ports are the containers' own.
"""

import subprocess
from itertools import count
from typing import Final

from tests.deploy.manifests import Object, Workload, kinds

NODE: Final = "10.77.0.1"
DATABASE: Final = "10.77.9.9"
"""Something that is there already, outside of the namespace."""
_BRIDGE: Final = "pods"
_DOMAIN: Final = "penstock.svc.cluster.local"


def ip(*words: str) -> None:
    """One `ip` command."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)


def open_network() -> None:
    """The bridge, with this process on it."""
    ip("link", "set", "lo", "up")
    ip("link", "add", _BRIDGE, "type", "bridge")
    ip("addr", "add", f"{NODE}/16", "dev", _BRIDGE)
    ip("link", "set", _BRIDGE, "up")


class Addresses:
    """Who is where, and under which names."""

    def __init__(self, objects: tuple[Object, ...]) -> None:
        self._services = kinds(objects, "Service")
        self._numbers = count(1)
        self._pods: list[tuple[str, str, Workload]] = []

    def assign(self, pod: str, workload: Workload) -> str:
        """A pod's address."""
        address = f"10.77.1.{next(self._numbers)}"
        self._pods.append((pod, address, workload))
        return address

    def hosts(self, pod: str) -> str:
        """The names as a pod's hosts file: its own first; each Service once for each pod behind it, and that pod."""
        lines = ["127.0.0.1 localhost"]
        lines += [f"{address} {self._own_names(name, of)}" for name, address, of in self._pods if name == pod]
        for service in self._services:
            name = service["metadata"]["name"]
            for other, address, workload in self._pods:
                if service["spec"]["selector"].items() <= workload.labels.items():
                    check_ports(service, workload)
                    lines.append(f"{address} {_names(name)}")
                    if workload.service == name:
                        lines.append(f"{address} {_names(f'{other}.{name}')}")
        return "\n".join(lines) + "\n"

    @staticmethod
    def _own_names(pod: str, workload: Workload) -> str:
        """As the kubelet writes them: with its Service, the full name comes first."""
        return f"{pod}.{workload.service}.{_DOMAIN} {pod}" if workload.service else pod


def _names(name: str) -> str:
    """The ways to say a name of the namespace."""
    return f"{name} {name}.penstock {name}.penstock.svc {name}.{_DOMAIN}"


def check_ports(service: Object, workload: Workload) -> None:
    """Names lead to pods, so a Service's port must be the container's."""
    ports = {
        port["name"]: port["containerPort"] for _, c in workload.containers() for port in c.get("ports", ())
    }
    for port in service["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"], (service["metadata"]["name"], port)


def connect(pid: int, index: int, address: str) -> None:
    """Put the network of a process on the bridge."""
    there, here = f"pod{index}", f"node{index}"
    ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", str(pid))
    ip("link", "set", here, "master", _BRIDGE, "up")
    inside = ["nsenter", "-t", str(pid), "-n", "ip"]
    for words in (
        ("link", "set", "lo", "up"),
        ("addr", "add", f"{address}/16", "dev", there),
        ("link", "set", there, "up"),
    ):
        subprocess.run([*inside, *words], check=True)
