"""Read again what an algorithm retained.

The log is the storage of replay, a checkpoint holds only what is in it.

Between taking the lease and the first update of a resumed learner. An entry that is not there any more was
booked when it entered, so the books stay whole; the memory comes back smaller, and that is said.
"""

import logging
from typing import Final

import torch

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.learner_records import LogEntry
from penstock.learner.algorithms.algorithm import Algorithm
from penstock.learner.batch import assemble
from penstock.learner.feed.payloads import opened
from penstock.learner.lease import LeaseKeeper
from penstock.protocol.ranges import Ranges
from penstock.protocol.schema import FragmentSchema
from penstock.runtime.failpoint import failpoint

_READ: Final = 64

log = logging.getLogger(__name__)


def reload(
    learner_log: LearnerLog,
    lease: LeaseKeeper,
    algorithm: Algorithm,
    *,
    run_name: str,
    schema: FragmentSchema,
    ranges: Ranges,
    device: torch.device,
    position: int,
) -> None:
    """Give the algorithm back what lies in the log from `retain_from` up to `position`.

    It does nothing where the algorithm retains nothing.

    Raises ValueError where an entry is not what it was when it entered.
    """
    first = algorithm.retain_from()
    if first is None:
        return
    after = first - 1
    while after < position:
        failpoint("recall.reading", after)
        found = lease.patiently(lambda: learner_log.read(after, _READ, 0))  # noqa: B023 - called before the next turn
        entries = [entry for entry in found if entry.number <= position]
        if not entries:
            break
        after = entries[-1].number
        _give(algorithm, learner_log, entries, run_name, schema, ranges, device)
    lost = algorithm.end_reload()
    words = {"first": first, "position": position, "lost": lost}
    if lost:
        log.error("replay comes back smaller: the log does not hold all of it any more", extra=words)
    else:
        log.info("replay was read again", extra=words)


def _give(
    algorithm: Algorithm,
    learner_log: LearnerLog,
    entries: list[LogEntry],
    run_name: str,
    schema: FragmentSchema,
    ranges: Ranges,
    device: torch.device,
) -> None:
    payloads = learner_log.fetch([entry.number for entry in entries], [entry.size for entry in entries])
    loaded, places = [], []
    for entry, payload in zip(entries, payloads, strict=True):
        if entry.header is None or payload is None:
            continue
        try:
            loaded.append(opened(entry.header, payload, schema, ranges, run_name))
        except ValueError:
            continue  # Booked `invalid` when it was read the first time: it is not in replay.
        places.append((entry.number, entry.size))
    if loaded:
        algorithm.reload(assemble(loaded, device, places))
