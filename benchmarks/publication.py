"""From the learner's publish to weights applied at eight actors, each a process.

The yardstick takes turns with it: the same eight processes fetch the same number of bytes in bare unary calls
(see `plain_grpc`). A round is over when the last actor has applied the weights, or has the bytes. CPU is what
each process spent until then and in the pause behind it. `python -m benchmarks.publication BROKER BARE SIZE`
is an actor: it watches, loads each publication into a policy, and fetches from the bare server at each line
of its standard input; it prints what it did and the time (the machine's monotonic clock, which all processes
share).
"""

import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from actor.link.broker_client import BrokerClient
from actor.link.session import Session
from actor.link.weight_fetch import Weights
from benchmarks import plain_grpc, plain_redis
from benchmarks.child import child
from benchmarks.experience_path import PACING, RUN, opened, specification_of
from benchmarks.services import Services, services
from benchmarks.table import Cell, Options, Table
from benchmarks.transfer import cpu_seconds
from broker.log.learner_log import LearnerLog
from penstock.policy.weights import encode, load_into
from penstock.rpc.auth import Credentials
from penstock.runtime.lifecycle import Lifecycle
from penstock.wire.limits import KIB

ACTORS: Final = 8
MEGABYTE: Final = 1_000_000
ROUNDS: Final = {MEGABYTE: 30, 100 * MEGABYTE: 2}
"""Rounds of each of `--repeat`, by size."""
PAUSE_S: Final = 0.02
"""Seconds between publications, about an update of a small policy."""
AIM_MS: Final = 20.0
"""Wanted p50 of 1 MB, in milliseconds."""
AIM_SHARE: Final = 0.5
"""Wanted share of the bare transfer's rate, at 100 MB."""
APPLIED, FETCHED = "applied", "fetched"
LEARNER, BROKER, REDIS, EACH, SERVER = "learner", "broker", "Redis", "actors", "bare server"
OURS: Final = (LEARNER, BROKER, REDIS, EACH)
BARE: Final = (SERVER, EACH)
"""Processes that work for a publication, and for a bare transfer; the actors together."""


# ---- tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Seconds of each actor by round: publish → applied, and the bare transfer.

    CPU seconds of all rounds by process.
    """

    ours: Sequence[Sequence[float]]
    bare: Sequence[Sequence[float]]
    ours_cpu: Mapping[str, float]
    bare_cpu: Mapping[str, float]

    @property
    def share(self) -> float:
        """Return the bare transfer's time over ours until the last actor had it, the median of the rounds."""
        return statistics.median(
            max(bare) / max(ours) for ours, bare in zip(self.ours, self.bare, strict=True)
        )


def table(options: Options) -> Table:
    """Return milliseconds from publish to applied, beside the bare transfer."""
    rows: list[Sequence[Cell]] = []
    for size, count in ROUNDS.items():
        for durability in ("memory", "fsync_1s"):
            with services(durability=durability) as here:
                rounds = measure(here, size, count * options.repeat)
            each = [seconds * 1000 for one in rounds.ours for seconds in one]
            last, bare = ([max(one) for one in side] for side in (rounds.ours, rounds.bare))
            rows.append((
                f"{size // MEGABYTE} MB",
                durability,
                statistics.median(each),
                float(np.quantile(each, 0.99)),
                statistics.median(last) * 1000,
                statistics.median(bare) * 1000,
                size * ACTORS / statistics.median(last) / 1e6,
                size * ACTORS / statistics.median(bare) / 1e6,
                rounds.share,
                *(rounds.ours_cpu[who] / len(rounds.ours) * 1000 for who in OURS),
                *(rounds.bare_cpu[who] / len(rounds.bare) * 1000 for who in BARE),
            ))  # fmt: skip
    return Table(
        title=f"weights, from publish to applied at {ACTORS} actors, each a process",
        columns=(
            "weights",
            "durability",
            "p50 ms",
            "p99 ms",
            "last actor, ms",
            "bare, ms",
            "MB/s to all",
            "bare MB/s",
            "share of bare",
            *(f"{who}: CPU ms" for who in OURS),
            *(f"bare, {who}: CPU ms" for who in BARE),
        ),
        rows=rows,
        note=(
            f"wanted: 1 MB p50 ≤ {AIM_MS:g} ms; 100 MB ≥ {AIM_SHARE:g} of the bare transfer, which neither "
            "stores, checks nor applies"
        ),
    )


# ---- the learner's side


