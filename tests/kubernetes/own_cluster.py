"""A control plane and one node of the tests' own, in namespaces that end with one process.

Nothing of this machine's network, mounts or processes changes. The root of the node and its binaries come
from `node_root.py`, the images from `node_images.py`; what is written lies in a folder of the test run.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

import yaml

from tests.kubernetes.cluster import Cluster, KubectlError, eventually

NODE: Final = Path(__file__).with_name("node")
API: Final = ("10.77.0.1", 6443)
VOLUMES: Final = 24
CGROUP: Final = "penstock-node"
TAGS: Final = ("1", "2")
_START_S: Final = 300.0
_END_S: Final = 60.0


class OwnCluster:
    """root: of the node. images: an archive of them. work: an empty folder."""

    def __init__(self, root: Path, images: Path, work: Path) -> None:
        self._state, self._node = work / "state", work / "node"
        shutil.copytree(NODE, self._node)
        for name in ("keys", "log"):
            (self._node / name).mkdir()
        os.link(images, self._node / "images.tar")
        self._door = socket.create_server(("127.0.0.1", 0))
        words = ["bash", str(NODE / "certificates.sh"), str(self._node / "keys")]
        subprocess.run([*words, str(self._door.getsockname()[1])], check=True)
        self._state.mkdir()
        _remove_cgroups()
        for controller in _controllers():
            (controller / CGROUP).mkdir()
        self._log = (work / "node.log").open("wb")
        namespaces = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"]
        enter = ["bash", str(NODE / "enter.sh"), str(root), str(self._state), str(self._node)]
        # The machine dies with this process, however that ends.
        self._machine = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", "unshare", *namespaces, *enter],
            stdout=self._log,
            stderr=self._log,
        )
        self._bridge = self._start_bridge()
        self.cluster = Cluster(kubeconfig=self._node / "keys" / "outside.conf", images="", tags=TAGS)

    def _start_bridge(self) -> "subprocess.Popen[bytes]":
        first = eventually("the first process of the node", self._first_process, _START_S)
        file = str(self._door.fileno())
        words = ["nsenter", "--target", str(first), "--net", sys.executable, "-m", "tests.kubernetes.bridge"]
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *words, file, *map(str, API)],
            pass_fds=[self._door.fileno()],
            stdout=self._log,
            stderr=self._log,
        )

    def _first_process(self) -> int | None:
        if self._machine.poll() is not None:
            raise AssertionError(f"the node ended: {(self._node.parent / 'node.log').read_text()[-2000:]}")
        children = Path(f"/proc/{self._machine.pid}/task/{self._machine.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def wait(self) -> None:
        """Until the node is ready, with names and volumes; raises AssertionError with the logs' ends."""
        cluster = self.cluster
        eventually("an API server that answers", lambda: cluster.kubectl("get", "--raw", "/readyz"), _START_S)
        volumes = [self._volume(number) for number in range(VOLUMES)]
        cluster.kubectl("apply", "--filename=-", given=yaml.safe_dump_all(volumes))
        dns = cluster.kubectl(
            "create",
            "configmap",
            "dns",
            "--namespace=kube-system",
            f"--from-file={NODE / 'dns.py'}",
            "--dry-run=client",
            "--output=yaml",
        )
        cluster.kubectl("apply", "--filename=-", given=dns)
        cluster.kubectl("apply", f"--filename={NODE / 'objects.yaml'}")
        eventually("a node", self._node_is_ready, _START_S)
        cluster.kubectl(
            "rollout", "status", "deployment/kube-dns", "--namespace=kube-system", "--timeout=300s"
        )

    def _node_is_ready(self) -> bool | None:
        try:
            self.cluster.kubectl("wait", "--for=condition=Ready", "node/node", "--timeout=5s")
        except KubectlError:
            if self._machine.poll() is not None:
                raise AssertionError((self._node.parent / "node.log").read_text()[-2000:]) from None
            return None
        return True

    def _volume(self, number: int) -> dict[str, object]:
        """A folder that every pod that mounts it may write to: there is no fsGroup for such volumes."""
        folder = self._state / "volumes" / str(number)
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"volume-{number}"},
            "spec": {
                "storageClassName": "standard",
                "capacity": {"storage": "10Gi"},
                "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": f"/var/volumes/{number}", "type": "Directory"},
            },
        }

    def close(self) -> None:
        """End it, with everything that runs in it."""
        for process in (self._bridge, self._machine):
            process.send_signal(signal.SIGKILL)
            process.wait(_END_S)
        self._door.close()
        self._log.close()
        _remove_cgroups()


def _controllers() -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").iterdir() if path.is_dir() and (path / "tasks").exists()]


def _remove_cgroups() -> None:
    for controller in _controllers():
        folder = controller / CGROUP
        if not folder.is_dir():
            continue
        below = sorted(
            (path for path in folder.rglob("*") if path.is_dir()), key=lambda path: -len(path.parts)
        )
        for path in (*below, folder):
            eventually(f"{path} without a process", partial(_remove, path), _END_S)


def _remove(folder: Path) -> bool | None:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process that ends
        return None
    return True
