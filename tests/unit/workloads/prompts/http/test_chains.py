"""Transitions that are stored become episodes, with the ends, returns and versions that they have."""

from typing import Any

import numpy as np
import pytest

from penstock.workloads.prompts.http.run_learning import MOST_CHAINS, GivenAnswers
from tests.support.prompts.small_prompts import SmallPrompts, as_base64, embedding
from tests.support.serving.server_parts import column


def test_transitions_that_follow_one_another_are_one_episode(prompts: SmallPrompts) -> None:
    answers = [prompts.select(embedding(number)) for number in range(3)]
    for number, answer in enumerate(answers):
        reply = prompts.store(
            embedding(number), answer, embedding(number + 1), reward=float(number), done=number == 2
        )
        assert reply.json() == {
            "stored": True,
            "buffer_size": number + 1,
            "verified": True,
            "duplicate": False,
        }
    (fragment,) = prompts.fragments()
    assert column(fragment, "reward") == [0.0, 1.0, 2.0]
    assert column(fragment, "action") == [answer["action"] for answer in answers]
    assert np.allclose(column(fragment, "log_prob"), [answer["log_prob"] for answer in answers])
    assert column(fragment, "terminated") == [False, False, True]
    assert column(fragment, "valid") == [True] * 3
    assert np.allclose(column(fragment, "observation")[3], embedding(3))


def test_a_chain_that_nothing_follows_ends_truncated_where_it_was_seen_last(prompts: SmallPrompts) -> None:
    prompts.store(embedding(0), prompts.select(embedding(0)), embedding(1))
    prompts.store(embedding(7), prompts.select(embedding(7)), embedding(8))
    assert prompts.fragments() == []
    prompts.client.__exit__(None, None, None)
    one, other = prompts.fragments()
    for fragment, following in ((one, 1), (other, 8)):
        arrays = fragment.arrays()
        assert arrays["truncated"].tolist() == [[True]]
        assert np.allclose(arrays["final/observation"][0], embedding(following))


def test_a_state_that_does_not_follow_begins_another_chain(prompts: SmallPrompts) -> None:
    for number in (0, 10, 1, 11):
        answer = prompts.select(embedding(number))
        prompts.store(embedding(number), answer, embedding(number + 1), done=number in {1, 11})
    assert [column(one, "terminated") for one in prompts.fragments()] == [[False, True]] * 2


def test_the_version_that_answered_is_the_one_that_counts(prompts: SmallPrompts) -> None:
    answer = prompts.select(embedding(0))
    prompts.served.publish(2)
    prompts.store(embedding(0), answer, embedding(1), done=True, log_prob=-50.0)
    (fragment,) = prompts.fragments()
    assert [(one.version, one.update) for one in fragment.header.weights] == [(1, 1)]
    assert column(fragment, "log_prob") == pytest.approx([answer["log_prob"]])


def test_a_likeliest_action_teaches_no_on_policy_algorithm(prompts: SmallPrompts) -> None:
    answer = prompts.select(embedding(0), deterministic=True)
    assert prompts.store(embedding(0), answer, embedding(1), done=True).status_code == 200
    (fragment,) = prompts.fragments()
    assert column(fragment, "valid") == [False]


def test_a_transition_that_comes_again_with_its_ticket_counts_once(prompts: SmallPrompts) -> None:
    answer = prompts.select(embedding(0))
    for duplicate in (False, True):
        reply = prompts.store(embedding(0), answer, embedding(1), done=True, ticket=answer["ticket"])
        assert (reply.json()["duplicate"], reply.json()["buffer_size"]) == (duplicate, 1)
    assert len(prompts.fragments()) == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_a_transition_without_ticket_leaves_an_answer_to_the_one_that_names_it(
    prompts: SmallPrompts, is_first: bool
) -> None:
    two = _equal_answers(prompts)
    named = two[1] if is_first else two[0]
    prompts.store(embedding(0), named, embedding(1), done=True, reward=-1.0)
    for duplicate in (False, True):
        reply = prompts.store(
            embedding(0), named, embedding(1), done=True, reward=2.0, ticket=named["ticket"]
        ).json()
        assert (reply["verified"], reply["duplicate"], reply["buffer_size"]) == (True, duplicate, 2)
    assert [column(one, "reward") for one in prompts.fragments()] == [[-1.0], [2.0]]


