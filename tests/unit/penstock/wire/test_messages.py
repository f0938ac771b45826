import pytest

from penstock.protocol.messages import Credit, Durability, Episode, Publication, Report, Role, RunState
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.v1 import experience_pb2, refusal_pb2, weights_pb2

EPISODE = Episode(slot_id=3, episode_id=2**40, episode_return=-1.5, length=200, terminated=True, version=9)


def test_a_report_survives_redis() -> None:
    report = Report(session=4, sequence=2, evaluation=True, deterministic=True, episodes=(EPISODE, EPISODE))
    assert report == Report.decode(report.encode())


def test_credit_and_publication_survive_the_wire() -> None:
    credit = Credit(begin_through=5, min_version=3, round=2)
    publication = Publication(version=7, update=6, sha256="ab", size=99)
    assert credit == Credit.from_proto(credit.to_proto())
    assert publication == Publication.from_proto(publication.to_proto())


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Reason, refusal_pb2.Reason, "REASON_"),
        (Role, experience_pb2.Role, "ROLE_"),
        (Durability, experience_pb2.Durability, "DURABILITY_"),
        (RunState, weights_pb2.RunState, "RUN_STATE_"),
    ],
)
def test_enumerations_are_those_of_the_protocol(ours: type[Reason], theirs: object, prefix: str) -> None:
    wire = {name.removeprefix(prefix): number for name, number in theirs.items() if number}  # type: ignore[attr-defined]
    assert {member.name: member.value for member in ours} == wire


def test_labels_are_lower_case_names() -> None:
    assert Reason.NOT_READY.label == "not_ready"
    assert Durability.FSYNC_1S.label == "fsync_1s"
    assert Role.EVALUATION.label == "evaluation"
    assert RunState.STOPPING.label == "stopping"


def test_a_refusal_survives_the_wire() -> None:
    refusal = Refusal(reason=Reason.GAP, detail="hole", retry_after_ms=20, expected=4)
    assert refusal == Refusal.from_proto(refusal.to_proto())


def test_nothing_refused_is_none() -> None:
    assert Refusal.from_proto(refusal_pb2.Refusal()) is None


def test_a_refusal_raised_tells_reason_and_detail() -> None:
    error = Refused(Refusal(reason=Reason.FENCED, detail="a newer learner holds the lease"))
    assert str(error) == "fenced: a newer learner holds the lease"
    assert error.refusal.reason is Reason.FENCED
