import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
from torch import nn

from penstock.actor.serving.batcher import (
    INLINE_S,
    Answer,
    Batcher,
    Loaded,
    NotFinite,
    PassCost,
    PendingQuestion,
    Question,
    answer,
)
from penstock.protocol.refusal import Reason, Refused
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from penstock.runtime import metrics
from tests.support.serving.server_parts import broken, loaded_of, named, question_of, reason_of, specification

NEVER_S: Final = 3600.0
"""Who waited for this would be found by the timeout of the test."""
MADE: Final = specification()


@contextmanager
def passes() -> Iterator[list[int]]:
    """Afterwards: [passes, rows] inside the block."""
    before = _counted()
    counted: list[int] = []
    yield counted
    counted += [now - then for now, then in zip(_counted(), before, strict=True)]


def _counted() -> list[int]:
    (family,) = metrics.SERVING_BATCH_ROWS.collect()
    values = {sample.name.rpartition("_")[2]: sample.value for sample in family.samples}
    return [int(values["count"]), int(values["sum"])]


def make(**changed: Any) -> Batcher:
    """Has seen a crowd before, so that each round of the loop is a pass.

    Never waits longer, never refuses.
    """
    batcher = alone(**changed)
    batcher._expected = 64
    return batcher


def alone(**changed: Any) -> Batcher:
    return Batcher(**({"max_rows": 256, "max_wait_s": 0.0, "max_delay_s": NEVER_S} | changed))


def _note(order: list[int], place: int, _done: object) -> None:
    order.append(place)


class Held:
    """A version whose passes, when asked for a value, last until `go` is set."""

    def __init__(self) -> None:
        self.loaded = loaded_of(MADE)
        self.begun, self.go = threading.Event(), threading.Event()
        self.loaded.policy.critic_head.register_forward_pre_hook(self._hold)

    def _hold(self, *_call: Any) -> None:
        self.begun.set()
        assert self.go.wait(60)


@contextmanager
def pass_under_way(batcher: Batcher, seconds: float = 1.0) -> Iterator[tuple[Held, "asyncio.Future[Answer]"]]:
    """A pass that is held in the thread; one like it took `seconds` before, all of them of a core."""
    held = Held()
    batcher._cost.note(1, seconds)
    batcher._work.note(1, seconds)
    try:
        yield held, batcher.ask(held.loaded, question_of(value=True))
    finally:
        held.go.set()


async def test_simultaneous_requests_share_a_pass() -> None:
    batcher, loaded = make(), loaded_of(MADE)
    asked = [question_of(1 + i % 3, i) for i in range(20)]
    with passes() as counted:
        answers = await asyncio.gather(*(batcher.ask(loaded, question) for question in asked))
    assert counted == [1, sum(question.rows for question in asked)]
    for question, given in zip(asked, answers, strict=True):
        expected = loaded.policy.log_prob(question.observation, given.action)
        np.testing.assert_allclose(given.log_prob, expected, atol=1e-5)
    batcher.close()


async def test_a_probe_waits_for_requests_and_learns_how_many_arrive() -> None:
    batcher, loaded = alone(max_wait_s=0.02), loaded_of(MADE)
    for _ in range(15):
        await batcher.ask(loaded, question_of())
    with passes() as counted:
        first = batcher.ask(loaded, question_of())
        for _ in range(3):
            await asyncio.sleep(0)
            assert not first.done()
        second = batcher.ask(loaded, question_of())
        await asyncio.gather(first, second)
    assert counted == [1, 2]
    assert batcher._expected == 2
    batcher.close()


async def test_a_pass_takes_at_most_max_rows_oldest_first() -> None:
    batcher, loaded = make(max_rows=8), loaded_of(MADE)
    order: list[int] = []
    futures = []
    for place, rows in enumerate((3, 3, 3, 20, 5, 3, 1)):
        futures.append(batcher.ask(loaded, question_of(rows)))
        futures[-1].add_done_callback(partial(_note, order, place))
    with passes() as counted:
        await asyncio.gather(*futures)
    assert counted == [5, 38]  # 3+3, 3, 20, 5+3, 1
    assert order == sorted(order)
    batcher.close()


