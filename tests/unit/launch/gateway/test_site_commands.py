"""`penstock gateway NAME`: further agents that cannot be meant, each refused by its name."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

pytest.importorskip("argon2", reason="the gateway needs its extra")

from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import Settings
from penstock.gateway.process import Mount, main
from penstock.gateway.text_listener import text_listener
from penstock.launch.commands.certificates import authority_of, issue
from penstock.launch.commands.request import Order
from penstock.launch.gateway.gateway_commands import (
    SiteOptions,
    chosen_site,
    further_mounts,
    loop_words,
    named_agents,
)
from penstock.launch.gateway.run_behind import NamedRun, NamedServer
from penstock.runtime.lifecycle import Lifecycle
from penstock.workloads.chat.http.chat_routes import site as chat_site
from tests.support.run.broker_process import eventually


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
        named_agents(said, Settings())


def test_agents_are_folders_and_addresses_of_a_site_that_takes_several(tmp_path: Path) -> None:
    said = [f"run={tmp_path}", "server=127.0.0.1:50055"]
    found = named_agents(said, Settings())
    assert {name: type(one) for name, one in found.items()} == {"run": NamedRun, "server": NamedServer}
    with pytest.raises(ConfigurationError, match="prompts answers for one run"):
        chosen_site("prompts", SiteOptions(agents=said), Settings())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (["chat", "prompts"], "--site prompts: chat listens at 127.0.0.1:8765, too: say --site prompts=HOST"),
        (["chats"], "--site chats: no such site; there are .*prompts, text"),
        (
            ["chat=0.0.0.0:1"],
            "--site chat=0.0.0.0:1: .* alone: serve it by `penstock gateway chat`",
        ),
    ],
)
def test_sites_that_cannot_be_served_beside_a_gateway_are_refused(said: list[str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        main(Lifecycle("gateway"), Settings(), further_mounts(said, Settings()))


@contextmanager
def answering() -> Iterator[Any]:
    """A listener that has something to serve."""
    yield text_listener(None), {}  # type: ignore[arg-type]


def broken() -> Any:
    """A listener that cannot be made."""
    raise ConfigurationError("its recipe is gone")


@asynccontextmanager
async def begun_in_vain(_app: Any) -> AsyncIterator[None]:
    """What a listener works with, which cannot be made."""
    await asyncio.to_thread(Path(__file__, "state").mkdir)
    yield


@contextmanager
def lifeless() -> Iterator[Any]:
    """A listener that can be made, and whose application does not begin."""
    yield replace(text_listener(None), life=begun_in_vain), {}  # type: ignore[arg-type]


@contextmanager
def served(settings: Settings, *mounts: Mount) -> Iterator[list[int]]:
    """The mounts while the block runs, once each listens; behind it the list holds the exit code."""
    lifecycle, codes = Lifecycle("gateway"), list[int]()
    thread = threading.Thread(target=lambda: codes.append(main(lifecycle, settings, mounts)))
    thread.start()
    try:
        for one in mounts:
            eventually(partial(is_up, one.listen), one.name, 60)
        yield codes
    finally:
        lifecycle.drain("the test is over")
        thread.join()


def free_address() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(("opened", "why"), [(broken, "its recipe is gone"), (lifeless, "Not a directory")])
def test_a_site_that_cannot_be_made_says_why_and_the_others_stay_up(opened: Any, why: str) -> None:
    whole, chat = (
        Mount(name=name, listen=free_address(), open=made, is_one_of_several=True)
        for name, made in (("whole", answering), ("chat", opened))
    )
    with served(Settings(), whole, chat) as codes:
        refused = requests.get(f"http://{chat.listen}/chat", timeout=60)
        assert refused.status_code == 503
        assert "chat is not served: " in refused.text
        assert why in refused.text
        assert requests.get(f"http://{whole.listen}/nothing", timeout=60).status_code == 404
    assert codes == [0]


def test_agents_are_answered_in_plaintext_where_the_gateway_has_a_certificate(tmp_path: Path) -> None:
    order = Order(run="run", folder=tmp_path, hosts=(), actors=(), passwords=(), days=1.0)
    issue(authority_of(tmp_path), order, "gateway", None)
    files = {"tls_certificate": tmp_path / "gateway.pem", "tls_key": tmp_path / "gateway.key"}
    settings = Settings.model_validate({"security": files})
    (text,) = further_mounts([f"text={free_address()}"], settings)
    with served(settings, text):
        reply = requests.get(f"http://{text.listen}/v1/models", timeout=60)
    assert reply.status_code == 503
    assert "text is not served" in reply.text


def is_up(place: str) -> bool:
    """Whether something listens there."""
    host, _, port = place.rpartition(":")
    with socket.socket() as asking:
        return asking.connect_ex((host, int(port))) == 0
