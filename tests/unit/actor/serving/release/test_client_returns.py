"""What a client is worth to a trial: its returns, or what a person thinks of all of their conversations."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.actor.serving.episodes import Episode, Opinion, SegmentBuilder
from penstock.actor.serving.release import ClientReturns
from penstock.registry.canary import ClientReturn
from penstock.registry.routing import Arm

SETTLE_S = 10.0


def conversation(client: str, *, turns: int = 1) -> Episode:
    """One whose rewards are opinions."""
    return Episode(
        id=client,
        number=1,
        lane=0,
        client_key=client,
        arm=Arm.CANARY,
        owner=None,
        segment_builder=SegmentBuilder(0, 1, 4, 60.0),
        learned=False,
        last_call_s=0.0,
        opinion=Opinion(turns=turns),
    )


def settled(*talks: Episode, over: bool = True, is_whole: bool = True) -> list[ClientReturn]:
    """What is compared after these conversations, one after the other."""
    returns = ClientReturns(SETTLE_S, (-0.25, 0.25))
    for one in talks:
        watched = returns.begin(one, canary=True, part=0.5, now_s=0.0)
        assert watched is not None
        if over:
            one.is_over = True
            watched.end(one, is_whole=is_whole)
    return returns.settled(SETTLE_S)


def thumbs(client: str, *given: float, asked: Sequence[float] = ()) -> Episode:
    """A conversation with a turn for each thumb, and for each that somebody was asked for."""
    talk = conversation(client, turns=max(1, len(given) + len(asked)))
    assert talk.opinion is not None
    talk.opinion.hear(list(enumerate(given)), asked=False)
    talk.opinion.hear(list(enumerate(asked, len(given))), asked=True)
    return talk


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(
    ("given", "value", "rated"),
    [
        ((1.0,), 1.0, 1.0),
        ((-1.0,), 0.0, 1.0),
        ((), 0.0, 0.0),
        ((1.0, -1.0), 0.0, 1.0),
        ((-1.0, 2.0), 1.0, 1.0),
    ],
)
def test_a_conversation_is_liked_or_not(
    given: Sequence[float], value: float, rated: float, *, over: bool, is_whole: bool
) -> None:
    (found,) = settled(thumbs("ann", *given), over=over, is_whole=is_whole)
    assert (found.value, found.rated) == (value, rated)


def test_a_person_is_worth_the_share_of_their_conversations() -> None:
    (found,) = settled(thumbs("ann", 1.0), thumbs("ann"), thumbs("ann", -1.0), thumbs("ann", 1.0))
    assert (found.value, found.rated) == (0.5, 0.75)


@pytest.mark.promise("turn-somebody-asked-about")
def test_what_somebody_was_asked_about_counts_for_no_arm() -> None:
    assert settled(thumbs("ann", asked=[1.0])) == []
    (found,) = settled(thumbs("bob", -1.0, asked=[1.0]))
    assert (found.value, found.rated) == (0.0, 1.0)
    (found,) = settled(thumbs("cid", asked=[1.0]), thumbs("cid", 1.0))
    assert (found.value, found.rated) == (1.0, 1.0)


@pytest.mark.parametrize("over", [True, False])
def test_a_conversation_without_an_answer_counts_for_no_arm(*, over: bool) -> None:
    assert settled(conversation("ann", turns=0), over=over, is_whole=False) == []
    (found,) = settled(conversation("bob", turns=0), thumbs("bob", 1.0))
    assert (found.value, found.rated) == (1.0, 1.0)


def test_a_return_is_none_of_a_person() -> None:
    program = replace(conversation("agent"), opinion=None)
    assert settled(replace(program)) == []
    program.add_reward(0, 3.0)
    assert settled(replace(program), is_whole=False) == []
    (found,) = settled(program)
    assert (found.value, found.rated) == (0.25, None)