def measure(here: Services, size: int, count: int) -> Rounds:
    """Make `count` publications of `size` bytes at ACTORS actors, in turns with the bare transfer."""
    bare_address = f"unix:{here.folder}/bare.sock"
    ours: list[list[float]] = []
    bare: list[list[float]] = []
    ours_cpu, bare_cpu = Counter[str](), Counter[str]()
    with learner(here) as log, ExitStack() as stack:
        log.publish(_blob(size, 0), update=0, settled=0, scalars={})
        server = _serve_bare(stack, bare_address, size)
        command = ("-m", __spec__.name, here.broker, bare_address, str(size))
        actors = [stack.enter_context(child((*command, str(n)), pipes=True)) for n in range(ACTORS)]
        stack.callback(_hang_up, actors)
        _heard(actors, APPLIED)
        pids = {
            LEARNER: [os.getpid()],
            BROKER: [here.endpoint("broker").pid],
            REDIS: [plain_redis.redis_pid(here)],
            EACH: [actor.pid for actor in actors],
            SERVER: [server.pid],
        }
        for update in range(1, count + 1):
            blob, before = _blob(size, update), _spent(pids)
            began_s = time.monotonic()
            log.publish(blob, update=update, settled=0, scalars={})
            ours.append([at - began_s for at in _heard(actors, APPLIED)])
            time.sleep(PAUSE_S)
            between = _spent(pids)
            began_s = time.monotonic()
            for actor in actors:
                _write(actor)
            bare.append([at - began_s for at in _heard(actors, FETCHED)])
            time.sleep(PAUSE_S)
            ours_cpu.update({who: between[who] - before[who] for who in OURS})
            after = _spent(pids)
            bare_cpu.update({who: after[who] - between[who] for who in BARE})
    return Rounds(ours=ours, bare=bare, ours_cpu=ours_cpu, bare_cpu=bare_cpu)


def _spent(pids: Mapping[str, Sequence[int]]) -> Mapping[str, float]:
    return {who: sum(map(cpu_seconds, of)) for who, of in pids.items()}


@contextmanager
def learner(here: Services) -> Iterator[LearnerLog]:
    """Yield the log of a run that has begun, with its lease."""
    log = LearnerLog.connect(here.redis_url, wait_s=10.0)
    log.acquire(RUN, "bench", 600_000)
    log.start(specification_of(64 * KIB).encode(), PACING)
    yield log
    log.release()
    log.close()


def _blob(size: int, seed: int) -> bytes:
    module = stand_in(size)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_()
    return encode(module)


def _serve_bare(stack: ExitStack, address: str, size: int) -> "subprocess.Popen[str]":
    server = stack.enter_context(child(("-m", plain_grpc.__name__, address, str(size)), pipes=True))
    assert server.stdout is not None
    assert server.stdout.readline().strip() == plain_grpc.READY
    stack.callback(_hang_up, [server])
    return server


def _hang_up(processes: "Sequence[subprocess.Popen[str]]") -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()


def _write(actor: "subprocess.Popen[str]") -> None:
    assert actor.stdin is not None
    actor.stdin.write("\n")
    actor.stdin.flush()


def _heard(actors: "Sequence[subprocess.Popen[str]]", what: str) -> list[float]:
    """Return when each actor has done it."""
    times = []
    for actor in actors:
        assert actor.stdout is not None
        word, _, at = actor.stdout.readline().partition(" ")
        if word != what:
            raise RuntimeError(f"an actor said {word!r}, not {what!r}; its error output says why")
        times.append(float(at))
    return times


def stand_in(size: int) -> nn.Module:
    """Return parameters of `size` bytes that are quick to make."""
    side = 500
    return nn.ParameterList(torch.empty(side, side) for _ in range(size // (4 * side * side)))


# ---- an actor


def act(broker: str, bare: str, size: int, number: int) -> None:
    """Apply every publication, and fetch from the bare server when told, until standard input ends."""
    torch.set_num_threads(1)
    lifecycle = Lifecycle("bench")
    broker_client, target = BrokerClient(broker, Credentials()), stand_in(size)
    session = opened(broker_client, f"bench-{number}", lifecycle)
    threading.Thread(target=_apply_all, args=(session, target), daemon=True).start()
    client = plain_grpc.Client(bare, size)
    for _ in sys.stdin:
        client.fetch()
        print(FETCHED, time.monotonic(), flush=True)
    client.close()
    session.close(politely=True)
    broker_client.close()


def _apply_all(session: Session, target: nn.Module) -> None:
    version = 0
    while not session.is_closing:
        weights = await_weights(session, version)
        load_into(target, weights.blob)
        version = weights.publication.version
        print(APPLIED, time.monotonic(), flush=True)


def await_weights(session: Session, version: int) -> Weights:
    """Return the first weights newer than `version`."""
    session.wait_until(
        lambda: session.is_over or bool(session.weights and session.weights.publication.version > version)
    )
    session.check()
    if session.weights is None:
        raise RuntimeError(str(session.ended))
    return session.weights


if __name__ == "__main__":
    act(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
