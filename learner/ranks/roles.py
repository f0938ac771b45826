"""The ranks of one learner: how they meet, the requests of rank 0, and the loop in which the others follow.

    rank 0   start → [begin_update → own part → agree | skip | restore → agree] → end
    others   receive "state" → load it → [receive "update" → own part of the batch → update → agree
                                      | receive "skip" → own part of the batch → drop it
                                      | receive "restore" → restore → agree] → receive "end"

Rank 0 holds the lease, reads the log, publishes and writes checkpoints as a single rank does. The others
connect to Redis to read payloads and write nothing there. On a signal to end, such a rank informs rank 0 with
the next update and ends with it; when rank 0 is gone it ends at once, with exit 1. Health watches an update
that has begun; the wait for rank 0 is not a stall.

Ranks meet by the variables that torchrun puts into their environment; `penstock train --ranks N` and
`learner.ranks` set the same ones (`penstock.launch.run.services`). Ranks that do not meet within
`learner.rank_timeout_s`, or were given different configurations, end with the cause.
"""

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final, Self

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch import distributed as dist
from torch.distributed import (  # type: ignore[attr-defined] # public, by their documentation
    PrefixStore,
    Store,
    rendezvous,
)

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import LogEntry
from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Update
from penstock.learner.algorithms.rows import RankGroup, add_up, lost
from penstock.learner.batch import Batch
from penstock.learner.failures import UPDATE
from penstock.learner.feed.log_feed import Found, OwnPayloads, Payloads, ReadAhead, State
from penstock.learner.ledger import DIGEST_BYTES, configuration_hash
from penstock.learner.model import Model
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ThreadGroup
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK, Fatal
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle, leave

# ---- Messages from rank 0 to all others over gloo: a JSON object, and bytes.

PATIENCE: Final = timedelta(days=365)
"""Longest wait for a message: a learner may be paused, or wait for its lease, for any time."""


class RankConnection:
    """Sends messages: `send` on rank 0 and `receive` on every other, in turn."""

    def __init__(self) -> None:
        """Connect the ranks; all of them make their connections in the same order."""
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)

    def send(self, words: dict[str, Any], data: bytes = b"") -> None:
        """Send to all other ranks; does not wait until they have received."""
        text = json.dumps(words).encode()
        self._broadcast(torch.tensor([len(text), len(data)]))
        self._broadcast(torch.frombuffer(bytearray(text + data), dtype=torch.uint8))

    def receive(self) -> tuple[dict[str, Any], bytes]:
        sizes = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        both = bytes(self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8)).numpy())
        return dict(json.loads(both[: sizes[0]])), both[sizes[0] :]

    def add_up(self, numbers: Tensor) -> Tensor:
        """Add numbers up over all ranks, in place, which is how ranks answer."""
        return add_up(numbers, self._group)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        try:
            dist.broadcast(tensor, src=0, group=self._group)
        except RuntimeError as error:
            raise lost(error) from error
        return tensor


_LOOPBACK: Final = "lo"
_ASK_S: Final = 0.05
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The rank of a process, of `size`; on_host, size_on_host: the same among those of this machine."""

    rank: int = 0
    size: int = 1
    on_host: int = 0
    size_on_host: int = 1

    @property
    def spans_machines(self) -> bool:
        return self.size > self.size_on_host


def place_of(environ: Mapping[str, str]) -> RankPlace:
    """Return the place that torchrun's variables in `environ` name; rank 0 of one without them."""
    size = int(environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return RankPlace()
    return RankPlace(
        rank=int(environ["RANK"]),
        size=size,
        on_host=int(environ.get("LOCAL_RANK", "0")),
        size_on_host=int(environ.get("LOCAL_WORLD_SIZE", "1")),
    )


@dataclass(frozen=True, slots=True)
class Meeting:
    """The connected ranks. turns: connection for rank 0's requests of its main thread; feed: of its feed."""

    place: RankPlace
    group: RankGroup
    turns: RankConnection
    feed: RankConnection

    def agree(self, algorithm: Algorithm, update: Update, *, draining: bool) -> bool:
        """Return whether any rank shall end; raises Fatal when the weights of ranks differ."""
        every = torch.zeros((self.place.size, 4), dtype=torch.int64)
        own = [int(update.applied), update.steps, _checksum(algorithm), int(draining)]
        every[self.place.rank] = torch.tensor(own)
        self.group.sum_(every)
        same = (every[:, :3] == every[0, :3]).all(1)
        if not bool(same.all()):
            apart = (~same).nonzero().flatten().tolist()
            raise Fatal(
                f"ranks {apart} have other weights than rank 0 after the same updates; "
                "run all ranks on machines of one kind, with one build of torch"
            )
        return bool(every[:, 3].any())


def meet(place: RankPlace, settings: Settings, device: torch.device) -> Meeting:
    """Wait for the other ranks. device: of this rank's computation.

    Raises Fatal when they do not come within `learner.rank_timeout_s`, ConfigurationError when the ranks'
    configurations differ.
    """
    _check_network(place, settings)
    timeout_s = settings.learner.rank_timeout_s
    timeout = timedelta(seconds=timeout_s)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
            store=_agreed(next(rendezvous("env://", timeout=timeout))[0], place, timeout_s),
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=device if is_gpu else None,
        )
        # In this order on every rank.
        turns, feed = RankConnection(), RankConnection()
    except RuntimeError as error:
        raise Fatal(f"the {place.size} ranks did not meet within {timeout_s:g} s: {error}") from error
    assert dist.group.WORLD is not None, "the process group was made just now"
    group = RankGroup(dist.group.WORLD)
    _check_same(group, settings)
    metrics.RANKS.set(place.size)
    metrics.RANK.set(place.rank)
    return Meeting(place, group, turns, feed)


