"""`penstock gateway prompts` as a process with a run of its own, and a program that stores what it does."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import requests

from penstock.launch.inspection.processes import read_endpoints
from penstock.launch.run.supervisor import penstock
from penstock.runtime.health import Endpoint, read_endpoint

PATIENCE_S: Final = 240.0
SMALL: Final = ("--train=policy.hidden_sizes=[16]", "--train=policy.dropout=0.0")
"""Settings of a run whose updates take little time."""


def end_run(state: Path) -> None:
    """End the run that a killed gateway left behind below its folder, if there is one."""
    begun = state / "begun.json"
    if begun.exists():
        group = int(json.loads(begun.read_text())["group"])
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return


class PromptsGateway:
    """A gateway on a free port. Entering waits until it is healthy; leaving ends it, and its run with it."""

    _count = 0
    site = "prompts"
    """Which API it serves."""

    def __init__(self, folder: Path, *options: str) -> None:
        PromptsGateway._count += 1
        self.state = folder / "state"
        self.log = folder / f"gateway-{PromptsGateway._count}.log"
        self._endpoints = folder / f"gateway-{PromptsGateway._count}.json"
        words = ("gateway", self.site, "--listen", "127.0.0.1:0", "--endpoints", str(self._endpoints))
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                penstock(*words, "--state", str(self.state), *options),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self.session = requests.Session()

    def __enter__(self) -> Self:
        self.await_healthy()
        return self

    def await_healthy(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_healthy():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.end()
        self.session.close()

    @property
    def endpoint(self) -> Endpoint:
        found = read_endpoint(self._endpoints)
        assert found is not None
        return found

    @property
    def url(self) -> str:
        return f"http://{self.endpoint.address}"

    def process_of(self, role: str) -> Endpoint:
        return next(one for one in read_endpoints(self.state / "run").values() if one.role == role)

    def said(self) -> str:
        files = (self.log, self.state / "train.log")
        return "\n".join(file.read_text() for file in files if file.exists())

    def end(self) -> int:
        """Ask it to end; returns its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """End it without a word; its run goes on."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end_run(self) -> None:
        """End a run that a killed gateway left behind, if there is one."""
        end_run(self.state)

    def get(self, route: str) -> Any:
        reply = self.session.get(self.url + route, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def post(self, route: str, /, **body: Any) -> Any:
        reply = self.session.post(self.url + route, json=body, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def play(self, prompt: str, steps: int = 5, *, is_whole: bool = True) -> float:
        """Mutate a prompt as the policy says, and store each step; returns the sum of rewards.

        is_whole: the last step terminates the episode; else it goes on.
        """
        here, total = prompt, 0.0
        state = self.post("/embed", prompt=here)["embedding"]
        for step in range(steps):
            answer = self.post("/select_action", embedding=state)
            made = self.post("/mutate", prompt=here, action=answer["action"], start=prompt)
            following = self.post("/embed", prompt=made["prompt"])["embedding"]
            stored = self.post(
                "/store_experience",
                state=state,
                action=answer["action"],
                reward=made["reward"],
                next_state=following,
                done=is_whole and step == steps - 1,
                log_prob=answer["log_prob"],
                value=answer["value"],
                ticket=answer["ticket"],
            )
            assert stored["stored"]
            here, state, total = made["prompt"], following, total + made["reward"]
        return total

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.state / "run" / "summary.json").read_text()))

    def _is_healthy(self) -> bool:
        if read_endpoint(self._endpoints) is None:
            return False
        return self.session.get(f"{self.url}/health", timeout=PATIENCE_S).status_code == 200
