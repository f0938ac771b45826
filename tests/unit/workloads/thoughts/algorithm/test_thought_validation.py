"""When theatre ends a run: after its grace, or once a gain was there and is lost."""

import pytest

from tests.support.thoughts.small_thoughts import LAYOUT, TASK, TOKENS, small_base
from workloads.thoughts.algorithm.thought_validation import ThoughtValidation
from workloads.thoughts.start.transformer import load_transformer
from workloads.thoughts.thought_settings import ThoughtReinforceSection


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> ThoughtValidation:
    """Of an untrained model, with a grace of 100 updates."""
    network = load_transformer(small_base(tmp_path_factory.mktemp("model") / "base"))
    section = ThoughtReinforceSection(validate_every=10, validation_questions=32, theatre_grace=100)
    return ThoughtValidation(network, TASK, LAYOUT, section, thought_tokens=TOKENS)


@pytest.mark.parametrize(
    ("verdict", "update", "gain", "best_gain", "is_over"),
    [
        ("theatre", 50, 0.0, 0.05, False),
        ("theatre", 50, 0.8, 0.8, False),
        ("theatre", 50, 0.05, 0.8, True),
        ("theatre", 100, 0.0, 0.05, True),
        ("theatre", 100, 0.8, 0.8, True),
        ("honest", 200, 1.5, 1.5, False),
        ("doubtful", 200, 0.5, 1.5, False),
        ("cannot tell", 200, 0.5, 1.5, False),
    ],
)
def test_theatre_ends_a_run_after_its_grace_or_when_a_gain_is_lost(
    validation: ThoughtValidation, verdict: str, update: int, gain: float, best_gain: float, *, is_over: bool
) -> None:
    """Thoughts that gain and are not yet followed have the whole grace."""
    last = {"verdict": verdict, "update": update, "gain": gain, "words": []}
    validation.load({"start_loss": 2.0, "best_gain": best_gain, "last": last, "figures": {}})
    assert validation.is_over is is_over
    assert validation.state()["last"] == last


def test_a_validation_is_made_before_the_first_update_and_every_so_many(
    validation: ThoughtValidation,
) -> None:
    """The first one says what the answer costs without a thought."""
    validation.load({"start_loss": None, "best_gain": None, "last": None, "figures": {}})
    assert validation.findings() == {}
    validation.begin(0)
    began = validation.findings()["theatre"]
    assert (began["update"], validation.state()["start_loss"]) == (0, began["direct_loss"])
    validation.after(9)
    assert validation.findings()["theatre"]["update"] == 0
    validation.after(10)
    assert validation.findings()["theatre"]["update"] == 10
    assert validation.figures()["validation_gain"] == validation.findings()["theatre"]["gain"]
