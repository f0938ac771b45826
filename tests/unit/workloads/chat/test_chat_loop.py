import json
import os
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.actor.serving.release import is_same_network
from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import load
from penstock.learner.model import make_model as make_learned
from penstock.policy import weights
from penstock.registry.records import Status
from penstock.runtime.exit import Fatal
from penstock.workloads.chat import step_process
from penstock.workloads.chat.commands import loop_commands
from penstock.workloads.chat.learning_loop import recipe_of
from penstock.workloads.chat.loop_state import (
    MOST_PAST,
    LoopOrder,
    LoopState,
    Outcome,
    Pause,
    Step,
    abandon,
    look_at_loop,
    pause,
    read_abandonment,
    read_pause,
    read_state,
    resume,
    round_folder,
    weigh,
    write_state,
)
from tests.support.chat.chat_stand import POLICY, LoopStand, loop_stand, soon
from tests.support.language.text_stand import make_model

ORDER = LoopOrder(labels=10, patience=20)


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[LoopStand]:
    """A run with a version that answers, and one that a round made."""
    with loop_stand(tmp_path) as made:
        yield made


def once(stand: LoopStand, order: LoopOrder = ORDER) -> LoopState:
    stand.loop(order, threading.Event()).go()
    return stand.state()


@pytest.mark.promise("canary-loop-promoted-proof")
def test_a_canary_shown_to_be_better_is_promoted(stand: LoopStand) -> None:
    stand.on_trial()
    stand.see(canary=1.0, active=-1.0, people=100)
    (past,) = once(stand).past
    assert (past.outcome, past.version, past.labels) == (Outcome.PROMOTED, stand.made.version, 7)
    active = stand.answering()
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
def test_a_canary_without_evidence_is_withdrawn_after_its_time(stand: LoopStand, level: float) -> None:
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
    assert stand.answering().version == 1


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


@pytest.mark.parametrize(
    ("verdict", "order", "is_tried"),
    [
        ("better", ORDER, True),
        ("chance", ORDER, False),
        ("worse", ORDER, False),
        ("chance", replace(ORDER, any_version=True), True),
        (None, ORDER, True),
    ],
)
def test_only_a_version_that_its_own_evaluation_finds_better_goes_on_trial(
    stand: LoopStand, verdict: str | None, order: LoopOrder, *, is_tried: bool
) -> None:
    run = round_folder(stand.folder, 1) / "run"
    base = {"difference": -0.017, "low": -0.2, "high": 0.16, "verdict": verdict}
    evaluation = {"mean": 0.5} | ({} if verdict is None else {"base": base})
    summary = {"run": stand.made.run, "interrupted": False, "evaluation": evaluation}
    (run / "summary.json").write_text(json.dumps(summary))
    (run.parent / step_process.BEGIN).write_bytes(b"")
    stand.at(step=Step.TRAINING)
    with stand.going(order):
        assert soon(lambda: (stand.registry.canary(POLICY) is not None) or bool(stand.state().past))
    assert (stand.registry.canary(POLICY) is not None) is is_tried
    if not is_tried:
        (past,) = stand.state().past
        assert (past.outcome, past.version) == (Outcome.UNPROVED, stand.made.version)
        assert past.why.endswith("the version it began with: -0.017 (-0.200 to +0.160)")
        assert stand.registry.get(POLICY, stand.made.version).status is Status.RETIRED
        assert stand.state().step is Step.WAITING


def test_a_paused_loop_neither_promotes_nor_starts(stand: LoopStand) -> None:
    stand.on_trial()
    stand.see(canary=1.0, active=-1.0, people=100)
    pause(stand.folder, "holidays", "ann")
    with stand.going(ORDER):
        assert not soon(lambda: bool(stand.state().past), within_s=2.5)
        resume(stand.folder)
        assert soon(lambda: bool(stand.state().past))


@pytest.mark.promise("loop-chat-makes-round")
def test_a_flood_of_ratings_by_one_person_starts_no_round(stand: LoopStand) -> None:
    with stand.going(LoopOrder(labels=205)):
        stand.rate(500, rater="flooder")
        assert soon(lambda: stand.state().labels == 200)
        assert not soon(lambda: stand.state().number > 0, within_s=2.5)
        stand.rate(5, begin=1000)
        assert soon(lambda: stand.state().number == 1)
    state = stand.state()
    assert (state.through, state.labels) == (505, 205)


