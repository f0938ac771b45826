"""Failures while a run learns: no update for too long, updates that fail, and the sessions that cause it."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from safetensors.torch import save_file
from torch import Tensor

from penstock.broker.log.replies import SessionRow, Status
from penstock.learner.algorithms.algorithm import Update
from penstock.learner.batch import Batch
from penstock.learner.feed.log_feed import LogBatch
from penstock.learner.ledger import Drop
from penstock.learner.probe import Quarantine
from penstock.protocol.messages import Role
from penstock.runtime.exit import RunFailed

if TYPE_CHECKING:
    from penstock.learner.learner import Learner

UPDATE: Final = "update"
"""The event that health watches: an update, not the arrival of experience that is dropped."""
_BOOKED_AS: Final = {"nan": Drop.NAN, "implausible": Drop.INVALID, "error": Drop.INVALID}
"""By the reason for which an update fails."""
_MAX_IN_A_ROW: Final = 3
_WHAT: Final = {
    "nan": "were not finite",
    "implausible": "had a |log π/μ| above algorithm.max_log_ratio",
    "error": "raised an exception",
}
_REMEDY: Final = {
    "nan": "lower algorithm.learning_rate or look at the environment's rewards",
    "implausible": "look whether actors act with the weights they name, or raise algorithm.max_log_ratio",
    "error": "the learner's log has it",
}
LAST_READ_S: Final = 20.0
"""Longer than the 15 s between two scrapes of the shipped Prometheus."""
MOST_KEPT: Final = 16
"""Batches kept as evidence."""

log = logging.getLogger(__name__)


# ---- Why a run makes no updates, in words that name what a person must look at.


def cause(status: Status, dropped: Mapping[str, int], limit_s: float) -> str:
    return f"no update for {limit_s:g} s (learner.stall_timeout_s): {_reason(status, dropped)}"


def _reason(status: Status, dropped: Mapping[str, int]) -> str:
    actors = [row for row in status.sessions if row.role is Role.ROLLOUT]
    if not actors:
        return (
            "all actors are gone, no rollout worker has an open session; their logs say why"
            if status.log_head
            else "no rollout worker has come; start one, or wait longer (learner.stall_timeout_s)"
        )
    found = []
    if dropped:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        found.append(f"all that arrived was dropped ({counts})")
    if all(row.applied_version < status.latest.version for row in actors):
        found.append(f"no actor acts with the newest weights: {_lag(actors, status.latest.version)}")
    if not found:
        found.append(
            f"{len(actors)} rollout workers are connected and do not fill a batch; "
            f"{status.log_entries} entries are in the log"
        )
    return "; ".join(found)


def _lag(actors: Sequence[SessionRow], newest: int) -> str:
    worst = min(actors, key=lambda row: row.applied_version)
    return (
        f"{worst.actor_id} acts with version {worst.applied_version}, version {newest} is published; "
        "they do not reach it, or its environment stands still"
    )


# ---- Fragments that were not trained because an update fails with them, and their senders.


def failed_fragments(log_batch: LogBatch, update: Update | None) -> tuple[dict[int, Drop], int]:
    """Return the fragments of a batch that were not trained, and their steps; a recording has no numbers.

    update: None where all of the batch was dropped before.
    """
    if update is None:
        return {}, 0
    if update.reason in _BOOKED_AS:
        return dict.fromkeys(log_batch.trained, _BOOKED_AS[update.reason]), log_batch.steps
    in_batch = set(log_batch.trained)
    failed = {number: _BOOKED_AS[why] for number, why in update.culprits.items() if number in in_batch}
    return failed, update.left_out


def suspect_senders(quarantine: Quarantine, log_batch: LogBatch, failed: Mapping[int, Drop]) -> None:
    """Report the senders of failed fragments. A batch that fails whole has no culprit but an only sender."""
    if len(failed) == len(log_batch.trained) > 1:
        if len(log_batch.actors) == 1:
            ((session, actor_id),) = log_batch.actors.items()
            quarantine.suspect(session, actor_id, f"all of its batch up to log entry {log_batch.last} fails")
        return
    for number, reason in failed.items():
        origin = log_batch.origins.get(number)
        session = 0 if origin is None else origin.session
        actor_id = log_batch.actors.get(session, "")
        words = {"number": number, "actor": actor_id, "session": session, "reason": reason.value}
        log.error("a fragment was left out: the update fails with it", extra=words)
        if session:
            quarantine.suspect(session, actor_id, f"log entry {number} makes updates fail")


# ---- The watch on updates.


class UpdateWatch:
    """Watches that a learner makes an update in time, and that its updates do not fail one after the other.

    An update that was undone leaves its batch as evidence; several in a row end the run.
    """

    def __init__(self, learner: "Learner") -> None:
        self._health, self._draining = learner.health, learner.draining
        self._status = learner.learner_log.status
        self._timeout_s = learner.settings.learner.stall_timeout_s
        self._folder = learner.run_dir / "evidence"
        self._dropped: Counter[str] = Counter()
        self._failed_in_a_row = 0
        self._senders: set[str] = set()
        self._evidence, self._reason = "", "nan"

    def note_dropped(self, reasons: Iterable[Drop]) -> None:
        self._dropped.update(reason.value for reason in reasons)

    def note_update(self) -> None:
        self._health.progress(UPDATE)
        self._dropped.clear()

    def stall(self) -> str:
        """Return why no update was made in `learner.stall_timeout_s`, which turns health red; "" before."""
        if not self._health.has_stalled(UPDATE):
            return ""
        text = cause(self._status(), self._dropped, self._timeout_s)
        self._health.fail(text)
        return text

    def note_failed(self, log_batch: LogBatch, update: Update, count: int) -> None:
        """Keep the evidence of an update that was undone. count: updates applied before it."""
        self._failed_in_a_row += 1
        self._senders.update(log_batch.actors.values())
        self._evidence = keep_evidence(self._folder, log_batch, update, count)
        self._reason = update.reason
        words = {"evidence": self._evidence, "last": log_batch.last, "reason": update.reason}
        log.error("update skipped", extra=words, exc_info=update.error)

    def note_applied(self) -> None:
        self._failed_in_a_row = 0
        self._senders.clear()

    @property
    def is_hopeless(self) -> bool:
        """Whether as many updates in a row failed, with batches of as many actors or of all there are."""
        if self._failed_in_a_row < _MAX_IN_A_ROW:
            return False
        there = {row.actor_id for row in self._status().sessions if row.role is not Role.EVALUATION}
        return len(self._senders) >= _MAX_IN_A_ROW or there <= self._senders

    def give_up(self) -> NoReturn:
        """End the run: a process that started again would fail in the same way. Raises RunFailed.

        Call it after a checkpoint that books the failed batches as dropped, so that the run can be resumed
        with other settings. All of them may have failed within a second: wait for a collector of metrics.
        """
        self._health.await_readers(LAST_READ_S, self._draining)
        raise RunFailed(
            f"{_MAX_IN_A_ROW} updates in a row {_WHAT[self._reason]}; evidence in {self._evidence}; "
            f"{_REMEDY[self._reason]}"
        )


def keep_evidence(folder: Path, log_batch: LogBatch, update: Update, count: int) -> str:
    """Write a batch and its origin; returns the path without endings. count: updates made, for its name."""
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / f"nan-{count:08d}-{log_batch.last}"
    origin = {
        "entries": list(log_batch.trained),
        "updates": list(log_batch.updates),
        "versions": list(log_batch.versions),
        "metrics": update.metrics,
    }
    base.with_suffix(".json").write_text(json.dumps(origin) + "\n")
    if log_batch.batch is not None:
        save_file(_tensors(log_batch.batch), base.with_suffix(".safetensors"))
    kept = sorted(folder.glob("nan-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    for path in kept[:-MOST_KEPT]:
        path.with_suffix(".safetensors").unlink(missing_ok=True)
        path.unlink()
    return str(base)


_KEPT: Final = (
    "reward", "terminated", "truncated", "valid", "log_prob", "final_slot", "final_step", "update"
)  # fmt: skip


def _tensors(batch: Batch) -> dict[str, Tensor]:
    named = {name: getattr(batch, name) for name in _KEPT} | batch.observation | batch.action
    named |= {f"final/{name}": tensor for name, tensor in batch.final_observation.items()}
    return {name: tensor.cpu().contiguous() for name, tensor in named.items()}
