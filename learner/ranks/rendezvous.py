"""The meeting of the processes of one learner, by the variables that torchrun puts into their environment.

`penstock train --ranks N` and `learner.ranks` set the same variables (`penstock.launch.run.services`). Ranks
that do not meet within `learner.rank_timeout_s`, or were given different configurations, end with the cause.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import (  # type: ignore[attr-defined] # public, by their documentation
    PrefixStore,
    Store,
    rendezvous,
)

from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.algorithms.algorithm import Algorithm, Update
from penstock.learner.ledger import configuration_hash
from penstock.learner.ranks.group import RankGroup, add_up, lost
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal

# ---- Messages from rank 0 to all others over gloo: words as JSON, with bytes where there is more.

PATIENCE: Final = timedelta(days=365)
"""A learner may be paused, or wait for its lease, for any length of time."""


class RankConnection:
    """Sends messages: `say` on rank 0 and `hear` on every other, in turn."""

    def __init__(self) -> None:
        """All ranks make theirs in the same order."""
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)

    def say(self, words: dict[str, Any], data: bytes = b"") -> None:
        """Send to all other ranks; returns before they have received."""
        text = json.dumps(words).encode()
        self._broadcast(torch.tensor([len(text), len(data)]))
        self._broadcast(torch.frombuffer(bytearray(text + data), dtype=torch.uint8))

    def hear(self) -> tuple[dict[str, Any], bytes]:
        sizes = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        both = bytes(self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8)).numpy())
        return dict(json.loads(both[: sizes[0]])), both[sizes[0] :]

    def add_up(self, numbers: Tensor) -> Tensor:
        """Add numbers up over all ranks, in place: this is how ranks answer."""
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
    """The place of a process among the ranks. rank: of `size`. on_host: the same on this machine."""

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
    """The ranks together.

    turns: the connection on which rank 0 announces updates. feed: the one for payloads.
    """

    place: RankPlace
    group: RankGroup
    turns: RankConnection
    feed: RankConnection

    def agree(self, algorithm: Algorithm, update: Update, *, draining: bool) -> bool:
        """Return whether any rank was asked to end; raises Fatal when ranks have drifted apart."""
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

    torchrun keeps one store over all its restarts, with what dead ranks have left there, and its agents on
    several machines do not count restarts alike. So rank 0 draws a name and lists the ranks that have
    answered to it; a rank that is not in the list has read the name of an earlier attempt.
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
        # Asked again and again: torch logs every wait that is not granted.
        name = store.get("name").decode()
        store.set(f"{name}/answer/{place.rank}", me)
        if store.check([f"{name}/present"]) and me in store.get(f"{name}/present").decode().split():
            return PrefixStore(f"{name}/", store)
        time.sleep(_ASK_S)
    raise RuntimeError("rank 0 has not called")


def _check_network(place: RankPlace, settings: Settings) -> None:
    """Raise ConfigurationError for ranks on several machines without leave to speak in plaintext."""
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
    """Return neighbouring fragments for each rank, in order, of nearly equal charge; a rank may get none.

    A fragment goes to the rank in whose part of the whole its middle lies. charges: environment steps of
    each.
    """
    total, before = sum(charges), 0
    of = []
    for charge in charges:
        of.append(min(ranks - 1, (2 * before + charge) * ranks // max(1, 2 * total)))
        before += charge
    starts = [sum(rank < at for rank in of) for at in range(ranks + 1)]
    return [slice(start, end) for start, end in pairwise(starts)]
