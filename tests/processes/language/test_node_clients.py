"""A server of text asked by Node: with OpenAI's unmodified client, and with our `.proto` files alone."""

import json
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.protocol.fragment import Fragment, read_payload
from tests.support.language.text_stand import agents_api, make_model, served_text
from tests.support.serving import node_client

AGENT: Final = node_client.FOLDER.parent / "agent"
CONVERSE_S: Final = 120


def node(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    node_client.install(folder)
    command = [node_client.node(), *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=CONVERSE_S
    )


def conversed(tmp_path: Path, socket: Path, folder: Path, *flags: str) -> tuple[dict[str, Any], Fragment]:
    """What a conversation with two calls of tools came to, and what is learned from it."""
    with served_text(make_model(tmp_path / "model"), socket) as stand:
        address = agents_api(socket) if folder == AGENT else nullcontext(f"unix:{socket}")
        with address as server:
            done = node(folder, "converse.js", server, *flags)
        assert done.returncode == 0, done.stderr
        (fragment,) = stand.fragments()
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["said"] == "done"
    told = [(one["turn"], one["version"], one["learned"]) for one in result["turns"]]
    assert told == [(0, 1, True), (1, 1, True), (2, 1, True)]
    return result, fragment


@pytest.mark.promise("unmodified-clients-openai-s")
@pytest.mark.parametrize("flags", [(), ("--stream",)], ids=["whole", "streamed"])
def test_an_agent_in_node_is_learned_from(tmp_path: Path, short_folder: Path, flags: tuple[str, ...]) -> None:
    result, fragment = conversed(tmp_path, short_folder / "text.sock", AGENT, *flags)
    assert result["total_return"] == 1
    tensors = read_payload(fragment.header, fragment.payload)
    ids = [token for one in result["turns"] for token in one["token_ids"][0]]
    assert tensors["action"][tensors["valid"]].tolist() == ids


@pytest.mark.parametrize("flags", [(), ("--stream",)], ids=["whole", "streamed"])
def test_a_node_client_of_the_service_is_learned_from(
    tmp_path: Path, short_folder: Path, flags: tuple[str, ...]
) -> None:
    result, fragment = conversed(tmp_path, short_folder / "text.sock", node_client.FOLDER, *flags)
    assert (result["run"], result["total_return"], result["late"]) == ("text", 1.25, 0)
    assert [one["shown"] for one in result["turns"]] == ["", "", "done" if flags else ""]
    tensors = read_payload(fragment.header, fragment.payload)
    ids = [token for one in result["turns"] for token in one["token_ids"]]
    assert tensors["action"][tensors["valid"]].tolist() == ids
    assert tensors["reward"].sum() == 1.25


def test_a_node_client_gets_the_reason_of_a_refusal(tmp_path: Path) -> None:
    script = (
        "import { TextClient } from './text.js';"
        f"const client = new TextClient('unix:{tmp_path}/none.sock', {{ deadlineMs: 500 }});"
        "client.describe().catch((error) => { console.error(error.message); process.exitCode = 3; })"
        ".finally(() => client.close());"
    )
    done = node(node_client.FOLDER, "--input-type=module", "--eval", script)
    assert done.returncode == 3
    # What it has time to find out.
    assert re.search("UNAVAILABLE|DEADLINE_EXCEEDED", done.stderr), done.stderr