def test_a_transition_that_took_all_answers_does_not_stand_for_another(prompts: SmallPrompts) -> None:
    two = _equal_answers(prompts)
    for _ in two:
        prompts.store(embedding(0), two[0], embedding(1), done=True, reward=-1.0)
    same = prompts.store(
        embedding(0), two[0], embedding(1), done=True, reward=-1.0, ticket=two[0]["ticket"]
    ).json()
    other = prompts.store(
        embedding(0), two[1], embedding(1), done=True, reward=2.0, ticket=two[1]["ticket"]
    ).json()
    assert (same["duplicate"], other["duplicate"], other["buffer_size"]) == (True, False, 3)


def _equal_answers(prompts: SmallPrompts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two answers to one state that name one action, and no others that do."""
    before = dict[int, dict[str, Any]]()
    while True:
        answer = prompts.select(embedding(0))
        if answer["action"] in before:
            return before[answer["action"]], answer
        before[answer["action"]] = answer


def test_a_ticket_of_an_earlier_gateway_is_no_leave_to_count_twice(prompts: SmallPrompts) -> None:
    answer = prompts.select(embedding(0))
    prompts.store(embedding(0), answer, embedding(1), done=True, ticket=answer["ticket"])
    prompts.api.given = GivenAnswers()
    for _ in range(2):
        reply = prompts.store(embedding(0), answer, embedding(1), done=True, ticket=answer["ticket"])
        assert (reply.status_code, reply.json()["field"]) == (409, "ticket")
    assert len(prompts.fragments()) == 1
    taken = prompts.store(embedding(0), answer, embedding(1), done=True)
    assert (taken.json()["verified"], len(prompts.fragments())) == (False, 1)


def test_a_transition_of_no_answer_is_held_to_the_version_that_answers(prompts: SmallPrompts) -> None:
    shown = prompts.post("/get_distribution", embedding=embedding(0)).json()["probabilities"]
    claimed = {"action": 2, "value": 0.0, "log_prob": float(np.log(shown[2]))}
    assert prompts.store(embedding(0), claimed, embedding(1)).json()["verified"] is False
    far = prompts.store(embedding(0), claimed, embedding(1), log_prob=claimed["log_prob"] - 1.0)
    assert (far.status_code, far.json()["field"]) == (422, "log_prob")
    assert prompts.client.get("/stats").json() == {"message": "No training data yet"}
    prompts.store(embedding(1), prompts.select(embedding(1)), embedding(2), done=True)
    stats = prompts.client.get("/stats").json()
    assert (stats["unverified"], stats["total_episodes"], stats["avg_reward"]) == (1, 1, 2.0)


def test_open_chains_are_bounded(prompts: SmallPrompts) -> None:
    most = MOST_CHAINS
    for number in range(most + 2):
        answer = prompts.select(embedding(2 * number))
        prompts.store(embedding(2 * number), answer, embedding(2 * number + 1))
    answer = prompts.select(embedding(1))
    prompts.store(embedding(1), answer, embedding(0), done=True)
    assert prompts.client.get("/stats").json()["open_chains"] == most
    prompts.client.__exit__(None, None, None)
    assert sum(one.header.steps for one in prompts.fragments()) == most + 3


def test_a_policy_server_that_was_started_again_takes_what_follows(prompts: SmallPrompts) -> None:
    prompts.store(embedding(0), prompts.select(embedding(0)), embedding(1))
    for episode in list(prompts.served.stand.episodes):
        prompts.served.stand.episodes.close(episode)
    assert prompts.store(embedding(1), prompts.select(embedding(1)), embedding(2), done=True).json()["stored"]
    assert prompts.client.get("/stats").json()["lost"] == 1


def test_numbers_may_come_as_base64(prompts: SmallPrompts) -> None:
    answer = prompts.select(as_base64(embedding(0)))  # type: ignore[arg-type]
    prompts.store(embedding(0), answer, as_base64(embedding(1)))  # type: ignore[arg-type]
    prompts.store(embedding(1), prompts.select(embedding(1)), embedding(2), done=True)
    (fragment,) = prompts.fragments()
    assert column(fragment, "terminated") == [False, True]
