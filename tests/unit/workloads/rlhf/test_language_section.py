"""`environment.kwargs` of language models: a mistake is named with its key."""

import pytest

from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.workloads.rlhf.environment import language


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"temperature": 0.7}, r"environment\.kwargs\.temperature=0\.7: sampling cannot be changed"),
        ({"top_p": 0.9}, r"environment\.kwargs\.top_p=0\.9: sampling cannot be changed"),
        ({"top_k": 50}, r"environment\.kwargs\.top_k=50: sampling cannot be changed"),
        (
            {"prompt": "x"},
            r"environment\.kwargs\.prompt: unknown key; use one of base_training, conversations, device",
        ),
        ({"group": 0}, r"environment\.kwargs\.group=0: Input should be greater than 0"),
    ],
)
def test_a_mistake_is_named(kwargs: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        language(EnvironmentSection(kwargs=kwargs))


def test_sampling_may_be_said_as_it_is() -> None:
    made = language(EnvironmentSection(kwargs={"temperature": 1, "top_p": 1.0, "top_k": 0, "model": "m"}))
    assert made.model == "m"
