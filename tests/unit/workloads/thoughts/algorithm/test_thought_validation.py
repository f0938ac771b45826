"""When theatre ends a run: after its grace, or once a gain was there and is lost."""

from dataclasses import replace
from typing import Any, Final

import pytest

from penstock.workloads.thoughts.environment import ThoughtReinforceSection
from penstock.workloads.thoughts.reinforce import ThoughtValidation
from penstock.workloads.thoughts.start import load_transformer
from penstock.workloads.thoughts.validation import probe
from tests.support.thoughts.small_thoughts import LAYOUT, TASK, TOKENS, small_base

NOTHING_FOUND: Final[dict[str, Any]] = {
    "start_loss": None, "best_gain": None, "last": None, "in_a_row": 0, "figures": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> ThoughtValidation:
    """Of an untrained model, with a grace of 100 updates."""
    network = load_transformer(small_base(tmp_path_factory.mktemp("model") / "base"))
    section = ThoughtReinforceSection(validate_every=10, validation_questions=32, theatre_grace=100)
    return ThoughtValidation(network, TASK, LAYOUT, section, thought_tokens=TOKENS)


@pytest.mark.parametrize(
    ("in_a_row", "update", "gain", "best_gain", "is_over"),
    [
        (2, 50, 0.0, 0.05, False),
        (2, 50, 0.8, 0.8, False),
        (2, 50, 0.05, 0.8, True),
        (2, 100, 0.0, 0.05, True),
        (3, 100, 0.8, 0.8, True),
        (1, 100, 0.8, 0.8, False),
        (1, 50, 0.05, 0.8, False),
        (0, 200, 1.5, 1.5, False),
    ],
)
def test_theatre_ends_a_run_after_its_grace_or_when_a_gain_is_lost(
    validation: ThoughtValidation, in_a_row: int, update: int, gain: float, best_gain: float, *, is_over: bool
) -> None:
    last = {"update": update, "gain": gain, "words": []}
    state = {"start_loss": 2.0, "best_gain": best_gain, "last": last, "in_a_row": in_a_row, "figures": {}}
    validation.load(state)
    assert validation.is_over is is_over
    assert validation.state()["last"] == last


def test_a_validation_is_made_before_the_first_update_and_every_so_many(
    validation: ThoughtValidation,
) -> None:
    validation.load(NOTHING_FOUND)
    assert validation.findings() == {}
    validation.begin(0)
    began = validation.findings()["theatre"]
    losses = validation.state()["start_loss"]
    assert (began["update"], len(losses)) == (0, 32)
    assert sum(losses) / 32 == pytest.approx(began["direct_loss"])
    validation.after(9)
    assert validation.findings()["theatre"]["update"] == 0
    validation.after(10)
    assert validation.findings()["theatre"]["update"] == 10
    assert validation.figures()["validation_gain"] == validation.findings()["theatre"]["gain"]


def test_theatre_is_counted_while_it_is_found_one_look_behind_the_other(
    validation: ThoughtValidation, monkeypatch: pytest.MonkeyPatch
) -> None:
    validation.load(NOTHING_FOUND)
    validation.begin(0)
    found = validation._judged(probe(validation._model, TASK, validation._examples, TOKENS))
    dips = {10: "doubtful", 100: "theatre", 110: "honest", 120: "theatre", 130: "theatre"}
    over = {}
    for update, verdict in dips.items():
        monkeypatch.setattr(validation, "_judged", lambda _, verdict=verdict: replace(found, verdict=verdict))
        validation.after(update)
        over[update] = validation.is_over
    assert over == {10: False, 100: False, 110: False, 120: False, 130: True}
    assert validation.state()["in_a_row"] == 2
