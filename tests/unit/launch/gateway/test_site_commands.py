"""`penstock gateway NAME`: further agents that cannot be meant, each refused by its name."""

from pathlib import Path

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import Settings
from penstock.launch.gateway.gateway_commands import agents_of, loop_words
from penstock.launch.gateway.run_behind import NamedRun, NamedServer
from penstock.workloads.chat.http.chat_routes import site as chat_site
from penstock.workloads.prompts.http.prompt_routes import site as prompts_site


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("labels=0", "--loop: --labels 0: must be at least 1"),
        ("labels=many", "--loop: .*--labels.*integer"),
        ("label=9", "--loop: No such option: --label"),
        ("once=1", "--loop: Option '--once' does not take a value"),
        ("share=0.9", "--loop: --share 0.9: must be above 0 and at most 0.8"),
        ("weight=charm=1", "--loop: --weight charm: there is no such head; use thumb"),
        ("reward=epochs=-1", "--loop: --reward epochs=-1: .* greater than 0"),
        ("train=learner.total_step=9", "--loop: --train learner.total_step: unknown key"),
    ],
)
def test_a_loop_that_could_not_begin_is_refused_before_its_gateway_does(said: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        loop_words("chat", chat_site(), ["patience=9", said], learn=True, server="")
    words = loop_words("chat", chat_site(), ["labels=9", "weight=thumb=2"], learn=True, server="")
    assert words == ("--labels=9", "--weight=thumb=2")


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
    with pytest.raises(ConfigurationError, match=why):
        agents_of("chat", chat_site(), said, Settings())


def test_agents_are_folders_and_addresses_of_a_site_that_takes_several(tmp_path: Path) -> None:
    said = [f"run={tmp_path}", "server=127.0.0.1:50055"]
    found = agents_of("chat", chat_site(), said, Settings())
    assert {name: type(one) for name, one in found.items()} == {"run": NamedRun, "server": NamedServer}
    with pytest.raises(ConfigurationError, match="prompts answers for one run"):
        agents_of("prompts", prompts_site(), said, Settings())
