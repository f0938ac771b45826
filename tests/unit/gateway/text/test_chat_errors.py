"""Too many requests, and defects of the gateway: in the form of the API, as its client takes them."""

from pathlib import Path
from typing import Any, Final

import openai
import pytest

from penstock.gateway.frame.requests import CallLimits
from penstock.gateway.frame.route_access import make_app
from penstock.gateway.http_server import HttpServer
from penstock.gateway.text_listener import text_listener
from penstock.gateway.upstream import RunAddresses, Upstream
from penstock.protocol.limits import MIB
from penstock.rpc.auth import Credentials
from penstock.rpc.gate import Rates
from tests.support.language.text_address import agents_api, relay_to, served_text, upstream_at
from tests.support.language.text_stand import make_model

ASKED: Final[list[Any]] = [{"role": "user", "content": "sum"}]
ONE_CALL_HELD: Final = 6_000
"""Bytes that conversations may hold: an answer of six tokens has room, several have not."""
SELDOM: Final = Rates(calls=1e-3, bytes=MIB, settings="per address")
"""One call is taken at once, and the next one some minutes later."""


def agent(base_url: str) -> openai.OpenAI:
    """The client, which tries nothing again."""
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def hold_conversations(completions: Any, count: int) -> None:
    """Answers that are kept, each in a conversation of its own."""
    for each in range(count):
        kept = {"X-Conversation-Id": f"kept-{each}"}
        completions.create(model="default", messages=ASKED, extra_headers=kept)


@pytest.mark.promise("openai-s-api-answers")
def test_a_server_without_room_is_too_many_requests(tmp_path: Path) -> None:
    socket = tmp_path / "text.sock"
    with (
        served_text(make_model(tmp_path / "model"), socket, max_buffered_bytes=ONE_CALL_HELD),
        agents_api(socket, deadline_s=8.0) as base_url,
    ):
        completions = agent(base_url).chat.completions
        with pytest.raises(openai.BadRequestError, match=r"n=16: .*serving\.max_buffered_bytes"):
            completions.create(model="default", messages=ASKED, n=16)
        assert completions.create(model="default", messages=ASKED).choices
        with pytest.raises(openai.RateLimitError, match=r"serving\.max_buffered_bytes") as raised:
            hold_conversations(completions, 20)
    assert (raised.value.status_code, raised.value.code) == (429, "overloaded")
    assert (raised.value.type, raised.value.response.headers["retry-after"]) == ("rate_limit_error", "1")


def test_an_address_that_asks_too_often_is_too_many_requests(tmp_path: Path) -> None:
    app = make_app(text_listener(relay_to(upstream_at(f"unix:{tmp_path / 'none.sock'}")), CallLimits(SELDOM)))
    server = HttpServer(app, "127.0.0.1:0")
    server.start()
    try:
        client = agent(f"{server.url}/v1")
        with pytest.raises(openai.NotFoundError):
            client.get("/nothing", cast_to=object)
        with pytest.raises(
            openai.RateLimitError, match=r"calls or .* bytes a second \(per address\)"
        ) as raised:
            client.models.list()
    finally:
        server.stop()
    assert (raised.value.status_code, raised.value.type) == (429, "rate_limit_error")
    assert raised.value.response.headers["retry-after"] == "1"


@pytest.mark.promise("openai-s-api-answers")
def test_a_defect_is_an_error_of_the_server(tmp_path: Path) -> None:
    def defect() -> RunAddresses:
        raise RuntimeError(f"a defect beside {tmp_path}")

    server = HttpServer(
        make_app(text_listener(relay_to(Upstream(addresses=defect, credentials=Credentials())))),
        "127.0.0.1:0",
    )
    server.start()
    try:
        with pytest.raises(openai.InternalServerError, match="a defect of the gateway; its log") as raised:
            agent(f"{server.url}/v1").models.list()
    finally:
        server.stop()
    assert (raised.value.status_code, raised.value.type) == (500, "server_error")
    assert (raised.value.code, raised.value.param) == ("internal", None)
    assert str(tmp_path) not in str(raised.value)
