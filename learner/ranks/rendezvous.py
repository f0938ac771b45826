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
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import (  # type: ignore[attr-defined] # public, by their documentation
    PrefixStore,
    Store,
    rendezvous,
)

from penstock.config.settings import ConfigurationError, Settings
from penstock.learner.algorithms.algorithm import Algorithm, Update
from penstock.learner.algorithms.shared.rank_group import MinibatchSplit, RankGroup, RankRows, edges
from penstock.learner.batch import send
from penstock.learner.ledger import configuration_hash
from penstock.policy.normaliser import Moments, combine
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal

# ---- `RankGroup` of several processes, by torch.distributed: gloo between CPUs, NCCL between GPUs.


class TorchGroup:
    """Implements `RankGroup` for the ranks of a process group, in the thread of the loop."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def rows_of(self, steps: Tensor) -> RankRows:
        """Exchange which steps are chosen on all ranks, and return this rank's rows of them."""
        whole, first = self._side_by_side(steps)
        # Row numbers of a single rank: chosen steps, oldest first, then by column.
        numbers = (whole.flatten().cumsum(0) - 1).view_as(whole)
        mine = steps.cpu()
        own = numbers[: len(mine), first : first + mine.shape[1]][mine]
        return _Part(self, steps, int(whole.sum()), own, send(own, steps.device))

    def columns(self, values: Tensor) -> Tensor:
        """Return the columns of all ranks side by side, see `RankGroup`."""
        return self._side_by_side(values)[0]

    def listed(self, numbers: Sequence[int]) -> tuple[list[int], int]:
        """Return the numbers of all ranks, see `RankGroup`."""
        whole, first = self._side_by_side(torch.tensor([numbers], dtype=torch.int64))
        return whole[0].tolist(), first

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks in place, see `RankGroup`; raises Fatal when a rank is gone."""
        with metrics.RANK_EXCHANGE_SECONDS.time():
            try:
                dist.all_reduce(tensor, group=self._group)
            except RuntimeError as error:
                raise lost(error) from error
        return tensor

    def moments(self, own: Moments) -> Moments:
        """Combine moments in the order of the ranks, so that all get equal bits."""
        row = torch.cat([own.count.reshape(1), own.mean, own.spread])
        every = row.new_zeros((self.size, len(row)))
        every[self.rank] = row
        parts = [_moments(part) for part in self.sum_(every)]
        whole = parts[0]
        for part in parts[1:]:
            whole = combine(whole, part)
        return whole

    def placed(self, rows: Tensor, places: Tensor, total: int) -> Tensor:
        """Return rows [..., n] at int64 places [n] of [..., total], with the other ranks' rows at theirs."""
        whole = rows.new_zeros((*rows.shape[:-1], total))
        whole.index_copy_(-1, places, rows)
        return self.sum_(whole)

    def _side_by_side(self, values: Tensor) -> tuple[Tensor, int]:
        """Return the columns of all ranks on the CPU, and the index of the first of this one's."""
        shapes = torch.zeros((self.size, 2), dtype=torch.int64)
        shapes[self.rank] = torch.tensor(values.shape)
        self.sum_(shapes)
        first = int(shapes[: self.rank, 1].sum())
        kind = torch.uint8 if values.dtype is torch.bool else values.dtype
        whole = torch.zeros((int(shapes[:, 0].max()), int(shapes[:, 1].sum())), dtype=kind)
        whole[: len(values), first : first + values.shape[1]] = values.cpu()
        return self.sum_(whole).to(values.dtype), first


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's rows. numbers: int64 [n] on the CPU, rising; places: the same on the device."""

    group: TorchGroup
    steps: Tensor
    total: int
    numbers: Tensor
    places: Tensor

    def split(self, order: Tensor, minibatches: int) -> MinibatchSplit:
        local = torch.full((self.total,), -1)
        local[self.numbers] = torch.arange(len(self.numbers))
        dealt = local[order]
        is_mine = dealt >= 0
        before = torch.cat([is_mine.new_zeros(1, dtype=torch.int64), is_mine.cumsum(0)])
        cuts = torch.tensor(edges(self.total, minibatches))
        # Only the edges leave the tensors: a list of all rows takes longer than all else here.
        sizes = list(zip(before[cuts].diff().tolist(), cuts.diff().tolist(), strict=True))
        index = dealt[is_mine]
        return _Dealt(self, index, sizes, send(self.numbers[index], self.places.device))

    def gather(self, rows: Tensor) -> Tensor:
        return self.group.placed(rows, self.places, self.total)

    def own(self, rows: Tensor) -> Tensor:
        return rows.index_select(-1, self.places)


@dataclass(frozen=True, slots=True)
class _Dealt:
    part: _Part
    index: Tensor
    sizes: list[tuple[int, int]]
    places: Tensor

    def gather(self, rows: Tensor) -> Tensor:
        return self.part.group.placed(rows, self.places, self.part.total)


def lost(error: RuntimeError) -> Fatal:
    """Return the error that ends a rank whose group has fallen apart."""
    return Fatal(f"another rank of this learner is gone, so this one ends: {str(error).splitlines()[0]}")


def _moments(row: Tensor) -> Moments:
    width = (len(row) - 1) // 2
    return Moments(row[0], row[1 : 1 + width], row[1 + width :])


# ---- Messages from rank 0 to all others over gloo: words as JSON, with bytes where there is more.

PATIENCE: Final = timedelta(days=365)
"""A learner may be paused, or wait for its lease, for any length of time."""


class RankConnection:
    """Sends messages: `say` on rank 0 and `hear` on every other, in turn."""

    def __init__(self) -> None:
        """Make the connection; all ranks make theirs in the same order."""
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.size = dist.get_world_size(self._group)
        self.rank = dist.get_rank(self._group)

    def say(self, words: dict[str, Any], data: bytes = b"") -> None:
        """Send to all other ranks; returns before they have received."""
        text = json.dumps(words).encode()
        self._broadcast(torch.tensor([len(text), len(data)]))
        self._broadcast(torch.frombuffer(bytearray(text + data), dtype=torch.uint8))

    def hear(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message of rank 0."""
        sizes = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        both = bytes(self._broadcast(torch.empty(sum(sizes), dtype=torch.uint8)).numpy())
        return dict(json.loads(both[: sizes[0]])), both[sizes[0] :]

    def add_up(self, numbers: Tensor) -> Tensor:
        """Add numbers up over all ranks, in place: this is how ranks answer.

        Raises Fatal when one is gone.
        """
        try:
            dist.all_reduce(numbers, group=self._group)
        except RuntimeError as error:
            raise lost(error) from error
        return numbers

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
