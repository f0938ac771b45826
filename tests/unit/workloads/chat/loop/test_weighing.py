"""What criteria count in the reward of a loop: changed by people, held to what can be, and never lost."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.commands import loop_commands
from penstock.workloads.chat.loop_state import (
    MOST_CHANGES,
    LoopOrder,
    LoopState,
    folder_of,
    read_head_weights,
    read_pause,
    standing_weights,
    weigh,
    write_state,
)
from tests.support.chat.loop_stand import loop_stand

ORDER = LoopOrder(weights=("thumb=2", "safety=3"))
EVERY = {"thumb": 2.0, "relevance": 1.0, "helpfulness": 1.0, "safety": 3.0, "preferred": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a loop that was started with weights of its own."""
    write_state(tmp_path, LoopState(order=ORDER.shown()))
    return tmp_path


def test_a_change_counts_above_the_start_and_stands(folder: Path) -> None:
    assert standing_weights(ORDER.shown(), read_head_weights(folder)) == EVERY
    assert weigh(folder, {"safety": 0.5}, "it is safe by now", "ann") == {**EVERY, "safety": 0.5}
    assert weigh(folder, {"thumb": 0}, "stars alone", "bob") == {**EVERY, "safety": 0.5, "thumb": 0.0}
    found = read_head_weights(folder)
    assert found.standing == {"safety": 0.5, "thumb": 0.0}
    assert [(one.weights, one.reason, one.by) for one in found.changes] == [
        ({"safety": 0.5}, "it is safe by now", "ann"),
        ({"thumb": 0}, "stars alone", "bob"),
    ]
    words = ORDER.reward_words(["thumb=thumbs", "safety=stars"], found.standing)
    said = dict(one.removeprefix("--weight=").split("=") for one in words if one.startswith("--weight="))
    assert (float(said["thumb"]), float(said["safety"])) == (0.0, 0.5)


def test_a_reward_model_has_the_weights_of_the_heads_that_it_has(folder: Path) -> None:
    weigh(folder, {"safety": 2.0}, "why not", "ann")
    words = ORDER.reward_words(["thumb=thumbs"], read_head_weights(folder).standing)
    assert [one for one in words if one.startswith("--weight=") and "thumb-" not in one] == [
        "--weight=thumb=2"
    ]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"security": 1.0},
            "weight security=1: there is no such head; use thumb, relevance, helpfulness, safety",
        ),
        ({"thumb": -1.0}, "weight thumb=-1: must be 0 or more, and finite"),
        ({"thumb": float("nan")}, "weight thumb=nan: must be 0 or more, and finite"),
        ({"thumb": float("inf")}, "weight thumb=inf: must be 0 or more, and finite"),
        ({"thumb": 1e308, "safety": 1e308}, "the weights have no finite sum: make them smaller"),
        (dict.fromkeys(EVERY, 0.0), "all weights are 0: give at least one head a weight above 0"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    folder: Path, weights: Mapping[str, float], message: str
) -> None:
    weigh(folder, {"safety": 0.5}, "before", "ann")
    before = read_head_weights(folder)
    with pytest.raises(ConfigurationError, match=message):
        weigh(folder, weights, "why not", "ann")
    assert read_head_weights(folder) == before


def test_a_head_that_the_loop_has_no_more_is_left_out(folder: Path) -> None:
    weigh(folder, {"safety": 0.5}, "it is safe by now", "ann")
    other = LoopOrder(heads=("charm=0:10",)).shown()
    assert standing_weights(other, read_head_weights(folder)) == {"charm": 1.0, "preferred": 0.0}
    weigh(folder, {"thumb": 0.0}, "stars alone", "ann")
    thumbs = LoopOrder(heads=("thumb=thumbs",)).shown()  # which is told, and the training refuses it
    assert standing_weights(thumbs, read_head_weights(folder)) == {"thumb": 0.0, "preferred": 0.0}


def test_changes_at_the_same_time_are_all_there(folder: Path) -> None:
    weigh(folder, {"relevance": 7.0}, "first", "ann")
    each = MOST_CHANGES // 4

    def change(name: str) -> None:
        for number in range(each):
            weigh(folder, {name: float(number)}, "again", name)

    threads = [threading.Thread(target=change, args=(name,)) for name in EVERY if name != "relevance"]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = read_head_weights(folder)
    assert found.standing == {name: 7.0 if name == "relevance" else each - 1.0 for name in EVERY}
    assert len(found.changes) == MOST_CHANGES
    assert {one.reason for one in found.changes} == {"again"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"standing": {"thumb": "x"}, "changes": []}', "\x00"])
def test_a_damaged_file_is_refused_with_a_remedy(folder: Path, text: str) -> None:
    (folder / "weights.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"weights\.json: cannot be read .* move it away"):
        read_head_weights(folder)


def test_the_command_changes_weights_and_says_what_they_are(tmp_path: Path) -> None:
    with loop_stand(tmp_path) as stand:
        words = ["weigh", str(stand.run.folder), "--weight", "safety=2", "--weight", "thumb=0.5"]
        done = CliRunner().invoke(loop_commands, [*words, "--reason", "children read it"])
        assert (done.exit_code, done.stderr) == (0, "")
        every = "thumb 0.5, relevance 1, helpfulness 1, safety 2, preferred 0"
        assert done.stdout == f"weights from the next reward model on: {every}\n"
        (change,) = read_head_weights(folder_of(stand.run.folder)).changes
        assert (change.reason, change.weights) == ("children read it", {"safety": 2.0, "thumb": 0.5})
        bad = CliRunner().invoke(loop_commands, [*words[:2], "--weight", "charm=1", "--reason", "x"])
        assert bad.exit_code == 2
        assert "weight charm=1: there is no such head; use thumb" in bad.stderr
        for command in (words, ["pause", str(stand.run.folder)]):
            for reason in (" ", "x" * 2000):
                bad = CliRunner().invoke(loop_commands, [*command, "--reason", reason])
                assert (bad.exit_code, bad.stdout) == (2, ""), reason
                assert "say in 1 to 1024 characters what the audit shall show" in bad.stderr
        assert len(read_head_weights(folder_of(stand.run.folder)).changes) == 1
        assert read_pause(folder_of(stand.run.folder)) is None
