"""Threads that respect the process's limit on threads of a computation.

`torch.set_num_threads` applies to the calling thread: in a thread that starts later a matrix product takes
all cores until that thread sets its own limit. OpenBLAS has one limit for all threads of a process,
`OPENBLAS_NUM_THREADS` at the time when numpy was loaded; `penstock.launch.cli.app` sets it.

This module does not load torch: a process without it has no such limit.
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
    """Apply the process's number of torch threads to the calling thread."""
    if "torch" in sys.modules:
        torch = import_module("torch")  # waits for a thread that is still importing it
        torch.set_num_threads(torch.get_num_threads())


class ComputeThread(Thread):
    """A thread that respects the limit."""

    def run(self) -> None:
        keep_limit()
        super().run()


class ThreadGroup:
    """Threads of one process that end together.

    Start them with `start`, call `check` between two units of work, end with `join`. The first error of a
    thread is kept, and `stop` is set so that the others end; `check` raises it in the calling thread. A
    thread that `stop` interrupts ends without an error.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._wakers: list[Callable[[], None]] = []

    def start(self, name: str, body: Callable[[], None], wake: Callable[[], None] | None = None) -> None:
        """Run `body` in a daemon thread, which does not keep the process alive.

        wake: interrupts a wait of the body other than that for `stop`, when the group ends.
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
    """A pool whose threads respect the limit."""

    def __init__(self, count: int | None, name: str, on_start: Callable[[], None] = lambda: None) -> None:
        """count: of threads; None: that of `ThreadPoolExecutor`. on_start: each thread calls it first."""
        super().__init__(count, name, initializer=_start, initargs=(on_start,))


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run as `asyncio.run` does; threads of `asyncio.to_thread` respect the limit."""

    async def run() -> T:
        asyncio.get_running_loop().set_default_executor(ComputePool(None, "asyncio"))
        return await main

    return asyncio.run(run())


def _start(on_start: Callable[[], None]) -> None:
    keep_limit()
    on_start()
