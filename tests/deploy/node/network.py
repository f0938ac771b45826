"""The network of a node: every pod has an address on one bridge, and knows Services by name.

A Service's name leads to the pods that it selects, as a headless one does; ports are the containers' own.
"""

import subprocess
import time
from itertools import count
from pathlib import Path
from typing import Final

from tests.deploy.manifests import Object, Workload, kinds, selects

NODE: Final = "10.77.0.1"
DATABASE: Final = "10.77.9.9"
"""Something that is there already, outside of the namespace."""
PROMETHEUS: Final = "10.77.9.10"
"""As well."""
_BRIDGE: Final = "pods"
_DOMAIN: Final = "penstock.svc.cluster.local"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stderr)


def open_network() -> None:
    ip("link", "set", "lo", "up")
    ip("link", "add", _BRIDGE, "type", "bridge")
    ip("addr", "add", f"{NODE}/16", "dev", _BRIDGE)
    ip("link", "set", _BRIDGE, "up")


class Addresses:
    def __init__(self, objects: tuple[Object, ...]) -> None:
        self._services = kinds(objects, "Service")
        self._numbers = count(1)
        self._pods: list[tuple[str, str, Workload]] = []

    def assign(self, pod: str, workload: Workload) -> str:
        address = f"10.77.1.{next(self._numbers)}"
        self._pods.append((pod, address, workload))
        return address

    def hosts(self, pod: str) -> str:
        """The names as a pod's hosts file: its own first.

        Each Service once for each pod behind it, and that pod.
        """
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
    return f"{name} {name}.penstock {name}.penstock.svc {name}.{_DOMAIN}"


def check_ports(service: Object, workload: Workload) -> None:
    """Names lead to pods, so a Service's port must be the container's."""
    ports = {
        port["name"]: port["containerPort"] for _, c in workload.containers() for port in c.get("ports", ())
    }
    for port in service["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"], (service["metadata"]["name"], port)


class Pause:
    def __init__(self) -> None:
        self._process = subprocess.Popen(["unshare", "--net", "--uts", "--ipc", "sleep", "infinity"])

    @property
    def pid(self) -> int:
        """Whose network to enter; there is one when this returns."""
        here, there = Path("/proc/self/ns/net"), Path(f"/proc/{self._process.pid}/ns/net")
        while there.readlink() == here.readlink():
            assert self._process.poll() is None, "no namespace for a pod"
            time.sleep(0.01)
        return self._process.pid


def connect(pid: int, index: int, address: str) -> None:
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


def bar(pid: int, address: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", "route", "add", "blackhole", address], check=True)


def lets_in(objects: tuple[Object, ...], pod: dict[str, str], port: str, peer: Object) -> bool:
    """Whether NetworkPolicies let somebody of another namespace in, on a named port. pod: its labels.

    peer: `namespace` and `pod`, the labels of both.
    """
    policies = [
        one["spec"]
        for one in kinds(objects, "NetworkPolicy")
        if "Ingress" in one["spec"]["policyTypes"] and selects(one["spec"]["podSelector"], pod)
    ]
    rules = [rule for policy in policies for rule in policy.get("ingress", ())]
    open_to_it = [rule for rule in rules if any(_is_meant(side, peer) for side in rule["from"])]
    return not policies or any(one["port"] == port for rule in open_to_it for one in rule["ports"])


def _is_meant(side: Object, peer: Object) -> bool:
    """Without a selector of namespaces it is the own one that is meant."""
    return (
        "namespaceSelector" in side
        and selects(side["namespaceSelector"], peer["namespace"])
        and selects(side.get("podSelector", {}), peer["pod"])
    )
