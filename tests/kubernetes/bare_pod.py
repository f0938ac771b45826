"""A pod that nothing replaces: it runs one program beside an installation and prints lines of JSON."""

import json
from dataclasses import dataclass
from typing import Any, Final

import yaml

from tests.deploy.manifests import Object
from tests.kubernetes.installation import Installation

_FILES: Final = ("own.pem", "own.key", "authority.pem")


@dataclass(frozen=True, slots=True, kw_only=True)
class BarePod:
    """program: Python, given `words`. image, labels, certificate: by the names that `local` has."""

    installation: Installation
    name: str
    program: str
    words: tuple[str, ...]
    image: str
    labels: dict[str, str]
    certificate: str

    def start(self) -> None:
        """Until it runs."""
        self.installation.kubectl("apply", "--filename=-", given=yaml.safe_dump(self._object()))
        self.installation.kubectl("wait", "--for=condition=Ready", f"pod/{self.name}", "--timeout=300s")

    def lines(self, *words: str) -> list[dict[str, Any]]:
        """What it has printed, its errors aside. words: for `kubectl logs`."""
        said = self.installation.log(self.name, *words).splitlines()
        return [json.loads(line) for line in said if line.startswith("{")]

    def remove(self) -> None:
        """At once."""
        self.installation.kubectl("delete", "pod", self.name, "--grace-period=1")

    def _object(self) -> Object:
        cluster = self.installation.cluster
        theirs = (f"{self.certificate}.pem", f"{self.certificate}.key", "authority.pem")
        container = {
            "name": self.name,
            "image": f"{cluster.images}{self.image}:{cluster.tags[0]}",
            "command": ["python", "-u", "-c", self.program, *self.words],
            "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [
                {
                    "name": "certificates",
                    "mountPath": f"/certificates/{own}",
                    "subPath": name,
                    "readOnly": True,
                }
                for own, name in zip(_FILES, theirs, strict=True)
            ],
        }
        security = {"runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "labels": self.labels},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "securityContext": {**security, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [container],
                "volumes": [{"name": "certificates", "persistentVolumeClaim": {"claimName": "certificates"}}],
            },
        }
