"""`penstock chat loop run` as a process, and where it stands."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from penstock.launch.run.supervisor import penstock
from penstock.workloads.chat.loop_state import LoopState, Step, folder_of, read_state

PATIENCE_S = 120.0


class LoopProcess:
    """A loop of a run's folder. Leaving ends it."""

    def __init__(self, run: Path, log: Path, *options: str) -> None:
        self.run, self.log, self._options = run, log, options
        self.process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        """A process of it."""
        with self.log.open("ab") as out:
            return subprocess.Popen(
                penstock("chat", "loop", "run", str(self.run), *self._options),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def start(self) -> None:
        """Begin it once more, after a kill."""
        self.process = self._started()

    def state(self) -> LoopState:
        """Where it stands."""
        return read_state(folder_of(self.run))

    def await_step(self, *steps: Step) -> LoopState:
        """Wait until it is at one of these steps."""
        deadline = time.monotonic() + PATIENCE_S
        while (state := self.state()).step not in steps or not state.order:
            assert self.process.poll() is None, self.said()
            assert not state.failure, self.said()
            assert time.monotonic() < deadline, (state, self.said())
            time.sleep(0.05)
        return state

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def ended(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(PATIENCE_S)

    def said(self) -> str:
        """What it and its steps have printed."""
        logs = [self.log, *folder_of(self.run).glob("rounds/*/steps.log")]
        return "\n".join(file.read_text(errors="replace")[-4000:] for file in logs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)


def told(run: Path) -> Any:
    """What `penstock chat loop status` says."""
    done = subprocess.run(
        penstock("chat", "loop", "status", str(run), "--json"), capture_output=True, check=True, text=True
    )
    return json.loads(done.stdout)
