"""The end of a process: SIGTERM, SIGINT, a closed terminal, or the launcher's pipe closing make it drain.

A process installs one Lifecycle and drains when it is `draining`. A thread watches signals and the lifeline,
so a callback never runs inside a signal handler and may take locks. A second signal, at least a second after
the first, ends the process at once with exit 130. SIGUSR1 writes the stacks of all threads to stderr.

If the launcher dies by `kill -9`, the kernel closes its end of the pipe, the lifeline: the process drains,
and ends itself after LIFELINE_GRACE_S at the latest.
"""

import asyncio
import ctypes
import errno
import faulthandler
import logging
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from penstock.config.settings import ConfigurationError
from penstock.protocol.limits import MIB
from penstock.rpc.address import AddressInUse
from penstock.runtime import logs
from penstock.runtime.exit import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_USAGE,
    Fatal,
    RunFailed,
    one_line,
)
from penstock.runtime.health import announce_end

# ---- Freed memory is kept for the next message, instead of being returned to the system and requested again.

KEPT_BYTES: Final = 64 * MIB
"""Most bytes that are kept free at the top of the heap."""
# Number and value of each option of mallopt(3). glibc accepts no larger MMAP_THRESHOLD, the size from which
# on a block is mapped separately.
_MALLOPT: Final = {
    "TRIM_THRESHOLD": (-1, KEPT_BYTES),
    "TOP_PAD": (-2, 8 * MIB),
    "MMAP_THRESHOLD": (-3, 32 * MIB),
}
ENVIRONMENT: Final = {f"MALLOC_{name}_": str(size) for name, (_, size) in _MALLOPT.items()}
"""The same settings as environment variables, for processes to start."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, see mallopt(3); call it once, at the start of the process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for number, size in _MALLOPT.values():
            mallopt(number, size)


LIFELINE_VARIABLE: Final = "PENSTOCK_LIFELINE_FD"
LIFELINE_GRACE_S: Final = 15.0
"""Seconds after which a process whose launcher is gone ends itself, even while it drains."""
CALLBACKS_S: Final = 5.0
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAME_SIGNAL_S: Final = 1.0
_READ_BYTES: Final = 512
_IN_THE_WAY: Final = (FileExistsError, NotADirectoryError, IsADirectoryError)
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

log = logging.getLogger(__name__)


_forking: Final = threading.local()
"""`mask`: the signals that were blocked before this thread began to fork."""


def _read_from_pipe(_number: int, _frame: object) -> None:
    """Handle no signal here: its number is written into the wake-up pipe."""


def _hold_signals() -> None:
    """Let signals wait while this thread forks: the child shares the wake-up pipe until it has left it."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _forget_signals() -> None:
    """Let signals end a fork of this process, such as a worker of an environment, and not this process."""
    signal.set_wakeup_fd(-1)
    for number in _ENDING:
        if signal.getsignal(number) is _read_from_pipe:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    _release_signals()


