"""Where models lie, and several threads that read them at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.config.settings import ConfigurationError
from workloads.language.loading import place_of
from workloads.language.policy.adapter_network import make_network
from workloads.language.policy.policy_section import LanguageSection


def test_models_that_are_read_at_once_leave_torch_as_it_was(base: Path) -> None:
    """A learner and an actor in one process.

    The second left torch on `meta`, and no model read later had weights.
    """
    section = LanguageSection(model=str(base))
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: make_network(section, 0), range(24)))
    for network in (*made, make_network(section, 0)):
        assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}


def test_a_folder_is_told_from_a_name_of_the_hub(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By being there; processes of a run have other working directories."""
    monkeypatch.chdir(base.parent)
    assert place_of("model", base.name) == str(base)
    assert place_of("model", "openai-community/gpt2") == "openai-community/gpt2"
    assert place_of("model", "gpt2") == "gpt2"


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing", "models/of/mine"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    """The hub would say that its name is malformed."""
    with pytest.raises(ConfigurationError, match=rf"policy\.kwargs\.model='{name}': there is no such folder"):
        place_of("policy.kwargs.model", name)
