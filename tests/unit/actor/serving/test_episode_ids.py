"""An episode's id proves that it was given, and to whom; nothing else is taken for one."""

import pytest

from penstock.actor.serving.episodes import EpisodeIds
from penstock.protocol.refusal import Reason, Refused
from penstock.rpc.identity import Identity, Party
from tests.support.serving.server_parts import reason_of

ADA = Identity(run="r", party=Party.CLIENT, name="ada")
BOB = Identity(run="r", party=Party.CLIENT, name="bob")


def reason(ids: EpisodeIds, episode_id: str, owner: Identity | None) -> Reason | None:
    """With which an id is refused; None for one that holds."""
    try:
        ids.check(episode_id, owner)
    except Refused as refused:
        assert len(str(refused)) < 400
        return reason_of(refused)
    return None


@pytest.mark.promise("id-episode-proves-given")
def test_an_id_holds_for_the_identity_that_it_was_given_to_alone() -> None:
    ids = EpisodeIds()
    for number in (1, 2, 10**15):
        for owner in (ADA, BOB, None):
            given = ids.give(number, owner)
            assert len(given) <= 48
            assert [reason(ids, given, other) for other in (ADA, BOB, None)] == [
                None if other == owner else Reason.EPISODE_UNKNOWN for other in (ADA, BOB, None)
            ]


def test_an_id_of_another_server_is_elsewhere() -> None:
    assert reason(EpisodeIds(), EpisodeIds().give(1, ADA), ADA) is Reason.EPISODE_ELSEWHERE


@pytest.mark.promise("id-episode-proves-given")
@pytest.mark.parametrize(
    "changed",
    [
        "{server}-8-{token}",
        "{server}-07-{token}",
        "{server}-7-{token}\n",
        "{server}-7-{shorter}",
        "{server}-7-{token}{endless}",
        "{server}-{endless}-{token}",
        "{server}-\N{ARABIC-INDIC DIGIT SEVEN}-{token}",
        "{server}-7-000000000000",
        "{server}-\0",
        "{server}",
        "",
    ],
)
def test_an_id_that_was_changed_is_unknown(changed: str) -> None:
    ids = EpisodeIds()
    server, _, token = ids.give(7, ADA).split("-")
    words = {"server": server, "token": token, "shorter": token[:-1], "endless": "9" * 100_000}
    assert reason(ids, changed.format(**words), ADA) is Reason.EPISODE_UNKNOWN