def failing(stand: LoopStand) -> None:
    """The loop is at a step that fails each time: nobody has rated anything that the page asks for."""
    (round_folder(stand.folder, 1) / "believed.jsonl").write_text('{"key": "charm"}\n')
    stand.at(step=Step.REWARD)


def test_a_failing_step_is_retried_a_few_times_and_then_waits_for_an_operator(stand: LoopStand) -> None:
    failing(stand)
    with pytest.raises(Fatal, match="no rating is of thumb, .* --head NAME=SCALE"):
        once(stand)
    failing(stand)
    begun_s = time.time()
    with stand.going(ORDER, waits_s=(600.0, 6000.0)):
        for tries, wait_s in ((1, 600.0), (2, 6000.0), (3, None), (1, 600.0)):
            assert soon(lambda: read_pause(stand.folder) is not None)
            paused = read_pause(stand.folder)
            assert paused is not None
            assert paused.by == "loop"
            assert "reward failed: no rating is of" in paused.reason
            assert (stand.state().step, stand.state().tries) == (Step.REWARD, tries)
            if wait_s is None:
                assert paused.until_s is None
            else:
                assert paused.until_s is not None
                assert paused.until_s >= begun_s + wait_s
            resume(stand.folder)


def test_an_operator_abandons_a_failed_round(stand: LoopStand) -> None:
    failing(stand)
    with stand.going(ORDER, waits_s=()):
        assert soon(lambda: read_pause(stand.folder) is not None)
        assert abandon(stand.folder, "nobody rates charm", "ann") == 1
        assert soon(lambda: bool(stand.state().past))
        assert soon(lambda: read_abandonment(stand.folder) is None)
    state = stand.state()
    (past,) = state.past
    assert (past.outcome, past.why) == (Outcome.ABANDONED, "by ann: nobody rates charm")
    assert (state.step, state.failure, state.tries, state.taken) == (Step.WAITING, "", 0, 3)
    assert read_pause(stand.folder) is None
    assert not (round_folder(stand.folder, 1) / "believed.jsonl").exists()
    with pytest.raises(ConfigurationError, match="round 2 has not begun: there is nothing to abandon"):
        abandon(stand.folder, "once more", "ann")


def test_a_running_step_ends_when_its_round_is_abandoned(stand: LoopStand) -> None:
    (round_folder(stand.folder, 1) / "believed.jsonl").write_text('{"key": "thumb"}\n')
    stand.at(step=Step.REWARD)
    steps = round_folder(stand.folder, 1) / "steps.log"
    with stand.going(ORDER):
        assert soon(lambda: steps.exists() and steps.read_text().startswith("$ penstock rlhf reward train"))
        pause(stand.folder, "holidays", "ann")
        abandon(stand.folder, "too slow", "ann")
        assert soon(lambda: bool(stand.state().past), within_s=120)
    assert stand.state().past[0].outcome is Outcome.ABANDONED
    assert read_pause(stand.folder) == Pause("holidays", "ann")
    resume(stand.folder)
    stand.at(step=Step.TRIAL, version=stand.made.version)
    abandon(stand.folder, "x", "ann")
    stand.at(number=2, step=Step.TRIAL, version=stand.made.version)
    with stand.going(ORDER):
        assert soon(lambda: read_abandonment(stand.folder) is None)
        assert soon(lambda: stand.registry.canary(POLICY) is not None)
    assert stand.state().past == ()


@pytest.mark.parametrize("is_tried", [True, False])
def test_the_version_of_an_abandoned_round_answers_nobody(stand: LoopStand, *, is_tried: bool) -> None:
    if is_tried:
        stand.on_trial()
    else:
        stand.at(step=Step.TRIAL, version=stand.made.version)
    abandon(stand.folder, "I do not like it", "ann")
    state = once(stand)
    assert state.past[-1].outcome is Outcome.ABANDONED
    made = stand.registry.get(POLICY, stand.made.version)
    assert made.status is (Status.ROLLED_BACK if is_tried else Status.RETIRED)
    assert (stand.registry.events(POLICY)[0].by, made.reason) == ("ann", "I do not like it")
    assert stand.registry.canary(POLICY) is None


