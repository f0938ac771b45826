"""Where the loop stands: written whole, read back, and what becomes of a file that is damaged."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.loop_state import (
    MOST_PAST,
    LoopState,
    Outcome,
    Pause,
    Step,
    pause,
    read_pause,
    read_state,
    resume,
    write_state,
)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
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


def test_a_loop_is_paused_until_it_is_let_go_on(tmp_path: Path) -> None:
    assert read_pause(tmp_path) is None
    pause(tmp_path, "holidays", "ann")
    assert read_pause(tmp_path) == Pause("holidays", "ann")
    (tmp_path / "paused.json").write_text("{")
    assert read_pause(tmp_path) is not None
    resume(tmp_path)
    resume(tmp_path)
    assert read_pause(tmp_path) is None
