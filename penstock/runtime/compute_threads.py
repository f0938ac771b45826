"""Threads that compute within the limit of their process.

`torch.set_num_threads` holds in the thread that calls it: in a thread that starts later a product of matrices
takes all cores, until that thread asks torch for its number. OpenBLAS has one number for all threads of a
process, `OPENBLAS_NUM_THREADS` as it was when numpy was loaded; `penstock.launch.cli.app` sets it.

This module loads no torch: a process without it has no such limit.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


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
