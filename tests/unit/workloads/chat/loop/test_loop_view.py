"""What those who look after a chat see of its loop: what counts, and how well the reward model knows it."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.workloads.chat.commands import loop_commands
from penstock.workloads.chat.loop_state import (
    LoopOrder,
    LoopState,
    Outcome,
    Step,
    look_at_loop,
    pause,
    weigh,
    write_state,
)
from penstock.workloads.chat.step_process import facts_of
from tests.support.chat.loop_stand import POLICY, LoopStand, loop_stand

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
def stand(tmp_path: Path) -> Iterator[LoopStand]:
    """A run whose loop has trained a reward model in round 4, which was not believed."""
    with loop_stand(tmp_path) as made:
        (tmp_path / "heads.json").write_text(json.dumps(CARD))
        judge = {"round": 4, **facts_of(tmp_path / "heads.json")}
        state = LoopState(number=4, step=Step.REWARD, order=LoopOrder().shown(), judge=judge)
        write_state(made.folder, state.ended(Outcome.UNLEARNED, "it tells apart 0.48"))
        yield made


def test_the_newest_reward_model_is_told_by_criterion(stand: LoopStand) -> None:
    weigh(stand.folder, {"safety": 3.0}, "children read it", "ann")
    found = look_at_loop(stand.run.folder, stand.registry, POLICY)
    assert found is not None
    assert found["weights"]["safety"] == 3.0
    judge = found["judge"]
    assert [one["head"] for one in judge["heads"]] == ["thumb", "safety"]
    assert judge["heads"][0] == {
        "head": "thumb",
        "weight": 2.0,
        "ratings": 40,
        "auc": 0.81,
        "squaredError": 0.2,
        "calibrationError": 0.04,
    }
    assert (judge["heads"][1]["ratings"], judge["heads"][1]["auc"]) == (0, None)
    assert (judge["round"], judge["pairs"], judge["pairAccuracy"]) == (4, 5, 0.8)
    assert "somebody wrote" not in (stand.folder / "loop.json").read_text()


def test_the_status_says_why_a_step_failed_and_what_one_may_do(stand: LoopStand) -> None:
    words = ["status", str(stand.run.folder)]
    state = replace(stand.state(), number=4, step=Step.TRAINING, failure="no memory", tries=2)
    write_state(stand.folder, state)
    pause(stand.folder, "training failed: no memory", "loop", time.time() + 9e6)
    said = CliRunner().invoke(loop_commands, words).stdout
    assert said.startswith("round 4: training, paused\nfailed 2 times: no memory\ntried again at 2")
    assert "`penstock chat loop resume` tries it at once, `penstock chat loop abandon` gives" in said
    pause(stand.folder, "training failed: no memory", "loop")
    assert "paused by loop: training failed: no memory" in CliRunner().invoke(loop_commands, words).stdout
    given = CliRunner().invoke(loop_commands, ["abandon", str(stand.run.folder), "--reason", "too small"])
    assert (given.exit_code, given.stdout[:20]) == (0, "round 4 is given up ")
    said = CliRunner().invoke(loop_commands, words).stdout
    assert ", once the loop looks: too small" in said
    write_state(stand.folder, replace(state, step=Step.WAITING, failure=""))
    refused = CliRunner().invoke(loop_commands, ["abandon", str(stand.run.folder), "--reason", "x"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "round 5 has not begun: there is nothing to abandon" in refused.stderr


def test_what_people_wrote_is_no_line_of_the_status(stand: LoopStand) -> None:
    pause(stand.folder, "holidays\nround 4 promoted", "ann")
    write_state(stand.folder, replace(stand.state(), failure="\x1b[31mno memory", tries=1))
    told = CliRunner().invoke(loop_commands, ["status", str(stand.run.folder)]).stdout.splitlines()
    assert r"paused by ann: holidays\nround 4 promoted" in told
    assert r"failed: \x1b[31mno memory" in told


def test_the_status_says_what_counts_and_how_well_it_is_known(stand: LoopStand) -> None:
    words = ["status", str(stand.run.folder)]
    said = CliRunner().invoke(loop_commands, words).stdout
    assert "weights from the next reward model on: thumb 1, relevance 1" in said
    assert (
        "reward model of round 4, thumb of weight 2, on 40 ratings held out: area under the curve 0.810, "
        "squared error 0.200, calibration error 0.040"
    ) in said
    assert "safety of weight 1, on 0 ratings held out: area under the curve unknown" in said
    write_state(stand.folder, replace(stand.state(), judge={}))
    assert "reward model of round" not in CliRunner().invoke(loop_commands, words).stdout


def test_a_canary_on_trial_is_told_with_its_verdict(stand: LoopStand) -> None:
    words = ["status", str(stand.run.folder)]
    stand.on_trial()
    version = stand.made.version
    assert f"version {version} is on trial: no verdict yet; 0 people have it" in said_by(words)
    stand.see(0.0, 1.0, 400)
    assert f"version {version} is on trial: withdraw; " in said_by(words)


def said_by(words: list[str]) -> str:
    """What a command of the loop writes."""
    return CliRunner().invoke(loop_commands, words).stdout
