"""The newest reward model of a loop, kept and served beside it: what people are expected to say of an answer.

    RUN/loop/judge/          the model, without the rows of ratings that it was checked with
    RUN/loop/judge.json      where it answers
    RUN/loop/judge.log       what its process said

The process is begun again where it has ended, or where there is a newer model, and ends with the loop.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from penstock.registry.weight_files import replace_file
from penstock.runtime.health import read_endpoint
from penstock.runtime.lifecycle import LIFELINE_VARIABLE

log = logging.getLogger(__name__)

JUDGE: Final = "judge"
_ENDPOINT: Final = "judge.json"
_LOG: Final = "judge.log"
_CARD: Final = "heads.json"
_END_S: Final = 30.0


def keep_judge(folder: Path, made: Path) -> None:
    """Keep a round's reward model as the newest of the loop in this folder; raises OSError.

    What people wrote is no part of what is kept. A copy that was not finished is made anew.
    """
    new, old = folder / f".{JUDGE}-new", folder / f".{JUDGE}-old"
    for path in (new, old):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(made, new)
    card: Mapping[str, Any] = json.loads((made / _CARD).read_bytes())
    trained = {"settings": card["trained"]["settings"]}
    replace_file(new / _CARD, json.dumps({**card, "checks": [], "trained": trained}).encode())
    if (folder / JUDGE).exists():
        (folder / JUDGE).rename(old)
    new.rename(folder / JUDGE)
    shutil.rmtree(old, ignore_errors=True)


def judge_address(folder: Path) -> str:
    """Return where the model of a loop answers; "" where it does not."""
    found = read_endpoint(folder / _ENDPOINT)
    return "" if found is None or not found.address else str(found.address)


class ServedJudge:
    """Its process while the block runs. folder: of the loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._serves = 0.0
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        self._end()  # what a killed loop has left says nothing any more
        self._pipe = os.pipe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask it to end, and wait until it has."""
        self._end()
        for end in self._pipe or ():
            os.close(end)

    def look(self) -> None:
        """Have the newest model served, where there is one; raises OSError."""
        try:
            newest = (self._folder / JUDGE / _CARD).stat().st_mtime
        except FileNotFoundError:
            return
        if self._child is not None and (self._serves != newest or self._child.poll() is not None):
            self._end()
        if self._child is None:
            self._serves = newest
            self._begin()

    def _begin(self) -> None:
        assert self._pipe is not None
        words = ("reward", "serve", JUDGE, "--listen", "127.0.0.1:0", "--endpoints", _ENDPOINT)
        with (self._folder / _LOG).open("wb") as out:
            self._child = subprocess.Popen(
                (sys.executable, "-P", "-m", "penstock.launch.cli", *words),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=(self._pipe[0],),
                env={**os.environ, LIFELINE_VARIABLE: str(self._pipe[0])},
                process_group=0,
            )

    def _end(self) -> None:
        child, self._child = self._child, None
        (self._folder / _ENDPOINT).unlink(missing_ok=True)
        if child is None:
            return
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            log.warning("the judge did not end in time, and is killed", extra={"seconds": _END_S})
            child.kill()
            child.wait()
