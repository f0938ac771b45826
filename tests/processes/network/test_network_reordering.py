"""A network that doubles and reorders messages: what is stored, repeated and refused is what a model says."""

import random
from collections import Counter
from pathlib import Path

import pytest

from penstock.protocol.refusal import Reason, Refusal
from penstock.v1 import experience_pb2 as experience
from tests.support.experience.fragment_messages import to_proto
from tests.support.network.network_run import PATIENCE_S, Name, digest, network_run, own_fragment
from tests.support.run.harness import eventually
from tests.support.run.simulated_actor import DEADLINE_S, SimulatedActor
from tests.support.run.small_run import CHARGE
from tests.support.storage.redis_server import RedisServer

COPIES = 3
DISTANCE = 8


def arrivals(count: int, rng: random.Random) -> list[int]:
    sent = [sequence for sequence in range(1, count + 1) for _ in range(COPIES)]
    due = {index: index + rng.uniform(-DISTANCE, DISTANCE) * COPIES for index in range(len(sent))}
    return [sent[index] for index in sorted(due, key=lambda index: due[index])]


def model(order: list[int]) -> Counter[str]:
    """What the log must answer: stored, repeated or gap."""
    answers: Counter[str] = Counter()
    stored = 0
    for sequence in order:
        answers["stored" if sequence == stored + 1 else "repeated" if sequence <= stored else "gap"] += 1
        stored += sequence == stored + 1
    return answers


@pytest.mark.parametrize(
    ("count", "at_once"),
    [
        (150, 1),
        pytest.param(2_000, 1, marks=pytest.mark.slow),
        pytest.param(2_000, 16, marks=pytest.mark.slow),
    ],
)
def test_doubled_and_reordered_messages_are_stored_once_in_order(
    redis_server: RedisServer, tmp_path: Path, count: int, at_once: int
) -> None:
    order = arrivals(count, random.Random(count)) + list(range(1, count + 1))
    with (
        network_run(redis_server, tmp_path, budget=2 * count * CHARGE) as run,
        SimulatedActor(run.proxy.address, "a-0") as actor,
    ):
        actor.open()
        answers, acked = send(actor, order, at_once)
        repeated = run.metric("penstock_fragments_repeated_total")
        sent: dict[Name, str] = {
            (actor.session, n): digest(own_fragment(actor.session, n).payload) for n in range(1, count + 1)
        }
        stored = run.reader.log.acked()
        eventually(lambda: run.is_sound() and len(run.reader.read) >= stored, "the reader", PATIENCE_S)
        run.reader.stop()
        assert run.reader.read == sorted(sent.items())[: len(run.reader.read)]
        assert acked == len(run.reader.read) == run.reader.log.acked()
    if at_once == 1:
        expected = model(order)
        assert expected["repeated"] > COPIES
        assert expected["gap"] > COPIES
        assert acked == expected["stored"]
        assert answers["gap"] == expected["gap"]
        assert repeated == expected["repeated"]


def send(actor: SimulatedActor, order: list[int], at_once: int) -> tuple[Counter[str], int]:
    """Send one message per number, so many in flight; refusals by reason, and the last acknowledged."""
    answers: Counter[str] = Counter()
    acked = 0
    for start in range(0, len(order), at_once):
        calls = []
        for sequence in order[start : start + at_once]:
            message = to_proto(own_fragment(actor.session, sequence))
            request = experience.AppendRequest(session=actor.session, fragments=[message])
            calls.append(actor.experience.Append.future(request, timeout=DEADLINE_S))
        for call in calls:
            reply = call.result()
            refusal = Refusal.from_proto(reply.refusal)
            assert refusal is None or refusal.reason is Reason.GAP, refusal
            answers["taken" if refusal is None else "gap"] += 1
            acked = max(acked, reply.acked_through)
    return answers, acked
