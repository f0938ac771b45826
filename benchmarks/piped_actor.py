"""The actor of `benchmarks.piped`: acts with the newest weights, within the run's staleness budget.

`python -m benchmarks.piped_actor DESCRIPTOR STEPS SEED`, the number of an inherited socket first.
"""

import select
import socket
import struct
import sys

from actor.specification import run as actor_run
from benchmarks.experience import Experience
from penstock.config.sections.algorithms import PPOSection
from penstock.config.settings import Settings, load
from penstock.runtime.allocator import keep_freed_memory
from penstock.wire.fragment import header_bytes
from penstock.wire.specification import RunSpecification
from workloads.control.defaults import for_environment

TASK = "CartPole-v1"
_LENGTH = struct.Struct("<Q")


class Ended(Exception):
    """Reports that the other end is closed."""


class Messages:
    """Bytes over one end of a socket pair, each message with its length before it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, data: bytes | memoryview) -> None:
        """Wait until it has left; raises Ended."""
        try:
            self._end.sendall(_LENGTH.pack(len(data)))
            self._end.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Ended from error

    def receive(self) -> bytes:
        """Wait for the next message; raises Ended."""
        return self._receive(*_LENGTH.unpack(self._receive(_LENGTH.size)))

    def has_come(self) -> bool:
        """Return whether a message waits."""
        return bool(select.select([self._end], [], [], 0)[0])

    def _receive(self, size: int) -> bytes:
        try:
            data = self._end.recv(size, socket.MSG_WAITALL)
        except ConnectionResetError as error:
            raise Ended from error
        if len(data) < size:
            raise Ended
        return data


def settings_of(steps: int, seed: int) -> Settings:
    """Return the settings of `penstock train CartPole-v1`."""
    over = {
        "run": "piped",
        "seed": seed,
        "environment": {"id": TASK},
        "learner": {"device": "cpu", "total_steps": steps},
    }
    return load([for_environment(TASK, "ppo"), over])


def act(settings: Settings, learner: Messages) -> None:
    """Send fragments until the learner closes its end."""
    specification = RunSpecification.decode(learner.receive())
    experience = Experience(actor_run.read(specification, settings.actor), settings.seed)
    assert isinstance(settings.algorithm, PPOSection)
    batch_steps, staleness = settings.algorithm.batch_steps, settings.algorithm.staleness
    weights, update, sent = b"", -1, 0
    while True:
        while update < 0 or sent >= (update + 1 + staleness) * batch_steps or learner.has_come():
            weights, update = learner.receive(), update + 1
        fragment = experience.fragment(weights, update)
        learner.send(header_bytes(fragment.header))
        learner.send(fragment.payload)
        sent += fragment.header.charge


def main() -> None:
    """Act until the pipe is closed."""
    keep_freed_memory()
    descriptor, steps, seed = map(int, sys.argv[1:])
    try:
        act(settings_of(steps, seed), Messages(socket.socket(fileno=descriptor)))
    except Ended:
        return


if __name__ == "__main__":
    main()
