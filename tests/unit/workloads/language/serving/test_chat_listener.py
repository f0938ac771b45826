"""A server of text that answers OpenAI's API over HTTP itself, by the unmodified client."""

import asyncio
import sys
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.language.serving.chat_api import ChatListener
from tests.support.language.text_stand import TextStand, make_model, running

ASKED: Final[list[Any]] = [{"role": "user", "content": "sum"}]


async def test_it_answers_streams_refuses_and_ends(tmp_path: Path) -> None:
    async with running(TextStand(make_model(tmp_path / "model"))) as stand:
        listener = ChatListener("127.0.0.1:0", stand.service.chat_api)
        serving = asyncio.create_task(listener.serve())
        async with openai.AsyncOpenAI(base_url=f"{listener.url}/v1", api_key="none", max_retries=0) as client:
            completions: Any = client.chat.completions
            made = await completions.create(
                model="default", messages=ASKED, extra_headers={"X-Conversation-Id": "a"}
            )
            assert (made.model, made.penstock["learned"], made.penstock["turn"]) == ("default", True, 0)
            parts = [
                one async for one in await completions.create(model="default:1", messages=ASKED, stream=True)
            ]
            text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
            assert text == made.choices[0].message.content
            assert [one.id async for one in client.models.list()] == [
                "default",
                "default:latest",
                "default:1",
            ]
            with pytest.raises(openai.NotFoundError, match="there is none of that name; use default"):
                await completions.create(model="other", messages=ASKED)
            body = {"conversation_id": "a", "reward": 1.0, "final": True}
            result: Any = await client.post("/rewards", body=body, cast_to=object)
            assert (result["total_return"], result["turns"]) == (1.0, 1)
        async with httpx.AsyncClient() as plain:
            elsewhere = await plain.get(f"{listener.url}/v1/models", headers={"Host": "elsewhere.example"})
            assert (elsewhere.status_code, elsewhere.json()["error"]["code"]) == (421, "wrong_host")
        await listener.finish()
        await serving
        assert len(stand.fragments()) == 1


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.0.0.1:80", "nowhere", "unix:/tmp/socket"])
async def test_an_address_beyond_this_machine_is_refused(listen: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^serving\.http_listen={listen}: "):
        ChatListener(listen, None)  # type: ignore[arg-type]


async def test_without_what_http_needs_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "penstock.gateway.http_server", raising=False)
    with pytest.raises(ConfigurationError, match=r"there is no uvicorn here: install penstock-rl\[gateway\]"):
        ChatListener("127.0.0.1:0", None)  # type: ignore[arg-type]
