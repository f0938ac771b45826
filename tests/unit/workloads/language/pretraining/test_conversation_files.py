"""Conversations in three forms, and what is said of others."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.language.pretraining.conversation_files import read_conversations

OPENAI = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
SHARED = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
SINGLE = {"prompt": "hi", "response": "hello"}


def write(folder: Path, *rows: Any, name: str = "said.jsonl") -> Path:
    """A file of lines."""
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_three_forms_say_the_same(tmp_path: Path) -> None:
    longer = {"messages": [*OPENAI["messages"], {"role": "user", "content": "and?"}]}
    file = write(tmp_path, OPENAI, SHARED, SINGLE, longer)
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([SHARED, OPENAI], indent=1))
    found, bad = read_conversations([file, listed])
    said = {tuple((one.role, one.content) for one in each.messages) for each in found}
    assert said == {(("user", "hi"), ("assistant", "hello"))}
    assert (len(found), bad.count) == (6, 0)
    assert found[-1].where == "list.json item 2"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (3, "is no object"),
        ({"text": "a"}, "has neither messages, nor conversations, nor prompt and response"),
        ({"messages": "hi"}, "messages is text"),
        ({"messages": OPENAI["messages"][:1]}, "has no answer of an assistant"),
        ({"messages": OPENAI["messages"][1:]}, "user and assistant do not take turns"),
        ({"messages": [OPENAI["messages"][0], *OPENAI["messages"]]}, "do not take turns"),
        ({"prompt": "hi", "response": "  "}, "has an empty message"),
        ({"conversations": 3}, "conversations is no list"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "has a message with from='bing'"),
    ],
)
def test_what_is_no_conversation_is_counted_and_named(tmp_path: Path, row: Any, said: str) -> None:
    found, bad = read_conversations([write(tmp_path, OPENAI, row)])
    assert len(found) == 1
    assert bad.shown[0].startswith("said.jsonl line 2: ")
    assert said in bad.shown[0]


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.jsonl: cannot be read"):
        read_conversations([tmp_path / "none.jsonl"])
    (tmp_path / "bad.json").write_text("[1, ")
    with pytest.raises(ConfigurationError, match=r"bad\.json: not JSON"):
        read_conversations([tmp_path / "bad.json"])
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(ConfigurationError, match=r"no conversation can be used\nbad\.jsonl line 1: not JSON"):
        read_conversations([tmp_path / "bad.jsonl"])
