import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest

from penstock.actor.link.ack_journal import AckJournal, JournalFile, journal_files, read_journal
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.session import count_strikes
from penstock.config.settings import ConfigurationError
from penstock.protocol.fragment import Slot
from penstock.protocol.limits import APPEND_DEADLINE_S, MAX_MESSAGE_BYTES, MIB, WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Report, Watch
from penstock.protocol.refusal import Reason, Refusal
from penstock.rpc.auth import Credentials
from penstock.rpc.channel import CHANNEL_OPTIONS
from penstock.runtime.exit import Fatal
from penstock.v1 import experience_pb2, experience_pb2_grpc, weights_pb2, weights_pb2_grpc
from tests.support.run import small_run
from tests.support.run.small_run import RUN, SLOTS, STEPS, fragment


def test_a_line_names_the_acknowledged_fragments(tmp_path: Path) -> None:
    given = fragment(7, 3, observation=np.ones((STEPS + 1, SLOTS, 3), np.float32))
    given = replace(given, header=replace(given.header, slots=(Slot(0, 4, 9), Slot(1, 0, 3)), created_us=5))
    journal = AckJournal(tmp_path / "new" / "folder", RUN, "actor-0")
    journal.record([given, fragment(7, 4)])
    journal.close()
    (path,) = journal_files([tmp_path / "new" / "folder"])
    first, second = read_journal(path)
    assert first is not None
    assert second is not None
    assert (first.run, first.actor, first.kind) == (RUN, "actor-0", "train")
    assert (first.session, first.sequence, first.steps, first.created_us) == (7, 3, STEPS, 5)
    assert first.sha256 == hashlib.sha256(given.payload).hexdigest()
    assert second.sequence == 4


def test_a_slot_without_valid_steps_starts_no_experience(tmp_path: Path) -> None:
    valid = np.zeros((STEPS, SLOTS), bool)
    valid[1, 1] = True
    given = fragment(1, valid=valid)
    journal = AckJournal(tmp_path, RUN, "actor-0")
    journal.record([replace(given, header=replace(given.header, slots=(Slot(0, 1, 0), Slot(1, 2, 5))))])
    (line,) = read_journal(journal.path)
    assert line is not None
    assert line.slots == ((1, 2, 5),)


def test_a_line_torn_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    AckJournal(tmp_path, RUN, "actor-0").record([fragment(1)])
    (path,) = journal_files([tmp_path])
    os.truncate(path, path.stat().st_size - 7)
    AckJournal(tmp_path, RUN, "actor-0").record([fragment(1, 2)])
    torn, whole = read_journal(path)
    assert torn is None
    assert whole is not None
    assert whole.sequence == 2


def test_a_folder_that_cannot_be_made_is_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"actor\.ack_journal=.*/file"):
        AckJournal(tmp_path / "file", RUN, "actor-0")


MEGABIT = 125_000
HEARD_S = 0.5
"""How long a connection is heard of after a watch began on it: less than half the deadline of the watch."""


@contextmanager
def broker_client(
    servicer: Any = None, on_answer: Callable[[], None] = lambda: None
) -> Iterator[BrokerClient]:
    """Of a server that knows the methods of `servicer` alone."""
    server: Any = grpc.server(futures.ThreadPoolExecutor(4), options=CHANNEL_OPTIONS)
    if servicer is not None:
        experience_pb2_grpc.add_ExperienceServiceServicer_to_server(servicer, server)
        weights_pb2_grpc.add_WeightServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    client = BrokerClient(address, Credentials(), on_answer)
    yield client
    client.close()
    server.stop(0)


class Clock(experience_pb2_grpc.ExperienceServiceServicer, weights_pb2_grpc.WeightServiceServicer):
    def __init__(self) -> None:
        self.given_s: dict[str, float] = {}

    def Append(  # noqa: N802 - the name of the RPC
        self, request: experience_pb2.AppendRequest, context: grpc.ServicerContext
    ) -> experience_pb2.AppendReply:
        self.given_s[f"append {len(request.fragments)}"] = context.time_remaining() or 0.0
        return experience_pb2.AppendReply()

    def GetWeights(  # noqa: N802 - the name of the RPC
        self, request: weights_pb2.GetWeightsRequest, context: grpc.ServicerContext
    ) -> weights_pb2.GetWeightsReply:
        self.given_s["weights"] = context.time_remaining() or 0.0
        return weights_pb2.GetWeightsReply()


