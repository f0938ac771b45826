"""The unmodified client of OpenAI's API for Node: a conversation with two calls of tools, learned from."""

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from penstock.protocol.fragment import read_payload
from tests.support.language.text_stand import agents_api, make_model, served_text
from tests.support.serving import node_client

FOLDER: Final = node_client.FOLDER.parent / "agent"
CONVERSE_S: Final = 120


@pytest.mark.promise("unmodified-clients-openai-s")
@pytest.mark.parametrize("flags", [(), ("--stream",)], ids=["whole", "streamed"])
def test_an_agent_in_node_is_learned_from(tmp_path: Path, short_folder: Path, flags: tuple[str, ...]) -> None:
    node_client.install(FOLDER)
    socket = short_folder / "text.sock"
    with served_text(make_model(tmp_path / "model"), socket) as stand, agents_api(socket) as base_url:
        done = subprocess.run(
            [node_client.node(), "converse.js", base_url, *flags],
            cwd=FOLDER, capture_output=True, text=True, check=False, timeout=CONVERSE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        (fragment,) = stand.fragments()
    assert (result["said"], result["total_return"]) == ("done", 1)
    assert [(one["turn"], one["version"], one["learned"]) for one in result["turns"]] == [
        (0, 1, True),
        (1, 1, True),
        (2, 1, True),
    ]
    tensors = read_payload(fragment.header, fragment.payload)
    ids = [token for one in result["turns"] for token in one["token_ids"][0]]
    assert tensors["action"][tensors["valid"]].tolist() == ids
