"""Settings that fit neither one another nor the run are refused at the start, with figures and remedy."""

from dataclasses import replace

import pytest

from penstock.actor.serving.release import CanaryMonitor
from penstock.actor.serving.server_process import check_window
from penstock.config.settings import CanarySection, ConfigurationError, ServingSection
from tests.support.run.small_run import specification

RUN = replace(specification(), stale_after=8, update_steps=2000)


def test_a_reward_window_that_makes_all_experience_stale_is_refused() -> None:
    section = ServingSection(reward_window_s=20.0, declared_steps_per_s=1000.0)
    with pytest.raises(ConfigurationError, match=r"10\.0 updates, and what is older than 8 is stale"):
        check_window(section, RUN)


@pytest.mark.parametrize(
    "changed", [{"reward_window_s": 10.0}, {"declared_steps_per_s": None}, {"declared_steps_per_s": 500.0}]
)
def test_a_window_that_fits_is_taken(changed: dict[str, float | None]) -> None:
    given = {"reward_window_s": 20.0, "declared_steps_per_s": 1000.0} | changed
    check_window(ServingSection.model_validate(given), RUN)


def test_a_range_of_returns_must_rise() -> None:
    with pytest.raises(ConfigurationError, match=r"canary\.return_range"):
        CanaryMonitor(CanarySection(return_range=(1.0, 0.0)), lambda _version, _why: None, lambda: 0.0)