def test_a_failed_reward_model_is_retried_with_newer_ratings(stand: LoopStand) -> None:
    file = round_folder(stand.folder, 1) / "believed.jsonl"
    file.write_text('{"key": "corrected"}\n')
    stand.rate(3)
    stand.at(step=Step.REWARD, failure="no rating is of thumb")
    pause(stand.folder, "reward failed", "loop")
    stand.rate(4, begin=3)
    with stand.going(ORDER):
        resume(stand.folder)
        assert soon(lambda: (file.parent / "steps.log").exists())
    state = stand.state()
    assert (state.number, state.step, state.through, state.labels) == (1, Step.REWARD, 7, 7)
    assert sum('"key": "thumb"' in line for line in file.read_text().splitlines()) == 7


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ('{\n  "a": [\n    1\n  ]\n}\n', ""),
        ('{\n  "run": "a",\n  "failure": "the disk is full"\n}\n', "the disk is full"),
        ('no such file\n{\n  "a": 1\n}\n', "no such file"),
        ('{\n  "a": 1\n}\nactor-0 died 5 times\n\n', "actor-0 died 5 times"),
        ('{"line": 1}\nthe end', "the end"),
    ],
)
def test_a_failed_step_says_its_error_and_no_piece_of_what_it_printed(
    tmp_path: Path, printed: str, said: str
) -> None:
    (tmp_path / "log").write_text(f"$ penstock train\n{printed}")
    assert step_process._last_line(tmp_path / "log", len("$ penstock train\n")) == said


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


def test_only_one_loop_at_a_time_uses_a_run(stand: LoopStand) -> None:
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
    assert stand.answering().version == 1


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
def test_settings_that_do_not_fit_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LoopOrder(**wrong)


def test_only_rated_heads_have_weights() -> None:
    order = LoopOrder(weights=("thumb=2", "safety=1", "preferred=0.5"))
    assert order.weights_of(["thumb=thumbs"], {}) == ["thumb=2", "preferred=0.5"]
    assert order.weights_of(["thumb=thumbs", "safety=stars"], {}) == list(order.weights)


def test_settings_of_a_round_cannot_be_overridden() -> None:
    of_environment = ("id=CartPole-v1", "kwargs={}", "kwargs.model=/elsewhere", "kwargs.reward=/elsewhere")
    for assignment in (
        *("workload=control", "run=another", *(f"environment.{one}" for one in of_environment)),
        *("learner.feed_from=/elsewhere", "policy.kwargs.begin_with=/elsewhere"),
        *("registry.url=sqlite:///elsewhere", "serving.policy=another"),
    ):
        key = assignment.partition("=")[0]
        with pytest.raises(ConfigurationError, match=f"^--train {key}: the loop sets it in every round"):
            LoopOrder(train=(assignment,))
    said = ("learner.total_steps=64", "environment.kwargs.max_new_tokens=4", "policy.kwargs.rank=2", "seed=3")
    assert LoopOrder(train=said).train == said


def test_a_state_is_restored_unchanged(tmp_path: Path) -> None:
    state = LoopState(number=4, step=Step.TRIAL, taken=5, through=9, labels=3, version=70, auc=0.7)
    state = replace(state, judge={"round": 4, "weights": {"thumb": 1.0}})
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    after = state.ended(Outcome.PROMOTED, "better")
    assert (after.taken, after.step, after.version, after.number) == (9, Step.WAITING, None, 4)
    assert after.judge == state.judge, "the newest reward model is that of a round that is over"
    write_state(tmp_path, after)
    assert read_state(tmp_path) == after
    many = replace(after, past=after.past * (MOST_PAST + 1)).ended(Outcome.WITHDRAWN, "worse")
    assert len(many.past) == MOST_PAST
    assert many.past[-1].outcome is Outcome.WITHDRAWN


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"past": [], "step": "asleep"}', '{"past": [{}]}', "\x00"])
def test_a_damaged_state_is_refused_with_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "loop.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"loop\.json: cannot be read .* move .* away"):
        read_state(tmp_path)


def test_a_loop_is_paused_until_it_is_resumed(tmp_path: Path) -> None:
    assert read_pause(tmp_path) is None
    pause(tmp_path, "holidays", "ann")
    assert read_pause(tmp_path) == Pause("holidays", "ann")
    (tmp_path / "paused.json").write_text("{")
    assert read_pause(tmp_path) is not None
    resume(tmp_path)
    resume(tmp_path)
    assert read_pause(tmp_path) is None


