"""The lease of a run: taken, then renewed from a thread; each renewal brings the state of the run.

A refused renewal (`FENCED`: another learner has taken over) ends the process: nothing is written after it. A
log that Redis closed by restarting is opened again here; `on_reopened` then has the weights published once
more. Other callers that meet the closed log call through `patiently`, which hastens the next renewal and
waits.
"""

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import Final, TypeVar

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Lease, Renewal
from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.probe import Quarantine
from penstock.protocol.refusal import Reason, Refused
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint
from penstock.runtime.retry import Interrupted

T = TypeVar("T")

_MAX_INTERVAL_S: Final = 1.0
_CLOSED_WAIT_S: Final = 0.1
_LOOK: Final = 0.7
"""Share of the time between two renewals after which a waiting learner asks again, so that it sees each one.

Each script call moves the run's clock on by a bounded time (`broker/log/scripts/_run.lua`).
"""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""A file of Linux with an id that changes with each boot of the machine."""

log = logging.getLogger(__name__)


def take(
    learner_log: LearnerLog, settings: Settings, run_dir: Path, draining: threading.Event, *, is_held: bool
) -> Lease:
    """Wait for the lease of a run; raises Interrupted where the process is asked to end meanwhile.

    Where another learner holds the folder (`is_held` False), that one may be frozen: it has lost its lease
    then, and is fenced. Under one name the two would fence each other off in turn, so this one takes another
    name, and waits only for the end of the lease that is held now. Raises ConfigurationError when the other
    one renews its lease.
    """
    holder = holder_of(run_dir) if is_held else f"{holder_of(run_dir)}:{secrets.token_hex(4)}"
    ttl_s, left_ms = settings.learner.lease_ttl_s, 0
    while not draining.is_set():
        try:
            lease = learner_log.acquire(settings.run, holder, int(ttl_s * 1000))
        except Refused as error:
            was_left_ms, left_ms = left_ms, error.refusal.retry_after_ms
            is_renewed = 0 < was_left_ms < left_ms
            if error.refusal.reason is not Reason.FENCED or (is_renewed and not is_held):
                raise ConfigurationError(
                    f"run_dir={run_dir}: another learner is using this run ({error.refusal.detail}); "
                    "stop it first, or give this one a folder of its own"
                ) from error
            if not was_left_ms:
                words = {"why": error.refusal.detail}
                log.warning(
                    "waiting for the lease: another learner holds it; stop that one, or use another Redis",
                    extra=words,
                )
            draining.wait(min(max(left_ms / 1000, _CLOSED_WAIT_S), _LOOK * renewal_interval_s(ttl_s)))
            continue
        failpoint("lease.acquired", lease.epoch)
        metrics.LEASE_EPOCH.set(lease.epoch)
        log.info("lease taken", extra={"epoch": lease.epoch, "holder": holder})
        return lease
    raise Interrupted


def holder_of(run_dir: Path) -> str:
    """Return the name under which every process of the learner of this folder holds its lease.

    Because it is the same, a restarted learner takes its own lease over at once. Host name and path may be
    those of another machine too, as of containers: under one name both would take the lease from one another
    for ever. So the name holds the folder itself and the boot of its machine as well.
    """
    folder = run_dir.stat()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()}:{run_dir.resolve()}:{folder.st_dev}-{folder.st_ino}:{boot[:8]}"


def renewal_interval_s(ttl_s: float) -> float:
    return min(ttl_s / 3, _MAX_INTERVAL_S)


@dataclass(eq=False)
class LeaseKeeper:
    """Renews from `run`; `renewal` is the newest answer. Call `renew` once before the thread starts."""

    learner_log: LearnerLog
    ttl_s: InitVar[float]
    _: KW_ONLY
    stop: threading.Event
    quarantine: Quarantine
    on_reopened: Callable[[], None]
    description: Callable[[], str]

    def __post_init__(self, ttl_s: float) -> None:
        self._interval_s = renewal_interval_s(ttl_s)
        self._hasten = threading.Event()
        self._closes_again = True
        self.renewal: Renewal = self._renew()

    def run(self) -> None:
        while not self.stop.is_set():
            failpoint("lease.waiting")
            self._hasten.wait(self._interval_s)
            self._hasten.clear()
            if self.stop.is_set():
                return
            failpoint("lease.renewing")
            self.renewal = self._renew()
            self._observe()

    def wake(self) -> None:
        self._hasten.set()

    def patiently(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which is repeated while the log waits to be opened again.

        Raises Interrupted when the process ends first, and Fatal when another learner has taken over.
        """
        while True:
            try:
                return call()
            except Refused as error:
                if error.refusal.reason is not Reason.NOT_READY:
                    raise fenced(error) from error
            if self.stop.is_set():
                raise Interrupted
            self._hasten.set()
            self.stop.wait(_CLOSED_WAIT_S)

    def confirm(self) -> None:
        try:
            self.learner_log.renew()
        except Refused as error:
            raise fenced(error) from error

    def _observe(self) -> None:
        try:
            self.quarantine.close_sessions(self.learner_log.convict, again=self._closes_again)
            self._closes_again = False
            self.learner_log.observe(self.description())
        except Refused as error:
            if error.refusal.reason is not Reason.NOT_READY:
                raise fenced(error) from error
            self._hasten.set()

    def _renew(self) -> Renewal:
        try:
            renewal = self.learner_log.renew()
            if renewal.closed:
                log.warning("Redis was restarted: opening the log again")
                self.learner_log.reopen(self.learner_log.snapshot())
                self.on_reopened()
                self._closes_again = True
        except Refused as error:
            raise fenced(error) from error
        self.quarantine.check(renewal.probes)
        metrics.LOG_BYTES.set(renewal.log_bytes)
        metrics.LOG_ENTRIES.set(renewal.log_entries)
        metrics.OUTSTANDING_STEPS.set(renewal.outstanding)
        metrics.SETTLED_STEPS.set(renewal.settled_steps)
        return renewal


def fenced(error: Refused) -> Fatal:
    return Fatal(f"this learner may not write any longer ({error.refusal}); it ends without writing")