class Lifecycle:
    """Whether the process should end, for all its threads. reason: why it is `draining`."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.draining = threading.Event()
        self._called_back = threading.Event()
        self.reason = ""
        self.interrupted = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._first_signal_s: float | None = None

    def install(self) -> None:
        """Watch signals and, when the environment names one, the lifeline. Main thread only."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        for number in _ENDING:
            # A process under `nohup` outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                # Signals are read from the wake-up pipe, which is written only where a handler exists.
                signal.signal(number, _read_from_pipe)
        os.register_at_fork(
            before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_signals
        )
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        lifeline = os.environ.pop(LIFELINE_VARIABLE, None)
        lifeline_fd = None if lifeline is None else int(lifeline)
        if lifeline_fd is not None:
            os.set_inheritable(lifeline_fd, False)
        arguments = (read_fd, lifeline_fd)
        threading.Thread(target=self._watch, args=arguments, name="lifecycle", daemon=True).start()

    def drain(self, reason: str) -> None:
        """Begin the end of the process; only the first call counts. Runs the callbacks in this thread."""
        with self._lock:
            if self.draining.is_set():
                return
            self.reason = reason
            # Before the event, whose waiters may end the process.
            log.info("draining", extra={"reason": reason})
            self.draining.set()
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            try:
                callback()
            except Exception:
                # A part that has ended already must not prevent the others from draining.
                log.exception("drain callback failed")
        self._called_back.set()

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, from any thread, when draining begins, or at once if it has begun."""
        with self._lock:
            if not self.draining.is_set():
                self._callbacks.append(callback)
                return
        callback()

    @contextmanager
    def calling_on_drain(self, callback: Callable[[], None]) -> Iterator[None]:
        """Register `callback` as `on_drain` does, for the duration of the block."""
        self.on_drain(callback)
        try:
            yield
        finally:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

    def await_callbacks(self) -> None:
        """Wait, when draining, until the callbacks have run, at most CALLBACKS_S."""
        if self.draining.is_set():
            self._called_back.wait(CALLBACKS_S)

    def _watch(self, signal_fd: int, lifeline_fd: int | None) -> None:
        selector = selectors.DefaultSelector()
        selector.register(signal_fd, selectors.EVENT_READ)
        if lifeline_fd is not None:
            selector.register(lifeline_fd, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                data = os.read(key.fd, _READ_BYTES)
                if key.fd == signal_fd:
                    self._on_signals(data)
                elif not data:
                    selector.unregister(key.fd)
                    timer = threading.Timer(LIFELINE_GRACE_S, os._exit, (EXIT_FAILED,))
                    timer.daemon = True
                    timer.start()
                    self.drain("the launcher is gone")

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in _ENDING:
                continue
            now = time.monotonic()
            if self._first_signal_s is None:
                self._first_signal_s = now
                self.interrupted = number == signal.SIGINT
                self.drain(signal.Signals(number).name)
            elif now - self._first_signal_s >= _SAME_SIGNAL_S:
                os._exit(EXIT_INTERRUPTED)


def run_service(main: Callable[[Lifecycle], int], role: str) -> int:
    """Run `main` as the body of a process and return its exit code.

    Fatal ends it with 1, ConfigurationError and AddressInUse with 2; RunFailed, a full disk and a file in the
    place of a folder with 3, each with its cause as the last line on stderr. SIGINT turns a clean end into
    130. An end with 0 is announced to the launcher.
    """
    logs.configure(role)
    keep_freed_memory()
    lifecycle = Lifecycle(role)
    lifecycle.install()
    try:
        try:
            code = main(lifecycle)
            if code == EXIT_OK:
                announce_end()
        finally:
            lifecycle.await_callbacks()
    except RunFailed as error:
        return _last_line(str(error), EXIT_RUN_FAILED)
    except Fatal as error:
        return _last_line(str(error), EXIT_FAILED)
    except (ConfigurationError, AddressInUse) as error:
        return _last_line(str(error), EXIT_USAGE)
    except _IN_THE_WAY as error:
        if error.filename is None:
            raise
        text = f"{role} cannot use {error.filename}: {error.strerror}; move it away, then resume"
        return _last_line(text, EXIT_RUN_FAILED)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        remedy = (
            "name a place that can be written" if error.errno == errno.EROFS else "make room, then resume"
        )
        text = f"{role} cannot write {error.filename or 'its files'}: {error.strerror}; {remedy}"
        return _last_line(text, EXIT_RUN_FAILED)
    return EXIT_INTERRUPTED if code == EXIT_OK and lifecycle.interrupted else code


def leave(code: int) -> NoReturn:
    """End a drained process with exit status `code`, without waiting for threads.

    Threads inside gRPC could block the interpreter's normal end.
    """
    with suppress(OSError):  # a full disk must not change the exit code
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _last_line(text: str, code: int) -> int:
    # On a full disk the line is lost, and the exit code remains.
    with suppress(OSError):
        sys.stderr.write(one_line(text) + "\n")
        sys.stderr.flush()
    return code


@dataclass(slots=True)
class BackgroundTasks:
    """Background tasks of a server; `first_error` raises the error of any of them."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def send(self, task: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(task))

    async def first_error(self) -> None:
        """Wait without end for the error of a task, and raise it."""
        while True:
            done, _ = await asyncio.wait(self.tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self.tasks.discard(task)
                task.result()


SWITCH_INTERVAL_S: Final = 0.0005


def share_interpreter() -> None:
    """Let a computing thread yield to a waiting one after half a millisecond; call once, early.

    Python's default of 5 ms is longer than a step of an actor and several gradient steps of a learner, and a
    thread that calls Redis or a broker needs the interpreter after each call.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


Result = TypeVar("Result")


def give_way(niceness: int) -> None:
    """Lower the priority of the calling thread by `niceness`, 0 to 19; does nothing except on Linux."""
    if sys.platform == "linux":
        os.nice(niceness)


def giving_way(work: Callable[[], Result], niceness: int) -> Result:
    """Run `work` in a thread of lower priority, and return its result or raise its error."""
    with ThreadPoolExecutor(1, "giving-way", initializer=partial(give_way, niceness)) as thread:
        return thread.submit(work).result()
