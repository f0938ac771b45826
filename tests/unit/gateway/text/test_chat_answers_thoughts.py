"""A model that thinks before it answers, by OpenAI's client: what usage and the extension field tell."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.language.text_address import agents_api, served_text
from tests.support.language.thinking_stand import BEHIND, THOUGHT, WITHOUT, form_of, make_thinker

ASKED: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "sum"}],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a server over a model that has learned to think."""
    folder = tmp_path_factory.mktemp("thinking")
    model = make_thinker(folder / "model")
    with (
        served_text(model, folder / "text.sock", form=form_of()),
        agents_api(folder / "text.sock") as address,
    ):
        yield openai.OpenAI(base_url=address, api_key="none", max_retries=0)


def asked(client: Any, **extension: Any) -> Any:
    """One answer."""
    extra = {"extra_body": {"penstock": extension}} if extension else {}
    return client.chat.completions.create(**ASKED, **extra)


def test_a_thought_is_counted_and_hidden(client: Any) -> None:
    made = asked(client)
    assert made.choices[0].message.content == BEHIND
    (thought,) = made.penstock["thoughts"]
    assert thought.keys() == {"tokens", "milliseconds", "is_cut"}
    assert (thought["tokens"], thought["is_cut"]) == (3, False)
    assert made.usage.completion_tokens_details.reasoning_tokens == 3
    assert made.usage.completion_tokens == 3 + len(made.penstock["token_ids"][0])
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert "lookup" not in made.model_dump_json()


def test_a_thought_is_told_to_who_asks(client: Any) -> None:
    (thought,) = asked(client, show_thought=True).penstock["thoughts"]
    assert thought["text"] == THOUGHT
    assert len(thought["token_ids"]) == 3


def test_without_a_budget_there_is_none(client: Any) -> None:
    made = asked(client, thought_tokens=0, show_thought=True)
    assert made.choices[0].message.content == WITHOUT
    assert made.penstock["thoughts"] == [None]
    assert made.usage.completion_tokens_details is None


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (6, r"penstock\.thought_tokens=6: ask for 0 to 5"),
        (-1, "thought_tokens.*greater than or equal to 0"),
        (True, "thought_tokens.*valid integer"),
        ("3", "thought_tokens.*valid integer"),
        (3.0, "thought_tokens.*valid integer"),
        ("thought", "thought_tokens.*valid integer"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(client: Any, budget: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        asked(client, thought_tokens=budget)
    assert refused.value.param == "penstock.thought_tokens"
    assert asked(client).choices


@pytest.mark.parametrize("shows", [False, True])
def test_a_stream_holds_the_answer_alone(client: Any, shows: bool) -> None:
    parts = list(
        client.chat.completions.create(
            **ASKED,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"penstock": {"show_thought": shows}},
        )
    )
    text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    assert text == BEHIND
    holding = [number for number, part in enumerate(parts) if "lookup" in part.model_dump_json()]
    assert holding == ([len(parts) - 2] if shows else [])
    assert parts[-1].usage.completion_tokens_details.reasoning_tokens == 3
