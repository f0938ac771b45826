"""What a specification names is used only where this process allows it."""

import pytest

from penstock.config.settings import ConfigurationError
from penstock.config.trusted import placed

KEYS = ("model", "prompts")


def test_places_are_this_process_own() -> None:
    """Whatever the run says; other arguments are the run's."""
    told = {"model": "/theirs", "prompts": "", "group": 4}
    found = placed("environment.kwargs", told, KEYS, {"model": "/mine", "prompts": "/unused"})
    assert found == {"model": "/mine", "prompts": "", "group": 4}


def test_a_place_that_is_missing_is_named_with_the_remedy() -> None:
    """Nothing of the specification is read in its stead."""
    with pytest.raises(
        ConfigurationError,
        match=r"policy\.kwargs\.model='/theirs': places are not taken .*actor\.places\.model",
    ):
        placed("policy.kwargs", {"model": "/theirs"}, KEYS, {})


def test_a_workload_without_places_is_told_all() -> None:
    """As control is."""
    assert placed("environment.kwargs", {"model": "x"}, (), {}) == {"model": "x"}
