"""The loop of a site: a process that goes on beside it, is begun again where it ends, and ends with it.

What it has come to lies in the folder of the run, so that the next one goes on where this one was. When the
gateway is killed, the loop ends by itself.
"""

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.sites.site import RunSettings
from penstock.launch.run.supervised_service import last_line, penstock, without_configuration
from penstock.runtime.lifecycle import LIFELINE_VARIABLE

log = logging.getLogger(__name__)

LOG_FILE: Final = "loop.log"
LOOK_S: Final = 1.0
AGAIN_S: Final = 10.0
"""Seconds after which a loop that ended is begun again."""
END_S: Final = 60.0


class LoopBeside:
    """The process while the block runs.

    words: of `penstock`, before the folder of the run. options: behind it. settings: say where the run is,
    None until that is known. state: folder of its log.
    """

    def __init__(
        self,
        words: Sequence[str],
        options: Sequence[str],
        settings: Callable[[], RunSettings | None],
        state: Path,
    ) -> None:
        self._words, self._options, self._settings, self._state = words, options, settings, state
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go, name="loop", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask it to end, and wait until it has."""
        self._over.set()
        self._thread.join()

    def _go(self) -> None:
        try:
            while (folder := self._folder()) is None:
                if self._over.wait(LOOK_S):
                    return
        except ConfigurationError as error:
            log.warning("there is no loop", extra={"why": str(error)})
            return
        while not self._over.is_set():
            code = self._run(folder)
            if not self._over.is_set():
                said = last_line(self._state / LOG_FILE)
                log.warning("the loop has ended, and is begun again", extra={"code": code, "said": said})
            self._over.wait(AGAIN_S)

    def _folder(self) -> Path | None:
        found = self._settings()
        return None if found is None else found.folder

    def _run(self, folder: Path) -> int:
        """Run the process to its end, or until this one is over; returns its exit code."""
        reading, writing = os.pipe()
        self._state.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            with (self._state / LOG_FILE).open("ab") as out:
                child = subprocess.Popen(
                    penstock(*self._words, str(folder), *self._options),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**without_configuration(os.environ), LIFELINE_VARIABLE: str(reading)},
                    pass_fds=(reading,),
                    process_group=0,
                )
            while child.poll() is None:
                if self._over.wait(LOOK_S):
                    child.terminate()
                    return _awaited(child)
            return int(child.returncode)
        finally:
            os.close(reading)
            os.close(writing)


def _awaited(child: "subprocess.Popen[bytes]") -> int:
    try:
        return child.wait(END_S)
    except subprocess.TimeoutExpired:
        log.warning("the loop did not end in time, and is killed", extra={"seconds": END_S})
        child.kill()
        return child.wait()
