"""Versions of a run's policy in its folder, and the servers of a workload.

FinalPolicy, read_final   the policy that a run ended with
checkpoint_tensors        part of the newest whole checkpoint of a run
Services                  commands of the further processes of a run, and their addresses

For a record's `server`, whose answers are not single actions:

HostedService, BackgroundTasks, Source   the service, its background tasks, the source of its versions
RunFollower, ServedQueue, count_not_learned   the connection to a live run, and the queue of its fragments
SampleJournal             samples that were sent, for the audit
LoadedVersions, Loaded, Weights, Choice, Answered   versions in memory, and the choice of one for a client
Traffic, CanaryMonitor, make_traffic   shares of clients by version, and a canary's trial
Episodes, Episode         open episodes of clients: ids, owners, arms, expiry
Opinion                   a person's rating of an episode
CallerShares              each caller's share of a bounded resource
RequestErrors             refusals, counted and logged
check_amount, check_count, check_request_id   checks of rewards and ids in requests
ARMS, served_versions     arms and versions as messages have them
check_window              refuses a window of rewards whose episodes could not be learned from
"""

from pathlib import Path

from torch import Tensor

from penstock.actor.link.ack_journal import SampleJournal
from penstock.actor.serving.batcher import Answered, Loaded
from penstock.actor.serving.episodes import CallerShares, Episode, Episodes, Opinion
from penstock.actor.serving.experience import RunFollower, ServedQueue, count_not_learned
from penstock.actor.serving.loaded_versions import Choice, LoadedVersions, Weights
from penstock.actor.serving.release import CanaryMonitor, Traffic
from penstock.actor.serving.request_handler import RequestErrors
from penstock.actor.serving.requests import ARMS, check_amount, check_count, check_request_id, served_versions
from penstock.actor.serving.server_process import (
    HostedService,
    Source,
    check_window,
    make_traffic,
)
from penstock.config.workload import Services
from penstock.learner.algorithms.algorithm import under
from penstock.learner.checkpoint.store import CheckpointStore
from penstock.learner.publish.kept_versions import FinalPolicy, read_final
from penstock.runtime.lifecycle import BackgroundTasks

__all__ = [
    "ARMS",
    "Answered",
    "BackgroundTasks",
    "CallerShares",
    "CanaryMonitor",
    "Choice",
    "Episode",
    "Episodes",
    "FinalPolicy",
    "HostedService",
    "Loaded",
    "LoadedVersions",
    "Opinion",
    "RequestErrors",
    "RunFollower",
    "SampleJournal",
    "ServedQueue",
    "Services",
    "Source",
    "Traffic",
    "Weights",
    "check_amount",
    "check_count",
    "check_request_id",
    "check_window",
    "checkpoint_tensors",
    "count_not_learned",
    "make_traffic",
    "read_final",
    "served_versions",
]


def checkpoint_tensors(run_dir: Path, part: str) -> dict[str, Tensor] | None:
    """Return the tensors of one part of a run's newest whole checkpoint, on the CPU, by name in it.

    Call it when the learner has ended, because the learner writes to that folder.

    Args:
        run_dir: the run's folder.
        part: the first element of the tensors' paths, such as "critic".

    Returns:
        The tensors, of the shape and dtype they were trained in; None: no checkpoint is whole.
    """
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return None
    store = CheckpointStore(folder, keep=2)
    newest = store.newest([(name, None) for name in store.ids()])
    return None if newest is None else under(newest.tensors, f"{part}/")