async def test_late_requests_are_refused_and_not_computed() -> None:
    batcher, loaded = make(), loaded_of(MADE)
    now = asyncio.get_running_loop().time()
    with passes() as counted:
        all_late = [batcher.ask(loaded, question_of(), -1.0) for _ in range(3)]
        results = await asyncio.gather(*all_late, return_exceptions=True)
        assert {reason_of(result) for result in results if isinstance(result, Exception)} == {Reason.DEADLINE}
        late = batcher.ask(loaded, question_of(5), now - 1.0)
        timely = batcher.ask(loaded, question_of(2), now + NEVER_S)
        assert (await timely).action["action"].shape == (2,)
    with pytest.raises(Refused, match="waited .* for its turn"):
        await late
    assert counted == [1, 2]
    batcher.close()


async def test_a_client_refused_as_late_may_try_again_at_once() -> None:
    batcher, loaded = alone(), loaded_of(MADE)
    batcher._expected = 2
    again: list[asyncio.Future[Answer]] = []

    def ask_again(*_refused: object) -> None:
        again.append(batcher.ask(loaded, question_of(2)))

    timely = batcher.ask(loaded, question_of())
    batcher.put(PendingQuestion(loaded, question_of(), -1.0, 0.0, ask_again, lambda: False))
    batcher._expected = 1
    with passes() as counted:
        assert isinstance(await timely, Answer)
        assert isinstance(await again[0], Answer)
    assert counted == [1, 3]
    batcher.close()


