"""Settings that fit neither one another nor the run are refused at the start, with figures and remedy."""

from dataclasses import replace
from pathlib import Path

import pytest

from actor.serving.assembly import Source, check_range, check_window, open_shadow_record
from penstock.config.settings import CanarySection, ConfigurationError, ServingSection
from tests.support.run.small_run import specification

RUN = replace(specification(), stale_after=8, update_steps=2000)


def test_a_reward_window_that_makes_all_experience_stale_is_refused() -> None:
    """At the declared rate the learner would be further ahead than it looks back."""
    section = ServingSection(reward_window_s=20.0, declared_steps_per_s=1000.0)
    with pytest.raises(ConfigurationError, match=r"10\.0 updates, and what is older than 8 is stale"):
        check_window(section, RUN)


@pytest.mark.parametrize(
    "changed", [{"reward_window_s": 10.0}, {"declared_steps_per_s": None}, {"declared_steps_per_s": 500.0}]
)
def test_a_window_that_fits_is_taken(changed: dict[str, float | None]) -> None:
    """Nor is anything refused where no rate is declared."""
    given = {"reward_window_s": 20.0, "declared_steps_per_s": 1000.0} | changed
    check_window(ServingSection.model_validate(given), RUN)


def test_shadows_are_recorded_where_there_is_a_place_for_it(tmp_path: Path) -> None:
    """In the run's folder if nothing else is said; a place that is named must be there."""
    assert open_shadow_record(ServingSection(), Source(run_dir=None, broker="localhost:1")) is None
    record = open_shadow_record(ServingSection(), Source(run_dir=tmp_path, broker=None))
    assert record is not None
    record.close()
    nowhere = ServingSection(shadow_record=tmp_path / "nowhere" / "shadow.jsonl")
    with pytest.raises(ConfigurationError, match=r"serving\.shadow_record=.*nowhere/shadow\.jsonl"):
        open_shadow_record(nowhere, Source(run_dir=tmp_path, broker=None))


def test_a_range_of_returns_must_rise() -> None:
    """Rather than ending the server with the first canary."""
    with pytest.raises(ConfigurationError, match=r"canary\.return_range"):
        check_range(CanarySection(return_range=(1.0, 0.0)))