def _agreed(store: Store, place: RankPlace, timeout_s: float) -> Store:
    """Return a part of the store that only the processes of this attempt use.

    torchrun keeps one store over all its restarts, with the entries of dead ranks, and its agents on several
    machines do not count restarts alike. So rank 0 draws a name and lists the ranks that have answered to it;
    a rank that is not in the list has read the name of an earlier attempt.
    """
    me, deadline = secrets.token_hex(8), time.monotonic() + timeout_s
    if place.rank == 0:
        name = me
        store.set("name", name)
        answers = [f"{name}/answer/{rank}" for rank in range(1, place.size)]
        store.wait(answers, timedelta(seconds=timeout_s))
        store.set(f"{name}/present", " ".join(store.get(answer).decode() for answer in answers))
        return PrefixStore(f"{name}/", store)
    while time.monotonic() < deadline:
        # It polls, because torch logs every wait that times out.
        name = store.get("name").decode()
        store.set(f"{name}/answer/{place.rank}", me)
        if store.check([f"{name}/present"]) and me in store.get(f"{name}/present").decode().split():
            return PrefixStore(f"{name}/", store)
        time.sleep(_ASK_S)
    raise RuntimeError("rank 0 has sent no request")


def _check_network(place: RankPlace, settings: Settings) -> None:
    """Raise ConfigurationError for ranks on several machines where plaintext is not allowed."""
    if not place.spans_machines:
        names = {name for _, name in socket.if_nameindex()}
        if _LOOPBACK in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    elif not settings.learner.plaintext_ranks:
        raise ConfigurationError(
            "learner.plaintext_ranks=false: ranks on several machines exchange gradients and weights "
            "unencrypted; keep all other machines off that network, then say true"
        )


def _check_same(group: RankGroup, settings: Settings) -> None:
    digests = torch.zeros(group.size, dtype=torch.int64)
    digests[group.rank] = int(configuration_hash(settings)[:15], 16)
    others = (group.sum_(digests) != digests[0]).nonzero().flatten().tolist()
    if others:
        raise ConfigurationError(
            f"ranks {others} were given another configuration than rank 0; give all the same"
        )


def _checksum(algorithm: Algorithm) -> int:
    """Return the sum of all weights' bits as whole numbers modulo 2⁶⁴: exact, and independent of order."""
    sums = [
        parameter.detach().view(_INTEGERS[parameter.element_size()]).sum(dtype=torch.int64)
        for module in algorithm.published_modules().values()
        for parameter in module.parameters()
    ]
    return int(torch.stack(sums).sum())


# ---- Division of a batch's fragments among the ranks.


