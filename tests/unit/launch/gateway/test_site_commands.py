"""`penstock gateway NAME`: further agents that cannot be meant, each refused by its name."""

from pathlib import Path

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from launch.gateway.run_behind import NamedRun, NamedServer
from launch.gateway.site_commands import agents_of
from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import Settings
from workloads.chat.http.chat_site import site as chat_site
from workloads.prompts.http.prompts_site import site as prompts_site


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (["coder"], "--agent 'coder': write NAME=DIR or NAME=ADDRESS"),
        (["../x=127.0.0.1:1"], "a name has 1 to 64 of"),
        (["a=127.0.0.1:1", "a=127.0.0.1:2"], "a is named twice"),
        (["a=nowhere"], "--agent: "),
    ],
)
def test_what_is_no_agent_is_named(said: list[str], why: str) -> None:
    """With the form that is meant."""
    with pytest.raises(ConfigurationError, match=why):
        agents_of("chat", chat_site(), said, Settings())


def test_agents_are_folders_and_addresses_of_a_site_that_takes_several(tmp_path: Path) -> None:
    """One run is all that other sites answer for."""
    said = [f"run={tmp_path}", "server=127.0.0.1:50055"]
    found = agents_of("chat", chat_site(), said, Settings())
    assert {name: type(one) for name, one in found.items()} == {"run": NamedRun, "server": NamedServer}
    with pytest.raises(ConfigurationError, match="prompts answers for one run"):
        agents_of("prompts", prompts_site(), said, Settings())
