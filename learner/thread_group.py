"""Threads of one process that live and die together.

The first error of any thread is kept, and `stop` is set so that the others end; `check` raises it in
the thread that asks. A thread that is interrupted because `stop` is set ends quietly.
"""

import logging
import threading
from collections.abc import Callable

from penstock.runtime.compute_threads import ComputeThread
from penstock.runtime.retry import Interrupted

log = logging.getLogger(__name__)


class ThreadGroup:
    """Start threads with `start`, ask `check` between two units of work, end with `stop` and `join`."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._wakers: list[Callable[[], None]] = []

    def start(self, name: str, body: Callable[[], None], wake: Callable[[], None] | None = None) -> None:
        """Run `body` in a daemon thread: nothing it does may outlive the process's last write.

        wake: ends what the body waits for beside `stop`, so that the end need not wait for it.
        """
        if wake is not None:
            self._wakers.append(wake)
        thread = ComputeThread(target=self._run, args=(name, body), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def check(self) -> None:
        """Raise the first error of any thread."""
        with self._lock:
            if self._error is not None:
                raise self._error

    def join(self, timeout_s: float) -> None:
        """Set `stop` and wait for every thread."""
        self.stop.set()
        for wake in self._wakers:
            wake()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self, name: str, body: Callable[[], None]) -> None:
        try:
            body()
        except Interrupted:
            return
        except BaseException as error:
            log.exception("a thread of the learner died", extra={"name_of_thread": name})
            with self._lock:
                self._error = self._error or error
            self.stop.set()
