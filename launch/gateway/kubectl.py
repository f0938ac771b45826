"""The cluster as `kubectl` reaches it: by KUBECONFIG, or as the account of the pod that this is in."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any, Final

from gateway.jobs.runner import CannotBegin, CannotLook
from penstock.config.configuration_error import ConfigurationError

ANSWER_S: Final = 20
"""Longest wait for an answer of the cluster, in seconds."""
_AWAY: Final = frozenset(
    {"InternalError", "ServiceUnavailable", "Timeout", "ServerTimeout", "TooManyRequests"}
)
_REFUSED: Final = re.compile(r"^Error from server \((\w+)\): (.*)", re.MULTILINE)
_MOST_CHARS: Final = 500


class _RefusedError(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Kubectl:
    """Asks for objects of one namespace. Raises ConfigurationError where there is no `kubectl`."""

    def __init__(self, namespace: str) -> None:
        found = shutil.which("kubectl")
        if found is None:
            raise ConfigurationError(
                "--runner kubernetes: no kubectl on PATH; install it (Debian: kubernetes-client)"
            )
        self._words = (found, f"--namespace={namespace}", f"--request-timeout={ANSWER_S}s")

    def create(self, one: Mapping[str, Any]) -> bool:
        """Make an object; False: there is one of its name, and it stays as it is.

        Raises CannotBegin where the cluster refuses it, CannotLook where it does not answer.
        """
        try:
            self._ask("create", "--filename=-", given=json.dumps(one))
        except _RefusedError as error:
            if error.reason == "AlreadyExists":
                return False
            raise CannotBegin(f"the cluster refuses it: {error}") from error
        return True

    def jobs_and_pods(self, selector: str) -> list[dict[str, Any]]:
        """Return the Jobs and pods that a label selector names.

        Raises CannotLook where the cluster does not answer, or does not let them be seen.
        """
        try:
            told = self._ask("get", "jobs,pods", f"--selector={selector}", "--output=json")
        except _RefusedError as error:
            raise CannotLook(f"the cluster does not show its Jobs: {error}") from error
        return list(json.loads(told)["items"])

    def delete_job(self, name: str) -> bool:
        """Have a Job end, its pods first; False: there is none. Raises CannotLook."""
        try:
            self._ask("delete", f"job/{name}", "--cascade=foreground", "--wait=false")
        except _RefusedError as error:
            if error.reason == "NotFound":
                return False
            raise CannotLook(f"the cluster does not delete a Job: {error}") from error
        return True

    def _ask(self, *words: str, given: str | None = None) -> str:
        """Return what `kubectl` prints; raises CannotLook where the cluster does not answer."""
        try:
            done = subprocess.run(
                (*self._words, *words),
                input=given or "",
                capture_output=True,
                text=True,
                check=False,
                timeout=2 * ANSWER_S,
            )
        except subprocess.TimeoutExpired as error:
            raise CannotLook("the cluster does not answer") from error
        if done.returncode == 0:
            return done.stdout
        refused = _REFUSED.search(done.stderr)
        said = " ".join(done.stderr.split())[:_MOST_CHARS]
        if refused is not None and refused[1] not in _AWAY:
            raise _RefusedError(refused[1], refused[2][:_MOST_CHARS])
        if done.stderr.startswith("error: error validating"):
            raise _RefusedError("Invalid", said)
        raise CannotLook(f"the cluster does not answer: {said}")
