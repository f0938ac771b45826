"""The meeting of the processes of one learner, by the variables that torchrun puts into their environment.

`penstock train --ranks N` and `learner.ranks` set the same variables (`penstock.launch.run.ranks`). Ranks
that do not meet within `learner.rank_timeout_s`, or were given different configurations, end with the cause.
"""

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import (  # type: ignore[attr-defined] # public, by their documentation
    PrefixStore,
    Store,
    rendezvous,
)

from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.algorithms.algorithm import Algorithm, Update
from penstock.learner.algorithms.shared.rank_group import RankGroup
from penstock.learner.progress import configuration_hash
from penstock.learner.ranks.collectives import TorchGroup
from penstock.learner.ranks.connection import RankConnection
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal

_LOOPBACK: Final = "lo"
_ASK_S: Final = 0.05
_INTEGERS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The place of a process among the ranks.

    rank: of `size`. on_host: the same among those of this machine.
    """

    rank: int = 0
    size: int = 1
    on_host: int = 0
    size_on_host: int = 1

    @property
    def spans_machines(self) -> bool:
        """Return whether other ranks are on other machines."""
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


class Meeting:
    """The ranks together.

    turns: the connection on which rank 0 announces updates. feed: the one for payloads.
    """

    def __init__(
        self, place: RankPlace, group: TorchGroup, turns: RankConnection, feed: RankConnection
    ) -> None:
        self.place = place
        self.group: RankGroup = group
        self.turns = turns
        self.feed = feed

    def agree(self, algorithm: Algorithm, update: Update, *, draining: bool) -> bool:
        """Return, after an update, whether any rank was asked to end.

        Raises Fatal when ranks have drifted apart.
        """
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
    """Wait for the other ranks.

    Args:
        place: of this process.
        settings: of the run; every rank must have the same.
        device: of this rank's computation.

    Raises:
        Fatal: ranks do not come within `learner.rank_timeout_s`.
        ConfigurationError: the ranks' configurations differ.
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
    group = TorchGroup(dist.group.WORLD)
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
    """Raise ConfigurationError for ranks on several machines where plaintext is not allowed.

    Ranks speak in plaintext.
    """
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


def _check_same(group: TorchGroup, settings: Settings) -> None:
    digests = torch.zeros(group.size, dtype=torch.int64)
    digests[group.rank] = int(configuration_hash(settings)[:15], 16)
    others = (group.sum_(digests) != digests[0]).nonzero().flatten().tolist()
    if others:
        raise ConfigurationError(
            f"ranks {others} were given another configuration than rank 0; give all the same"
        )


def _checksum(algorithm: Algorithm) -> int:
    """Return the sum of all weights' bits as whole numbers modulo 2⁶⁴: exact, and independent of order."""
    return sum(_bits(module) for module in algorithm.published_modules().values())


def _bits(module: nn.Module) -> int:
    sums = [
        parameter.detach().view(_INTEGERS[parameter.element_size()]).sum(dtype=torch.int64)
        for parameter in module.parameters()
    ]
    return int(torch.stack(sums).sum())
