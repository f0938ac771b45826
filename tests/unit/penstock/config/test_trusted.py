"""What a specification names is used only where this process allows it."""

import pytest

from penstock.config.settings import ConfigurationError
from penstock.config.trusted import placed, without_places

KEYS = ("model", "prompts")


def test_places_are_this_process_own() -> None:
    told = {"model": "/theirs", "prompts": "", "group": 4}
    found = placed("environment.kwargs", told, KEYS, {"model": "/mine", "prompts": "/unused"})
    assert found == {"model": "/mine", "prompts": "", "group": 4}


def test_a_place_that_is_missing_is_named_with_the_remedy() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"policy\.kwargs\.model: places are not taken .*actor\.places\.model",
    ):
        placed("policy.kwargs", {"model": "/theirs"}, KEYS, {})


def test_a_workload_without_places_is_told_all() -> None:
    assert placed("environment.kwargs", {"model": "x"}, (), {}) == {"model": "x"}


def test_a_specification_says_which_places_there_are_and_none_of_them() -> None:
    own = {"model": "/mine", "prompts": "", "group": 4, "feedback": "postgresql://ann@db/x"}
    told = without_places(own, KEYS, ("feedback",))
    assert told == {"model": True, "prompts": "", "group": 4}
    assert placed("environment.kwargs", told, KEYS, {"model": "/here"}) == {
        "model": "/here",
        "prompts": "",
        "group": 4,
    }
