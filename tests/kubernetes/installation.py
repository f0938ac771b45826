"""An overlay in a namespace of its own, as an operator would write one; it is removed at the end."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.dockerfiles import NAMES
from tests.deploy.manifests import COMPONENT, KUBERNETES, Object
from tests.kubernetes.cluster import PATIENCE_S, Cluster, KubectlError, eventually, ready

RUN: Final = (KUBERNETES / "base" / "run.toml").read_text()
_WAITS: Final = f"--timeout={PATIENCE_S:g}s"


class Installation:
    """overlay: its name. components: those that it gets beside its own. folder: for what is written."""

    def __init__(self, cluster: Cluster, folder: Path, overlay: str, *components: str) -> None:
        self.cluster, self.folder = cluster, folder
        self.namespace = f"penstock-test-{secrets.token_hex(4)}"
        self._overlay, self._components = overlay, components
        self.write(cluster.tags[0])

    def write(self, tag: str, run: str = RUN) -> None:
        here = Path("../" * (len(self.folder.resolve().parts) - 1)) / KUBERNETES.relative_to("/")
        hosts = [{"op": "replace", "path": "/spec/template/spec/containers/0/args/4", "value": self._host()}]
        told: dict[str, Any] = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": self.namespace,
            "resources": [str(here / "overlays" / self._overlay)],
            "components": [str(here / "components" / name) for name in self._components],
            "images": [
                {
                    "name": f"penstock-{name}",
                    "newName": f"{self.cluster.images}penstock-{name}",
                    "newTag": tag,
                }
                for name in NAMES
            ],
            "patches": [{"target": {"kind": "Job", "name": "certificates"}, "patch": json.dumps(hosts)}],
        }
        if self._overlay != "gateway":  # which has no run
            replaced = {"name": "run", "namespace": "penstock", "behavior": "replace", "files": ["run.toml"]}
            told["configMapGenerator"] = [replaced]
        self.folder.mkdir(exist_ok=True)
        (self.folder / "run.toml").write_text(run)
        (self.folder / "kustomization.yaml").write_text(yaml.safe_dump(told))

    def _host(self) -> str:
        return f"--host=server.{self.namespace}.svc"

    def kubectl(self, *words: str, **options: Any) -> str:
        """In the namespace."""
        return self.cluster.kubectl(f"--namespace={self.namespace}", *words, **options)

    def apply(self) -> str:
        """What the overlay says, every field of which the API server must know."""
        return self.kubectl("apply", "--validate=strict", f"--kustomize={self.folder}")

    def finish_rollout(self, *workloads: str) -> None:
        """Until every pod of the workloads is of the newest template and ready."""
        for workload in workloads:
            self.kubectl("rollout", "status", workload, _WAITS, patience_s=PATIENCE_S + 30)

    def pods(self, component: str) -> list[Object]:
        found: list[Object] = self.cluster.get(
            "pods", f"--namespace={self.namespace}", f"--selector={COMPONENT}={component}"
        )["items"]
        return found

    def wait_for_pods(self, component: str, count: int) -> list[Object]:
        """Until so many are ready, and no other is there."""

        def look() -> list[Object] | None:
            pods = self.pods(component)
            return pods if len(pods) == count and all(map(ready, pods)) else None

        return eventually(f"{count} pods of {component}", look)

    def log(self, pod: str, *words: str) -> str:
        return self.kubectl("logs", pod, *words)

    def read(self, pod: str, path: str) -> str:
        return self.kubectl("exec", pod, "--", "cat", path)

    def status(self) -> dict[str, Any]:
        self.kubectl("scale", "deployment/operator", "--replicas=1")
        self.finish_rollout("deployment/operator")
        words = ["penstock", "status", "--json", "--once", "--broker=broker:50051"]
        words.append("--config=/etc/penstock/run.toml")

        def ask() -> dict[str, Any]:
            told: dict[str, Any] = json.loads(self.kubectl("exec", "deployment/operator", "--", *words))
            return told

        return eventually("an answer to penstock status", ask)

    def describe(self) -> str:
        parts = [self.kubectl("get", "pods,pvc,jobs", "--output=wide", check=False)]
        parts.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)[-6000:])
        for pod in self._names():
            parts += [f"--- {pod}", self.kubectl("logs", pod, "--tail=15", "--all-containers", check=False)]
        return "\n".join(parts)

    def _names(self) -> Iterator[str]:
        yield from self.kubectl("get", "pods", "--output=name", check=False).split()

    def remove(self) -> None:
        try:
            self.cluster.kubectl("delete", "namespace", self.namespace, "--wait=true", _WAITS)
        except KubectlError as error:
            if "NotFound" not in str(error):
                raise
