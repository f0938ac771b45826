"""Threads that compute within the limit of their process.

`torch.set_num_threads` holds in the thread that calls it: in a thread that starts later a product of matrices
takes all cores, until that thread asks torch for its number. OpenBLAS has one number for all threads of a
process, `OPENBLAS_NUM_THREADS` as it was when numpy was loaded; `penstock.launch.cli.app` sets it.

This module loads no torch: a process without it has no such limit.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from threading import Thread
from typing import Any, TypeVar

from penstock.runtime.retry import Interrupted

T = TypeVar("T")

log = logging.getLogger(__name__)


def keep_limit() -> None:
    """Take the process's number of torch's threads over into the calling thread."""
    if "torch" in sys.modules:
        torch = import_module("torch")  # waits for a thread that is still importing it
        torch.set_num_threads(torch.get_num_threads())


class ComputeThread(Thread):
    """A thread that keeps the limit."""

    def run(self) -> None:
        keep_limit()
        super().run()


class ThreadGroup:
    """Threads of one process that live and die together.

    Start them with `start`, ask `check` between two units of work, end with `stop` and `join`. The first
    error of any thread is kept, and `stop` is set so that the others end; `check` raises it in the thread
    that asks. A thread that is interrupted because `stop` is set ends quietly.
    """

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
        with self._lock:
            if self._error is not None:
                raise self._error

    def join(self, timeout_s: float) -> None:
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


class ComputePool(ThreadPoolExecutor):
    """A pool whose threads keep the limit."""

    def __init__(self, count: int | None, name: str, on_start: Callable[[], None] = lambda: None) -> None:
        """count: of threads; None: as many as `ThreadPoolExecutor` has. on_start: what each calls first."""
        super().__init__(count, name, initializer=_start, initargs=(on_start,))


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run as `asyncio.run` does; threads of `asyncio.to_thread` keep the limit."""

    async def run() -> T:
        asyncio.get_running_loop().set_default_executor(ComputePool(None, "asyncio"))
        return await main

    return asyncio.run(run())


def _start(on_start: Callable[[], None]) -> None:
    keep_limit()
    on_start()
