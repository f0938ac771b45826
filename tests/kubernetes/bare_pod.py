"""A pod that nothing replaces: it runs one program beside an installation and prints lines of JSON."""

import json
from dataclasses import dataclass, field
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
"""A client of the policy server: it counts answers, and how long it had none."""
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
        self.installation.kubectl("apply", "--filename=-", given=yaml.safe_dump(self._object()))
        self.installation.kubectl("wait", "--for=condition=Ready", f"pod/{self.name}", "--timeout=300s")

    def lines(self, *words: str) -> list[dict[str, Any]]:
        said = self.installation.log(self.name, *words).splitlines()
        return [json.loads(line) for line in said if line.startswith("{")]

    def remove(self) -> None:
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


@dataclass(frozen=True, slots=True)
class PolicyCaller:
    installation: Installation
    pod: BarePod = field(init=False)

    def __post_init__(self) -> None:
        pod = BarePod(
            installation=self.installation,
            name="caller",
            program=_PROGRAM,
            words=(f"server.{self.installation.namespace}.svc:50052",),
            image="penstock-server",
            labels={"penstock-client": "true"},
            certificate="client",
        )
        object.__setattr__(self, "pod", pod)

    def start(self) -> None:
        self.pod.start()

    def told(self) -> dict[str, Any]:
        """answers: how many. gap_s: the longest time without one between two. since_s: since the last."""
        said = self.pod.lines("--tail=20")
        return said[-1] if said else {"answers": 0, "gap_s": 0.0, "since_s": 0.0}