MEASURES = {
    "heads": {
        "thumb": {"ratings": 40, "squared_error": 0.2, "auc": 0.81, "calibration_error": 0.04},
        "safety": {"ratings": 0, "squared_error": None, "auc": None, "calibration_error": None},
        "thumb-1": {"ratings": 20, "squared_error": 0.3, "auc": 0.7, "calibration_error": 0.1},
    },
    "pairs": 5,
    "pair_accuracy": 0.8,
}
CARD = {
    "weights": {"thumb": 2.0, "safety": 1.0, "thumb-1": 0.0, "preferred": 0.0},
    "trained": {"measures": MEASURES, "bad_rows_shown": ["line 3: what somebody wrote"]},
}


@pytest.fixture
def view_stand(tmp_path: Path) -> Iterator[LoopStand]:
    """A run whose loop has trained a reward model in round 4, which was not believed."""
    with loop_stand(tmp_path) as made:
        (tmp_path / "heads.json").write_text(json.dumps(CARD))
        judge = {"round": 4, **step_process.facts_of(tmp_path / "heads.json")}
        state = LoopState(number=4, step=Step.REWARD, order=LoopOrder().shown(), judge=judge)
        write_state(made.folder, state.ended(Outcome.UNLEARNED, "it tells apart 0.48"))
        yield made


def test_the_newest_reward_model_is_reported_by_criterion(view_stand: LoopStand) -> None:
    weigh(view_stand.folder, {"safety": 3.0}, "children read it", "ann")
    found = look_at_loop(view_stand.run.folder, view_stand.registry, POLICY)
    assert found is not None
    assert found["weights"]["safety"] == 3.0
    judge = found["judge"]
    assert [one["head"] for one in judge["heads"]] == ["thumb", "safety"]
    said = {"head": "thumb", "weight": 2.0, "ratings": 40, "auc": 0.81}
    assert judge["heads"][0] == {**said, "squaredError": 0.2, "calibrationError": 0.04}
    assert (judge["heads"][1]["ratings"], judge["heads"][1]["auc"]) == (0, None)
    assert (judge["round"], judge["pairs"], judge["pairAccuracy"]) == (4, 5, 0.8)
    assert "somebody wrote" not in (view_stand.folder / "loop.json").read_text()


def status_of(stand: LoopStand) -> str:
    return CliRunner().invoke(loop_commands, ["status", str(stand.run.folder)]).stdout


