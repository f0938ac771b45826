"""A cluster as tests see it: `kubectl` with one KUBECONFIG, and waiting for what its objects say."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.deploy.manifests import Object

PATIENCE_S: Final = 600.0
"""For anything that a cluster should come to; a slow machine needs some of it."""
_LOOK_S: Final = 1.0
T = TypeVar("T")


class KubectlError(AssertionError):
    """What `kubectl` said when it refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """kubeconfig: whom to ask. images: what stands before the names of the images, "" or `registry/`.

    tags: two tags under which each image is there, for upgrades.
    """

    kubeconfig: Path
    images: str
    tags: tuple[str, str]

    def kubectl(
        self, *words: str, given: str | None = None, check: bool = True, patience_s: float = PATIENCE_S
    ) -> str:
        """What it prints. given: for its standard input. Raises KubectlError unless check is False."""
        done = subprocess.run(
            ["kubectl", *words],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=patience_s,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
        )
        if check and done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout if check else done.stdout + done.stderr

    def get(self, *words: str) -> Object:
        found: Object = json.loads(self.kubectl("get", *words, "--output=json"))
        return found


def eventually(what: str, look: Callable[[], T | None], patience_s: float = PATIENCE_S) -> T:
    """What `look` finds at last; None and KubectlError are looked at again until patience ends."""
    until, last = time.monotonic() + patience_s, ""
    while time.monotonic() < until:
        try:
            found = look()
        except KubectlError as error:
            found, last = None, str(error)
        if found is not None:
            return found
        time.sleep(_LOOK_S)
    raise AssertionError(f"after {patience_s:g} s not: {what}. {last}")


def ready(pod: Object) -> bool:
    conditions: Sequence[dict[str, Any]] = pod.get("status", {}).get("conditions", ())
    told = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return told and "deletionTimestamp" not in pod["metadata"]
