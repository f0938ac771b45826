"""The time that a publication takes of the learner's loop: copying the weights and handing them over.

The publisher is the learner's own; it encodes and sends in its thread, beside the loop.
"""

import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks.fragments import box
from benchmarks.publication import PAUSE_S, learner
from benchmarks.services import Services, services
from benchmarks.table import Cell, Options, Table
from learner.lease import LeaseKeeper
from learner.probe import Quarantine, make_probe
from learner.publish.publish_interval import PublishInterval
from learner.publish.publisher import PendingPublication, Publisher
from penstock.config.settings import LearnerSection, PolicySection
from penstock.policy.build import build
from penstock.policy.policy import Policy
from penstock.policy.weights import snapshot
from penstock.wire.spaces import Discrete

OFFERS: Final = 200
AIM_MS: Final = 1.0


def table(options: Options) -> Table:
    """Return the milliseconds of the learner's own time that a publication takes."""
    with services(durability="fsync_1s") as here:
        parts = offers(here, OFFERS * options.repeat)
    rows: list[Sequence[Cell]] = [
        (name, *(float(np.quantile(seconds, q)) * 1000 for q in (0.5, 0.99)))
        for name, seconds in parts.items()
    ]
    return Table(
        title="what a publication of a 1 MB policy takes of the learner's loop",
        columns=("part", "p50 ms", "p99 ms"),
        rows=rows,
        note=f"wanted: ≤ {AIM_MS:g} ms; encoding and sending go on beside the loop",
    )


def policy() -> Policy:
    """Return a policy of about 1 MB."""
    return build(box(4), Discrete(2), PolicySection(hidden_sizes=(340, 340)), seed=0)


def offers(here: Services, count: int) -> dict[str, list[float]]:
    """Return the seconds of each of `count` publications.

    Copying the weights, handing them over, and both.
    """
    module, stop = policy(), threading.Event()
    parts: dict[str, list[float]] = {"copy the weights": [], "hand them over": [], "both": []}
    with learner(here) as log:
        quarantine = Quarantine(make_probe(box(4), module, 0), policy(), 1e-3)
        lease = LeaseKeeper(
            log, 600.0, stop=stop, quarantine=quarantine, on_reopened=stop.set, description=str
        )
        interval = PublishInterval(LearnerSection(), log.fetched_versions)
        publisher = Publisher(log, lease, quarantine, lambda _: None, interval, stop)
        thread = threading.Thread(target=publisher.run)
        thread.start()
        for update in range(count):
            began_s = time.perf_counter()
            weights = snapshot(module)
            copied_s = time.perf_counter()
            publisher.offer(PendingPublication(settled=0, weights=weights, update=update))
            given_s = time.perf_counter()
            spans = (copied_s - began_s, given_s - copied_s, given_s - began_s)
            for name, seconds in zip(parts, spans, strict=True):
                parts[name].append(seconds)
            time.sleep(PAUSE_S)
        publisher.flush()
        stop.set()
        publisher.wake()
        thread.join()
    return parts
