"""The steps of the loop that start no process: when a round begins, and what becomes of a canary."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.registry.records import Status
from penstock.runtime.exit import Fatal
from penstock.workloads.chat import loop_state
from penstock.workloads.chat.loop_state import LoopOrder, LoopState, Outcome, Step, round_folder, weigh
from tests.support.chat.loop_stand import POLICY, LoopStand, loop_stand, soon

ORDER = LoopOrder(labels=10, patience=20)


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[LoopStand]:
    """A run with a version that answers, and one that a round made."""
    with loop_stand(tmp_path) as made:
        yield made


def once(stand: LoopStand, order: LoopOrder = ORDER) -> LoopState:
    """Where the loop stands after its round."""
    stand.loop(order, threading.Event()).go()
    return stand.state()


@pytest.mark.promise("canary-loop-promoted-proof")
def test_a_canary_that_is_proved_better_is_promoted(stand: LoopStand) -> None:
    stand.on_trial()
    stand.see(canary=1.0, active=-1.0, people=100)
    (past,) = once(stand).past
    assert (past.outcome, past.version, past.labels) == (Outcome.PROMOTED, stand.made.version, 7)
    active = stand.registry.active(POLICY)
    assert active is not None
    assert active.version == stand.made.version
    assert active.reason.startswith("better for higher_return after 100 clients of the canary and 100")


def test_a_canary_that_servers_withdraw_ends_the_round(stand: LoopStand) -> None:
    stand.on_trial()
    stand.registry.rollback(POLICY, "worse", by="server", version=stand.made.version)
    state = once(stand)
    assert (state.step, state.taken, state.version) == (Step.WAITING, 3, None)
    assert (state.past[-1].outcome, state.past[-1].why) == (Outcome.WITHDRAWN, "worse")


@pytest.mark.promise("canary-loop-promoted-proof")
@pytest.mark.parametrize("level", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_a_canary_that_nothing_is_proved_of_is_withdrawn_in_time(stand: LoopStand, level: float) -> None:
    stand.on_trial()
    if level:
        stand.see(canary=level, active=level, people=30)
    with stand.going(ORDER):
        stand.rate(19)
        assert not soon(lambda: bool(stand.state().past), within_s=3)
        stand.rate(1, begin=19)
        assert soon(lambda: bool(stand.state().past))
    (past,) = stand.state().past
    assert past.outcome is Outcome.UNPROVED
    assert past.why.startswith("nothing was proved after 20 further ratings")
    assert stand.registry.get(POLICY, stand.made.version).status is Status.ROLLED_BACK
    active = stand.registry.active(POLICY)
    assert active is not None
    assert active.version == 1


def test_a_version_that_was_made_becomes_the_canary_of_the_server_that_answers(stand: LoopStand) -> None:
    stand.at(step=Step.TRIAL, version=stand.made.version)
    with stand.going(LoopOrder(labels=10, share=0.3)):
        assert soon(lambda: stand.registry.canary(POLICY) is not None)
    assert stand.registry.traffic(POLICY).canary_share == 0.3
    with stand.going(ORDER):
        stand.registry.promote(POLICY, stand.made.version, "I like it", by="operator/ann")
        assert soon(lambda: bool(stand.state().past))
    assert (stand.state().past[0].outcome, stand.state().past[0].why) == (Outcome.PROMOTED, "I like it")
    assert [one.action.value for one in stand.registry.events(POLICY)].count("promoted") == 3


def test_what_is_paused_neither_promotes_nor_begins(stand: LoopStand) -> None:
    stand.on_trial()
    stand.see(canary=1.0, active=-1.0, people=100)
    loop_state.pause(stand.folder, "holidays", "ann")
    with stand.going(ORDER):
        assert not soon(lambda: bool(stand.state().past), within_s=2.5)
        loop_state.resume(stand.folder)
        assert soon(lambda: bool(stand.state().past))


@pytest.mark.promise("loop-chat-makes-round")
def test_a_flood_of_one_person_begins_no_round(stand: LoopStand) -> None:
    with stand.going(LoopOrder(labels=205)):
        stand.rate(500, rater="flooder")
        assert soon(lambda: stand.state().labels == 200)
        assert not soon(lambda: stand.state().number > 0, within_s=2.5)
        stand.rate(5, begin=1000)
        assert soon(lambda: stand.state().number == 1)
    state = stand.state()
    assert (state.through, state.labels) == (505, 205)


def test_a_step_that_fails_has_the_loop_wait_with_its_cause(stand: LoopStand) -> None:
    (round_folder(stand.folder, 1) / "believed.jsonl").write_text('{"key": "charm"}\n')
    stand.at(step=Step.REWARD)
    with pytest.raises(Fatal, match="no rating is of thumb, .* --head NAME=SCALE"):
        once(stand)
    with stand.going(ORDER):
        assert soon(lambda: loop_state.read_pause(stand.folder) is not None)
    pause = loop_state.read_pause(stand.folder)
    assert pause is not None
    assert pause.by == "loop"
    assert "reward failed: no rating is of" in pause.reason
    assert stand.state().step is Step.REWARD


def failing(stand: LoopStand) -> None:
    """The loop is at a step that fails each time: nobody has rated anything that the page asks for."""
    (round_folder(stand.folder, 1) / "believed.jsonl").write_text('{"key": "charm"}\n')
    stand.at(step=Step.REWARD)


def test_a_step_that_fails_is_tried_so_often_and_then_waits_for_somebody(stand: LoopStand) -> None:
    failing(stand)
    with stand.going(ORDER, waits_s=(0.0, 0.0)):
        for _ in range(2):
            assert soon(lambda: stand.state().tries == 3)
            assert soon(lambda: loop_state.read_pause(stand.folder) is not None)
            pause = loop_state.read_pause(stand.folder)
            assert pause is not None
            assert (pause.by, pause.until_s) == ("loop", None)
            loop_state.resume(stand.folder)
            assert soon(lambda: stand.state().tries < 3)


def test_the_next_try_comes_by_itself_or_at_once_where_somebody_says_so(stand: LoopStand) -> None:
    failing(stand)
    begun_s = time.time()
    with stand.going(ORDER, waits_s=(600.0, 6000.0)):
        for tries, wait_s in ((1, 600.0), (2, 6000.0)):
            assert soon(lambda: loop_state.read_pause(stand.folder) is not None)
            pause = loop_state.read_pause(stand.folder)
            assert pause is not None
            assert pause.until_s is not None
            assert pause.until_s >= begun_s + wait_s
            assert stand.state().tries == tries
            loop_state.resume(stand.folder)


def test_a_round_that_fails_is_given_up_by_whoever_says_so(stand: LoopStand) -> None:
    failing(stand)
    with stand.going(ORDER, waits_s=()):
        assert soon(lambda: loop_state.read_pause(stand.folder) is not None)
        assert loop_state.abandon(stand.folder, "nobody rates charm", "ann") == 1
        assert soon(lambda: bool(stand.state().past))
        assert soon(lambda: loop_state.read_abandonment(stand.folder) is None)
    state = stand.state()
    (past,) = state.past
    assert (past.outcome, past.why) == (Outcome.ABANDONED, "by ann: nobody rates charm")
    assert (state.step, state.failure, state.tries, state.taken) == (Step.WAITING, "", 0, 3)
    assert loop_state.read_pause(stand.folder) is None
    assert not (round_folder(stand.folder, 1) / "believed.jsonl").exists()
    with pytest.raises(ConfigurationError, match="round 2 has not begun: there is nothing to abandon"):
        loop_state.abandon(stand.folder, "once more", "ann")


def test_a_step_that_goes_on_ends_where_its_round_is_given_up(stand: LoopStand) -> None:
    (round_folder(stand.folder, 1) / "believed.jsonl").write_text('{"key": "thumb"}\n')
    stand.at(step=Step.REWARD)
    steps = round_folder(stand.folder, 1) / "steps.log"
    with stand.going(ORDER):
        assert soon(lambda: steps.exists() and steps.read_text().startswith("$ penstock rlhf reward train"))
        loop_state.pause(stand.folder, "holidays", "ann")
        loop_state.abandon(stand.folder, "too slow", "ann")
        assert soon(lambda: bool(stand.state().past), within_s=120)
    assert stand.state().past[0].outcome is Outcome.ABANDONED
    assert loop_state.read_pause(stand.folder) == loop_state.Pause("holidays", "ann")
    loop_state.resume(stand.folder)
    stand.at(step=Step.TRIAL, version=stand.made.version)
    loop_state.abandon(stand.folder, "x", "ann")
    stand.at(number=2, step=Step.TRIAL, version=stand.made.version)
    with stand.going(ORDER):
        assert soon(lambda: loop_state.read_abandonment(stand.folder) is None)
        assert soon(lambda: stand.registry.canary(POLICY) is not None)
    assert stand.state().past == ()


@pytest.mark.parametrize("is_tried", [True, False])
def test_nobody_is_answered_by_the_version_of_a_round_that_was_given_up(
    stand: LoopStand, *, is_tried: bool
) -> None:
    if is_tried:
        stand.on_trial()
    else:
        stand.at(step=Step.TRIAL, version=stand.made.version)
    loop_state.abandon(stand.folder, "I do not like it", "ann")
    state = once(stand)
    assert state.past[-1].outcome is Outcome.ABANDONED
    made = stand.registry.get(POLICY, stand.made.version)
    assert made.status is (Status.ROLLED_BACK if is_tried else Status.RETIRED)
    assert (stand.registry.events(POLICY)[0].by, made.reason) == ("ann", "I do not like it")
    assert stand.registry.canary(POLICY) is None


def test_a_reward_model_that_failed_is_tried_again_with_what_was_said_since(stand: LoopStand) -> None:
    file = round_folder(stand.folder, 1) / "believed.jsonl"
    file.write_text('{"key": "corrected"}\n')
    stand.rate(3)
    stand.at(step=Step.REWARD, failure="no rating is of thumb")
    loop_state.pause(stand.folder, "reward failed", "loop")
    stand.rate(4, begin=3)
    with stand.going(ORDER):
        loop_state.resume(stand.folder)
        assert soon(lambda: (file.parent / "steps.log").exists())
    state = stand.state()
    assert (state.number, state.step, state.through, state.labels) == (1, Step.REWARD, 7, 7)
    assert sum('"key": "thumb"' in line for line in file.read_text().splitlines()) == 7


def test_a_reward_model_is_trained_under_the_weights_that_people_have_changed(stand: LoopStand) -> None:
    folder = round_folder(stand.folder, 1)
    (folder / "believed.jsonl").write_text('{"key": "thumb"}\n')
    stand.at(step=Step.REWARD)
    weigh(stand.folder, {"thumb": 3.0}, "thumbs are what people give", "ann")
    steps = folder / "steps.log"
    with stand.going(LoopOrder(labels=10, weights=("thumb=2",))):
        assert soon(lambda: steps.exists() and steps.read_text().startswith("$ penstock rlhf reward train"))
    begun = steps.read_text().splitlines()[0].split()
    assert [one for one in begun if one.startswith("--weight=thumb=")][-1] == "--weight=thumb=3.0"


def test_one_loop_has_a_run_at_a_time(stand: LoopStand) -> None:
    with stand.going(ORDER):
        assert soon(lambda: (stand.folder / "loop.json").exists())
        with pytest.raises(ConfigurationError, match="another loop runs on this run"):
            once(stand)


def test_a_run_without_an_active_version_gets_its_newest_one(stand: LoopStand) -> None:
    stand.registry.promote(POLICY, stand.made.version, "x", by="test")
    stand.registry.rollback(POLICY, "y", by="test")
    stand.registry.retire(POLICY, stand.made.version, "z", by="test")
    stand.rate(10)
    with stand.going(ORDER):
        assert soon(lambda: stand.state().number == 1)
    active = stand.registry.active(POLICY)
    assert active is not None
    assert active.version == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labels": 0}, "--labels 0: must be at least 1"),
        ({"patience": -1}, "--patience -1: must be at least 1"),
        ({"share": 1.0}, r"--share 1: must be above 0 and at most 0\.8"),
        ({"share": float("nan")}, "--share nan: must be above 0"),
        (
            {"weights": ("security=1",)},
            "--weight security: there is no such head; use thumb, relevance, .*, preferred",
        ),
        ({"weights": ("thumb=many",)}, "--weight 'thumb=many': write NAME=NUMBER"),
        ({"weights": ("thumb=nan",)}, "--weight 'thumb=nan': must be 0 or more, and finite"),
        ({"heads": ("charm=0:10",), "weights": ("thumb=1",)}, "--weight thumb: .* use charm, preferred"),
        ({"heads": ("charm",)}, "head 'charm': write NAME=SCALE"),
        ({"least_auc": 1.5}, r"--least-auc 1\.5: must lie between 0 and 1"),
        ({"heads": ("thumb=thumbs",), "weights": ("thumb=0",)}, "all weights are 0: give at least one head"),
        ({"reward": ("epochs=-1",)}, "--reward epochs=-1: .* greater than 0"),
        ({"train": ("learner.total_step=4",)}, r"--train learner\.total_step: unknown key"),
        ({"train": ("learner.total_steps=-4",)}, r"--train learner\.total_steps=-4: .* greater than 0"),
    ],
)
def test_what_does_not_fit_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LoopOrder(**wrong)


def test_weights_are_of_what_was_rated() -> None:
    order = LoopOrder(weights=("thumb=2", "safety=1", "preferred=0.5"))
    assert order.weights_of(["thumb=thumbs"], {}) == ["thumb=2", "preferred=0.5"]
    assert order.weights_of(["thumb=thumbs", "safety=stars"], {}) == list(order.weights)