def divide(charges: Sequence[int], ranks: int) -> list[slice]:
    """Return consecutive fragments for each rank, of nearly equal charge; a rank may get none.

    The middle of a fragment decides to which rank's share it belongs. charges: environment steps of each.
    """
    total, before = sum(charges), 0
    of = []
    for charge in charges:
        of.append(min(ranks - 1, (2 * before + charge) * ranks // max(1, 2 * total)))
        before += charge
    starts = [sum(rank < at for rank in of) for at in range(ranks + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]


log = logging.getLogger(__name__)

RESTORED: Final = Update(applied=True)
"""What ranks compare after a restore, apart from their weights."""

# ---- Rank 0.


@dataclass(frozen=True, slots=True)
class Ranks:
    """The other ranks of this learner, as rank 0 uses them. meeting: None: there are no others.

    drain: called with the reason when another rank shall end.
    """

    meeting: Meeting | None
    drain: Callable[[str], None]

    def start(self, algorithm: Algorithm) -> None:
        """Send the current state of `algorithm` to all ranks."""
        if self.meeting is not None:
            self._send_state("state", algorithm.state())

    def payloads(self, own: Payloads) -> Payloads:
        """Return the source of payloads for the feed. own: that of this rank alone."""
        return own if self.meeting is None else SharedPayloads(own, self.meeting.feed)

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        """Have all ranks begin an update. progress: of `Algorithm.update`. is_flushed: of `Batch`."""
        self._send({"what": "update", "progress": progress, "is_flushed": is_flushed})

    def skip(self) -> None:
        """Have all ranks drop their part of the next batch."""
        self._send({"what": "skip"})

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        """Have all ranks restore a state as `algorithm` did; raises Fatal unless they agree afterwards."""
        if self.meeting is not None:
            self._send_state("restore", state)
            self.agree(algorithm, RESTORED)

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """Compare the ranks after an update; raises Fatal when their weights differ."""
        if self.meeting is not None and self.meeting.agree(algorithm, update, draining=False):
            self.drain("another rank shall end")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the other ranks end, with a failure where this one fails; ranks that are gone are skipped."""
        try:
            self._send({"what": "end", "failed": kind is not None})
        except Fatal as error:
            log.warning("the end could not be sent to the other ranks", extra={"why": str(error)})

    def _send_state(self, what: str, state: AlgorithmState) -> None:
        self._send({"what": what, "numbers": state.numbers}, save(state.tensors))

    def _send(self, words: dict[str, Any], data: bytes = b"") -> None:
        if self.meeting is not None:
            self.meeting.turns.send(words, data)


@dataclass(frozen=True, slots=True)
class SharedPayloads:
    """The `Payloads` of rank 0: it assigns entries, and each rank fetches its own."""

    own: Payloads
    connection: RankConnection

    def check(self, entries: Sequence[LogEntry]) -> list[Found]:
        """Have each rank check, and keep, a part of the entries; returns all results."""
        mine = entries[self._divided("check", entries)[0]]
        numbers = torch.zeros((len(entries), _COLUMNS), dtype=torch.int64)
        for row, found in zip(numbers, self.own.check(mine), strict=False):
            row.copy_(_numbers(found))
        return [_found(*row) for row in self.connection.add_up(numbers).tolist()]

    def batch(self, entries: Sequence[LogEntry]) -> Batch:
        """Assign the entries, and return rank 0's own part."""
        return self.own.batch(entries[self._divided("batch", entries)[0]])

    def _divided(self, what: str, entries: Sequence[LogEntry]) -> list[slice]:
        """Send every rank its part: the index of its first entry among all, and its numbers."""
        charges = [0 if entry.header is None else entry.header.charge for entry in entries]
        parts = divide(charges, self.connection.size)
        numbers = [[entry.number for entry in entries[part]] for part in parts]
        first = [part.start for part in parts]
        self.connection.send({"what": what, "of": len(entries), "first": first, "numbers": numbers})
        return parts


_COLUMNS: Final = 5
"""State, steps, bits of the reward, digest as a number, length of the digest."""


def _numbers(found: Found) -> torch.Tensor:
    digest = int.from_bytes(found.digest, "little", signed=True)
    reward = int(torch.tensor(found.reward, dtype=torch.float64).view(torch.int64))
    return torch.tensor([found.state, found.steps, reward, digest, len(found.digest)])


def _found(state: int, steps: int, reward: int, digest: int, digest_bytes: int) -> Found:
    return Found(
        State(state),
        steps=steps,
        reward=float(torch.tensor(reward).view(torch.float64)),
        digest=digest.to_bytes(DIGEST_BYTES, "little", signed=True)[:digest_bytes],
    )


# ---- Every other rank.


def follow(
    lifecycle: Lifecycle,
    settings: Settings,
    meeting: Meeting,
    model: Model,
    health: Health,
    connect: Callable[[], LearnerLog],
) -> int:
    """Make updates until rank 0 ends; returns the exit code. Raises Fatal when rank 0 has failed or is gone.

    model: of this rank. connect: opens the log to read payloads.
    """
    words, data = meeting.turns.receive()
    if words["what"] == "end":
        return _ended(words)
    model.algorithm.load(AlgorithmState(tensors=load(data), numbers=words["numbers"]))
    threads, learner_log = ThreadGroup(), connect()
    own = OwnPayloads(learner_log, settings, model)
    ahead = ReadAhead[Batch](settings.learner.prefetch_batches, threads.stop)
    feed = FollowingFeed(learner_log, own, meeting.feed, ahead, threads.stop)
    threads.start("feed", feed.run)
    health.watch(UPDATE, settings.learner.stall_timeout_s)
    health.suspend(UPDATE)
    health.set_ready(True)
    while True:
        began = time.perf_counter()
        words, data = meeting.turns.receive()
        metrics.RANK_WAIT_SECONDS.inc(time.perf_counter() - began)
        if words["what"] == "end":
            return _ended(words)
        health.expect(UPDATE, "its part of the batch did not come, or other ranks did not answer")
        update = _do(words, data, model, ahead)
        if update is not None:
            meeting.agree(model.algorithm, update, draining=lifecycle.draining.is_set())
        health.progress(UPDATE)
        health.suspend(UPDATE)


def _do(words: dict[str, Any], data: bytes, model: Model, ahead: ReadAhead[Batch]) -> Update | None:
    """Execute a request of rank 0; returns the update that all ranks compare, if there is one."""
    if words["what"] == "restore":
        model.algorithm.restore(AlgorithmState(tensors=load(data), numbers=words["numbers"]))
        return RESTORED
    # The batch is ready or on its way, because rank 0 has it.
    while (batch := ahead.take(_TAKE_S)) is None:
        pass
    batch.arrive()
    if words["what"] == "skip":
        return None
    batch = replace(batch, is_flushed=words["is_flushed"])
    update = model.algorithm.update(batch, progress=words["progress"])
    metrics.RANK_UPDATES.inc()
    return update


def _ended(words: dict[str, Any]) -> int:
    if words["failed"]:
        raise Fatal("rank 0 of this learner has failed, so this one ends; its log says why")
    log.info("rank 0 has ended")
    return EXIT_OK


_TAKE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class FollowingFeed:
    """Reads ahead what rank 0 assigns to this rank: call `run` in a thread."""

    learner_log: LearnerLog
    own: Payloads
    connection: RankConnection
    ahead: ReadAhead[Batch]
    stop: threading.Event

    def run(self) -> None:
        """Execute rank 0's requests until `stop`; an error ends the process.

        The main thread may wait for rank 0, which waits for this thread: so this one ends the process.
        """
        try:
            while not self.stop.is_set():
                self._follow()
        except Exception as error:
            log.exception("a thread of this rank died")
            sys.stderr.write(f"{error}\n")
            leave(EXIT_FAILED)

    def _follow(self) -> None:
        words, _ = self.connection.receive()
        numbers = [int(number) for number in words["numbers"][self.connection.rank]]
        if words["what"] == "check":
            self._check(numbers, int(words["first"][self.connection.rank]), int(words["of"]))
            return
        entries = self._entries(numbers)
        if len(entries) != len(numbers):
            raise Fatal(f"of log entries {numbers[0]}..{numbers[-1]} some were good and are gone now")
        self.ahead.put(self.own.batch(entries))

    def _check(self, numbers: list[int], first: int, of: int) -> None:
        """Check entries; one that is no longer in the log counts as missing."""
        entries = self._entries(numbers)
        found = dict(zip([entry.number for entry in entries], self.own.check(entries), strict=True))
        answer = torch.zeros((of, _COLUMNS), dtype=torch.int64)
        for row, number in enumerate(numbers, first):
            answer[row] = _numbers(found.get(number, Found(State.MISSING)))
        self.connection.add_up(answer)

    def _entries(self, numbers: list[int]) -> list[LogEntry]:
        by_number = {
            entry.number: entry for entry in self.learner_log.entries(numbers) if entry.header is not None
        }
        return [by_number[number] for number in numbers if number in by_number]