def test_the_status_names_why_a_step_failed_and_the_remedy(view_stand: LoopStand) -> None:
    state = replace(view_stand.state(), number=4, step=Step.TRAINING, failure="no memory", tries=2)
    write_state(view_stand.folder, state)
    pause(view_stand.folder, "training failed: no memory", "loop", time.time() + 9e6)
    said = status_of(view_stand)
    assert said.startswith("round 4: training, paused\nfailed 2 times: no memory\ntried again at 2")
    assert "`penstock chat loop resume` tries it at once, `penstock chat loop abandon` gives" in said
    pause(view_stand.folder, "training failed: no memory", "loop")
    assert "paused by loop: training failed: no memory" in status_of(view_stand)
    words = ["abandon", str(view_stand.run.folder), "--reason", "too small"]
    given = CliRunner().invoke(loop_commands, words)
    assert (given.exit_code, given.stdout[:20]) == (0, "round 4 is given up ")
    assert ", once the loop looks: too small" in status_of(view_stand)
    write_state(view_stand.folder, replace(state, step=Step.WAITING, failure=""))
    refused = CliRunner().invoke(loop_commands, words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "round 5 has not begun: there is nothing to abandon" in refused.stderr


def test_the_status_shows_each_criterion_and_its_accuracy(view_stand: LoopStand) -> None:
    pause(view_stand.folder, "holidays\nround 4 promoted", "ann")
    write_state(view_stand.folder, replace(view_stand.state(), failure="\x1b[31mno memory", tries=1))
    said = status_of(view_stand)
    assert r"paused by ann: holidays\nround 4 promoted" in said.splitlines()
    assert r"failed: \x1b[31mno memory" in said.splitlines()
    assert "weights from the next reward model on: thumb 1, relevance 1" in said
    assert (
        "reward model of round 4, thumb of weight 2, on 40 ratings held out: area under the curve 0.810, "
        "squared error 0.200, calibration error 0.040"
    ) in said
    assert "safety of weight 1, on 0 ratings held out: area under the curve unknown" in said
    write_state(view_stand.folder, replace(view_stand.state(), judge={}))
    assert "reward model of round" not in status_of(view_stand)


def test_a_canary_on_trial_is_reported_with_its_verdict(view_stand: LoopStand) -> None:
    view_stand.on_trial()
    trial = f"version {view_stand.made.version} is on trial:"
    assert f"{trial} no verdict yet; 0 people have it" in status_of(view_stand)
    view_stand.see(0.0, 1.0, 400)
    assert f"{trial} withdraw; " in status_of(view_stand)


@pytest.mark.promise("people-wrote-nothing-stays")
def test_a_finished_round_keeps_weights_and_deletes_texts(tmp_path: Path) -> None:
    lasting = {"run/policies/7.safetensors", "run/summary.json", "run/config.toml", "steps.log"}
    written = {"believed.jsonl", "prompts.jsonl", "judge/heads.json"}
    for name in (*lasting, *written, "run/redis/dump.rdb", "run/checkpoints/1/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "run" / "elsewhere").symlink_to(tmp_path)
    for _ in range(2):
        step_process.forget_texts(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == lasting


def test_a_reward_model_is_judged_by_thumbs_else_by_pairs(tmp_path: Path) -> None:
    card = tmp_path / "heads.json"
    for heads, pairs, expected in (
        ({"thumb": {"auc": 0.7}}, None, (0.7, 0.7)),
        ({"thumb": {"auc": None}}, 0.6, (None, 0.6)),
        ({"safety": {"auc": 0.9}}, 0.4, (None, 0.4)),
        ({}, None, (None, None)),
    ):
        card.write_text(json.dumps({"trained": {"measures": {"heads": heads, "pair_accuracy": pairs}}}))
        assert step_process.told_apart(card) == expected


def test_heads_are_those_that_were_rated(tmp_path: Path) -> None:
    file = tmp_path / "believed.jsonl"
    file.write_text("".join(json.dumps({"key": key}) + "\n" for key in ("safety", "thumb", "preferred")))
    assert step_process.rated_heads(file) == ["thumb=thumbs", "safety=stars"]
    file.write_text('{"key": "charm"}\n')
    with pytest.raises(step_process.StepFailed, match="--head NAME=SCALE"):
        step_process.rated_heads(file)


def test_a_training_is_done_when_its_folder_shows_it(tmp_path: Path) -> None:
    assert step_process.summary_of(tmp_path) is None
    for text in ("{", '{"interrupted": true}', '{"interrupted": false, "failure": "x"}'):
        (tmp_path / "summary.json").write_text(text)
        assert step_process.summary_of(tmp_path) is None
    (tmp_path / "summary.json").write_text('{"interrupted": false}')
    assert step_process.summary_of(tmp_path) is not None


def test_versions_of_the_training_can_be_arms_of_the_serving_run(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    with loop_stand(tmp_path, str(base)) as stand:
        folder = tmp_path / "round"
        folder.mkdir()
        made = load([tomllib.loads(recipe_of(stand.run, folder, 3))])
        assert made.run == "talk-round-3"
        assert made.registry.url == stand.run.url
        assert not made.registry.activate_first
        assert made.serving.listen == ""
        assert made.environment.kwargs["reward"] == str(folder / "judge")
        assert made.policy.kwargs["begin_with"] == str(folder / "begin.safetensors")
        served = make_learned(stand.run.settings)
        (folder / "begin.safetensors").write_bytes(
            weights.encode(served.algorithm.published_modules()["default"])
        )
        assert is_same_network(make_learned(made).specification, served.specification)


def test_a_step_that_was_killed_is_said_to_be_and_one_that_fails_says_why(tmp_path: Path) -> None:
    def kill(seconds: float) -> bool:
        wanted = ["pgrep", "-P", str(os.getpid()), "-f", "reward train"]
        found = subprocess.run(wanted, capture_output=True, check=False, text=True).stdout
        for pid in found.split():
            os.kill(int(pid), signal.SIGKILL)
        return threading.Event().wait(seconds)

    said = "`penstock rlhf reward train`: "
    with pytest.raises(step_process.StepFailed, match=f"{said}was killed by signal 9; its last line: "):
        step_process.run_step(["rlhf", "reward", "train", "nothing.jsonl"], tmp_path, kill)
    assert (tmp_path / step_process.LOG).read_text().startswith("$ penstock rlhf reward train nothing.jsonl")
    with pytest.raises(step_process.StepFailed, match=f"{said}.*Missing option"):
        step_process.run_step(["rlhf", "reward", "train", "nothing.jsonl"], tmp_path, threading.Event().wait)
