"""A learner and an actor with a pipe between them."""

import json
import socket
import subprocess
import sys

import pytest

from benchmarks.train import Ended, Messages, piped_settings
from penstock.config.algorithm_sections import PPOSection


def test_messages_come_whole_and_in_order() -> None:
    ours, theirs = (Messages(end) for end in socket.socketpair())
    for sent in (b"first", b"", memoryview(bytes(70_000))):
        ours.send(sent)
        assert theirs.has_come()
        assert theirs.receive() == sent
    assert not theirs.has_come()
    del ours
    with pytest.raises(Ended):
        theirs.receive()


def test_it_learns_from_as_many_steps_as_it_was_told() -> None:
    command = [sys.executable, "-m", "benchmarks.train", "learn", "3000", "1"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    algorithm = piped_settings(3000, 1).algorithm
    assert isinstance(algorithm, PPOSection)
    assert 3000 <= told["steps"] < 3000 + 2 * algorithm.batch_steps
    assert min(told["seconds"], told["learner"], told["actor"]) > 0
