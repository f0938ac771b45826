"""A client of the policy server in a pod of its own, which counts answers, and how long it had none."""

import json
from dataclasses import dataclass
from typing import Any, Final

import yaml

from tests.deploy.manifests import Object
from tests.kubernetes.installation import Installation

_PROGRAM: Final = """
import json, sys, time
from pathlib import Path
from penstock import Credentials, PolicyClient, PolicyError

files = {"certificate": "own.pem", "key": "own.key", "authority": "authority.pem"}
files = {name: Path("/certificates") / file for name, file in files.items()}
credentials = Credentials.from_files(insecure=False, **files)
answers, last, gap = 0, time.monotonic(), 0.0
with PolicyClient(sys.argv[1], credentials=credentials) as client:
    while True:
        try:
            client.act([0.0, 0.0, 0.0, 0.0])
        except PolicyError as error:
            print(error, file=sys.stderr, flush=True)
        else:
            now = time.monotonic()
            gap, last, answers = max(gap, now - last) if answers else 0.0, now, answers + 1
        print(json.dumps({"answers": answers, "gap_s": gap, "since_s": time.monotonic() - last}), flush=True)
        time.sleep(0.1)
"""


@dataclass(frozen=True, slots=True)
class PolicyCaller:
    """The pod, in the namespace of an installation of `local`."""

    installation: Installation
    name: str = "caller"

    def start(self) -> None:
        """With the label and the certificate of a client."""
        self.installation.kubectl("apply", "--filename=-", given=yaml.safe_dump(self._pod()))
        self.installation.kubectl("wait", "--for=condition=Ready", f"pod/{self.name}", "--timeout=300s")

    def told(self) -> dict[str, Any]:
        """answers: how many. gap_s: the longest time without one between two. since_s: since the last."""
        told: dict[str, Any] = json.loads(self.installation.log(self.name, "--tail=1"))
        return told

    def _pod(self) -> Object:
        cluster = self.installation.cluster
        names = {"own.pem": "client.pem", "own.key": "client.key", "authority.pem": "authority.pem"}
        address = f"server.{self.installation.namespace}.svc:50052"
        container = {
            "name": "caller",
            "image": f"{cluster.images}penstock-server:{cluster.tags[0]}",
            "command": ["python", "-c", _PROGRAM, address],
            "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [
                {
                    "name": "certificates",
                    "mountPath": f"/certificates/{own}",
                    "subPath": name,
                    "readOnly": True,
                }
                for own, name in names.items()
            ],
        }
        security = {"runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "labels": {"penstock-client": "true"}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "securityContext": {**security, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [container],
                "volumes": [{"name": "certificates", "persistentVolumeClaim": {"claimName": "certificates"}}],
            },
        }
