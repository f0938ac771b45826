"""A client of the policy server in a pod of its own, which counts answers, and how long it had none."""

from dataclasses import dataclass, field
from typing import Any, Final

from tests.kubernetes.bare_pod import BarePod
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
        """With the label and the certificate of a client."""
        self.pod.start()

    def told(self) -> dict[str, Any]:
        """answers: how many. gap_s: the longest time without one between two. since_s: since the last."""
        said = self.pod.lines("--tail=20")
        return said[-1] if said else {"answers": 0, "gap_s": 0.0, "since_s": 0.0}
