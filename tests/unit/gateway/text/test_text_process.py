"""The agents' API as its process serves it, before a server of text that is not there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import openai
import pytest

from penstock.gateway.frame.route_access import make_app
from penstock.gateway.http_server import HttpServer
from penstock.gateway.text_listener import text_listener
from tests.support.language.text_address import relay_to, upstream_at

PATIENCE_S: Final = 30.0
"""Of the agent: half of the deadline that a call to a server of text has."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[openai.OpenAI]:
    """A client of the API whose server of text is named by a socket that is not there."""
    server = HttpServer(
        make_app(text_listener(relay_to(upstream_at(f"unix:{tmp_path / 'text.sock'}")))), "127.0.0.1:0"
    )
    server.start()
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    server.stop()


def test_a_server_of_text_that_is_not_there_is_named_in_time(agent: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match=r"text\.sock.*another --server") as raised:
        agent.chat.completions.create(model="default", messages=[{"role": "user", "content": "sum"}])
    assert raised.value.status_code == 503
    with pytest.raises(openai.InternalServerError, match=r"text\.sock"):
        agent.models.list()


def test_what_is_refused_before_the_api_hears_of_it_has_its_form(agent: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="has more than 1048576 bytes") as raised:
        agent.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "sum " * 300_000}]
        )
    assert (raised.value.status_code, raised.value.param, raised.value.code) == (413, "messages", "too_large")
    with pytest.raises(openai.APIStatusError, match="does not answer under this host") as other:
        agent.with_options(default_headers={"Host": "elsewhere.example"}).models.list()
    assert (other.value.status_code, other.value.type) == (421, "invalid_request_error")