@pytest.mark.parametrize("changed", [{"max_wait_s": 0.001}, {}, {"max_rows": 1}])
async def test_a_lonely_request_is_answered_before_the_call_returns(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every pass counts as short: one that happens to be slow would send those behind it to the thread.
    monkeypatch.setattr("penstock.actor.serving.batcher.INLINE_S", math.inf)
    batcher, loaded = alone(**changed), loaded_of(MADE)
    at_once = 0
    for _ in range(200):
        asked = batcher.ask(loaded, question_of())
        at_once += asked.done()
        await asked
    assert at_once >= 190 if "max_wait_s" in changed else at_once == 200
    batcher.close()


async def test_a_short_pass_stays_in_the_event_loop() -> None:
    batcher, loaded = alone(), loaded_of(MADE)
    batcher._cost.note(1, 1.0)
    batcher._work.note(1, INLINE_S / 2)
    batcher._threads.shutdown()
    assert isinstance(await batcher.ask(loaded, question_of()), Answer)


async def test_a_request_that_would_wait_too_long_is_refused_at_once() -> None:
    batcher, loaded = make(max_delay_s=0.1), loaded_of(MADE)
    for rows, seconds in ((4, 0.03), (8, 0.08), (16, 0.12)):
        batcher._cost.note(rows, seconds)
    taken = [batcher.ask(loaded, question_of(rows)) for rows in (4, 4, 8)]
    with pytest.raises(Refused, match="16 observations wait, about 120 ms of work") as error:
        batcher.ask(loaded, question_of())
    assert error.value.refusal.reason is Reason.OVERLOADED
    assert error.value.refusal.retry_after_ms == 120
    await asyncio.gather(*taken)
    batcher.close()


async def test_a_long_pass_does_not_block_the_event_loop() -> None:
    batcher, loaded = make(), loaded_of(MADE)
    with passes() as counted, pass_under_way(batcher) as (held, first):
        await asyncio.to_thread(held.begun.wait, 60)
        run_follower = [batcher.ask(loaded, question_of()) for _ in range(5)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not first.done()
        assert not any(future.done() for future in run_follower)
        held.go.set()
        await asyncio.gather(first, *run_follower)
    assert counted == [2, 6]
    batcher.close()


async def test_the_running_pass_counts_towards_the_wait_of_a_new_request() -> None:
    batcher = make(max_delay_s=0.1)
    with pass_under_way(batcher, seconds=5.0) as (held, first):
        await asyncio.to_thread(held.begun.wait, 60)
        with pytest.raises(Refused) as error:
            batcher.ask(held.loaded, question_of())
        assert error.value.refusal.retry_after_ms == 5000
        held.go.set()
        await first
    batcher.close()


async def test_a_request_whose_client_is_gone_is_not_computed() -> None:
    batcher, loaded = make(), loaded_of(MADE)
    with passes() as counted:
        gone, stays = (batcher.ask(loaded, question_of(3)) for _ in range(2))
        gone.cancel()
        await stays
    assert counted == [1, 3]
    with pass_under_way(batcher) as (held, first):
        await asyncio.to_thread(held.begun.wait, 60)
        first.cancel()
        held.go.set()
        await batcher.ask(loaded, question_of())
    batcher.close()


async def test_requests_of_several_versions_get_answers_of_their_own_version() -> None:
    batcher = make()
    first, second, wrong = (loaded_of(MADE, version) for version in (1, 2, 3))
    broken(wrong.policy)
    versions = [first, second, wrong, first, wrong, second]
    with passes() as counted:
        asked = [batcher.ask(loaded, question_of(1, i)) for i, loaded in enumerate(versions)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    assert counted == [1, 6]
    for loaded, given in zip(versions, answers, strict=True):
        if loaded is wrong:
            assert isinstance(given, NotFinite)
        else:
            assert isinstance(given, Answer)
            assert given.loaded is loaded
    batcher.close()


async def test_a_version_that_fails_fails_only_its_own_requests() -> None:
    batcher, loaded = make(), loaded_of(MADE)
    other = Loaded(loaded_of(specification(action=MADE.action_space, hidden_sizes=(4,))).policy, 2, 2, "")
    del other.policy.reader  # not a version that could ever be loaded
    given, failed = await asyncio.gather(
        batcher.ask(loaded, question_of()),
        batcher.ask(other, question_of(value=True)),
        return_exceptions=True,
    )
    assert isinstance(given, Answer)
    assert isinstance(failed, AttributeError)
    batcher.close()


async def test_a_client_may_ask_again_from_its_callback() -> None:
    batcher, held = alone(), Held()
    for rows, seconds in ((1, 0.0), (2, 1.0)):
        batcher._work.note(rows, seconds)
    asked: list[asyncio.Future[Answer]] = []

    def ask_again(*_answer: object) -> None:
        asked.append(batcher.ask(held.loaded, question_of(2, value=True)))
        asked.append(batcher.ask(held.loaded, question_of(1)))

    with passes() as counted:
        batcher.put(
            PendingQuestion(held.loaded, question_of(1), NEVER_S * 1e6, 0.0, ask_again, lambda: False)
        )
        await asyncio.to_thread(held.begun.wait, 60)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(future.done() for future in asked)
        held.go.set()
        await asyncio.gather(*asked)
    assert counted == [3, 4]
    batcher.close()


REAL: Final = Box(np.full(2, -1, np.float32), np.full(2, 1, np.float32))
ACTIONS: Final[dict[str, Space]] = {
    "choice": Discrete(3),
    "choices": MultiDiscrete((2, 3)),
    "bits": MultiBinary(3),
    "real": REAL,
    "nested": Dict((("move", Discrete(4)), ("force", REAL))),
}
NETWORKS: Final[dict[str, dict[str, Any]]] = {
    "tanh": {},
    "relu, shared": {"activation": "relu", "shared_trunk": True},
    "normalised": {"normalise_observations": True},
    "squashed": {"continuous": "squashed"},
}


def taken(given: Answer | NotFinite) -> Answer:
    assert isinstance(given, Answer), given
    return given


@pytest.mark.promise("answer-comes-wholly-version")
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_request_in_a_batch_is_answered_as_if_alone(action: str, network: str) -> None:
    made = specification(action=ACTIONS[action], **NETWORKS[network])
    loaded = loaded_of(made)
    questions = [
        question_of(
            1 + i % 3,
            i,
            distribution=True,
            value=True,
            deterministic=i % 2 == 0,
            seed=i if i % 3 == 0 else None,
        )
        for i in range(17)
    ]
    for question, given in zip(questions, answer(loaded, questions), strict=True):
        together, alone = taken(given), taken(answer(loaded, [question])[0])
        assert together.loaded is loaded
        for name, expected in named(alone.distribution).items():
            np.testing.assert_allclose(named(together.distribution)[name], expected, atol=1e-5)
        assert together.value is not None
        assert alone.value is not None
        np.testing.assert_allclose(together.value, alone.value, atol=1e-5)
        expected = loaded.policy.acting_log_prob(question.observation, together.action)
        np.testing.assert_allclose(together.log_prob, expected, atol=1e-4)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_seed_gives_the_same_actions_again(action: str) -> None:
    made = specification(action=ACTIONS[action])
    asked = [question_of(40, 1, seed=11), question_of(40, 1, seed=12)]
    alone = taken(answer(loaded_of(made), asked[:1])[0])
    again, other = map(taken, answer(loaded_of(made), asked))
    actions: dict[str, Any] = dict(alone.action)
    for name, drawn in actions.items():
        np.testing.assert_allclose(again.action[name].astype(drawn.dtype), drawn, atol=1e-5)
    np.testing.assert_allclose(again.log_prob, alone.log_prob, atol=1e-4)
    assert any((other.action[name] != drawn).any() for name, drawn in actions.items())


def test_a_mask_does_not_affect_other_requests() -> None:
    loaded = loaded_of(specification())
    masks = {"action": np.array([[True, False, False]] * 500)}
    hidden, free = answer(loaded, [question_of(500, 1, masks=masks), question_of(500, 1)])
    assert set(taken(hidden).action["action"].tolist()) == {0}
    assert set(taken(free).action["action"].tolist()) == {0, 1, 2}


def test_an_observation_that_overflows_the_network_costs_no_other_request() -> None:
    loaded = loaded_of(specification(activation="relu"), version=9)
    huge = Question(observation={"observation": np.full((1, 4), 3e38, np.float32)}, rows=1)
    with np.errstate(all="ignore"):
        first, wrong, last = answer(loaded, [question_of(2, 1), huge, question_of(1, 2)])
    assert isinstance(wrong, NotFinite)
    assert "version 9" in str(wrong)
    assert taken(first).action["action"].shape == (2,)
    assert taken(last).action["action"].shape == (1,)


def test_a_non_finite_value_fails_the_request() -> None:
    loaded = loaded_of(specification())
    nn.init.constant_(loaded.policy.critic_head.bias, float("nan"))
    asked, plain = answer(loaded, [question_of(value=True), question_of()])
    assert isinstance(asked, NotFinite)
    assert taken(plain).value is None


def test_the_probability_of_another_action_is_computed_without_drawing() -> None:
    loaded = loaded_of(specification())
    action = {"action": np.array([0, 1, 2, 1])}
    question = question_of(4, 3, taken=action)
    given = taken(answer(loaded, [question])[0])
    expected = loaded.policy.log_prob(question.observation, action)
    np.testing.assert_allclose(given.log_prob, expected, atol=1e-5)
    broken(loaded.policy)
    assert isinstance(answer(loaded, [question])[0], NotFinite)


def test_a_pass_costs_what_the_newest_of_the_nearest_smaller_size_did() -> None:
    cost = PassCost()
    assert cost.of(64) == 0.0
    cost.note(4, 0.001)
    assert cost.of(64) == cost.of(1) == 0.001
    for _ in range(20):
        cost.note(4, 0.01)
    assert cost.of(4) == pytest.approx(0.01, rel=0.02)
    cost.note(1, 0.0005)
    cost.note(256, 0.004)
    assert (cost.of(1), cost.of(300)) == (0.0005, 0.004)
    assert cost.of_many(512 + 1, 256) == pytest.approx(0.0085)