def test_a_deadline_leaves_time_for_the_bytes_of_a_thin_line() -> None:
    clock = Clock()  # type: ignore[abstract]  # the other calls are not made
    stop, answers = threading.Event(), list[str]()
    large = replace(small_run.fragment(1), payload=b"\0" * (2 * MIB))
    with broker_client(clock, lambda: answers.append("answer")) as client:
        client.append(1, 0, [], stop)
        client.append(1, 0, [large] * 3, stop)
        client.weights(1, 1, 0, stop)
    assert len(answers) == 3
    # On its way gRPC rounds a deadline up, to three digits.
    assert clock.given_s["append 0"] <= APPEND_DEADLINE_S * 1.02
    assert clock.given_s["append 3"] >= 6 * MIB / MEGABIT
    assert clock.given_s["weights"] >= WEIGHT_CHUNK_BYTES / MEGABIT


class Silent(experience_pb2_grpc.ExperienceServiceServicer, weights_pb2_grpc.WeightServiceServicer):
    """Holds the first watch until the test is over; a report that is sent meanwhile is answered."""

    def __init__(self) -> None:
        self.callers: list[str] = []
        self.watched, self.over = threading.Event(), threading.Event()

    def WatchLatest(  # noqa: N802 - the name of the RPC
        self, request: weights_pb2.WatchLatestRequest, context: grpc.ServicerContext
    ) -> weights_pb2.WatchLatestReply:
        self.callers.append(context.peer())
        self.watched.set()
        if len(self.callers) == 1:
            self.over.wait(20)
        return weights_pb2.WatchLatestReply()

    def ReportEpisodes(  # noqa: N802 - the name of the RPC
        self, request: experience_pb2.ReportEpisodesRequest, context: grpc.ServicerContext
    ) -> experience_pb2.ReportEpisodesReply:
        """Something is heard on the connection, soon after the watch began."""
        return experience_pb2.ReportEpisodesReply(acked_through=request.sequence)


def test_an_answer_before_a_watch_does_not_keep_a_dead_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.actor.link.broker_client.WATCH_GRACE_S", 4 * HEARD_S)
    silent, stop = Silent(), threading.Event()  # type: ignore[abstract]  # the other calls are not made
    with broker_client(silent) as client:
        watcher = threading.Thread(target=lambda: client.watch(Watch(session=1), stop))
        watcher.start()
        assert silent.watched.wait(20)
        began, reported = time.monotonic(), 0
        while time.monotonic() - began < HEARD_S:
            reported += 1
            client.report(Report(session=1, sequence=reported, episodes=()), stop)
        watcher.join(20)
        silent.over.set()
    first, second = silent.callers
    assert first != second


def test_a_fragment_above_the_message_limit_is_fatal_and_never_sent_again() -> None:
    stop = threading.Event()
    big = replace(small_run.fragment(1), payload=b"\0" * (MAX_MESSAGE_BYTES + 1))
    give_up = threading.Timer(20, stop.set)
    give_up.start()
    told = rf"limit of {MAX_MESSAGE_BYTES} bytes .*larger than max \(83\d+"
    with broker_client() as client, pytest.raises(Fatal, match=told):
        client.append(1, 0, [big], stop)
    give_up.cancel()


_WRITER: Final = """
import os, signal, sys
from pathlib import Path
from penstock.actor.link.ack_journal import JournalFile
file = JournalFile(Path(sys.argv[1]))
file.write([{"a": 1}])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_full_disk_is_reported_with_the_file() -> None:
    with pytest.raises(Fatal, match="/dev/full: No space left on device"):
        JournalFile(Path("/dev/full")).write([{"a": 1}])


def test_a_line_outlives_kill_9_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    done = subprocess.run([sys.executable, "-c", _WRITER, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b'{"a":1}\n'


INVALID = Refusal(reason=Reason.INVALID, detail="reward: holds NaN")


def test_the_third_bad_session_in_a_row_is_fatal_and_names_the_cause() -> None:
    assert count_strikes(2, INVALID, acknowledged=True) == 1
    strikes = count_strikes(0, INVALID, acknowledged=False)
    strikes = count_strikes(strikes, Refusal(reason=Reason.GAP), acknowledged=False)
    assert count_strikes(strikes, Refusal(reason=Reason.EXPIRED), acknowledged=False) == strikes == 2
    with pytest.raises(Fatal, match="3 sessions.*holds NaN"):
        count_strikes(strikes, INVALID, acknowledged=False)


def test_a_fenced_link_fails_at_once() -> None:
    with pytest.raises(Fatal, match="another process"):
        count_strikes(0, Refusal(reason=Reason.FENCED), acknowledged=True)
