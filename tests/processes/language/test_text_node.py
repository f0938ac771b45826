"""A server of text asked by another language: nothing of ours but the `.proto` files is there."""

import json
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from penstock.protocol.fragment import read_payload
from tests.support.language.text_stand import make_model, served_text
from tests.support.serving import node_client

CONVERSE_S: Final = 120


@pytest.mark.parametrize("flags", [(), ("--stream",)], ids=["whole", "streamed"])
def test_a_node_client_of_the_service_is_learned_from(
    tmp_path: Path, short_folder: Path, flags: tuple[str, ...]
) -> None:
    node_client.install()
    socket = short_folder / "text.sock"
    with served_text(make_model(tmp_path / "model"), socket) as stand:
        done = subprocess.run(
            [node_client.node(), "converse.js", f"unix:{socket}", *flags],
            cwd=node_client.FOLDER, capture_output=True, text=True, check=False, timeout=CONVERSE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        (fragment,) = stand.fragments()
    assert (result["run"], result["said"], result["late"]) == ("text", "done", 0)
    assert result["total_return"] == 1.25
    turns = result["turns"]
    assert [(one["turn"], one["version"], one["learned"]) for one in turns] == [
        (0, 1, True),
        (1, 1, True),
        (2, 1, True),
    ]
    assert [one["shown"] for one in turns] == ["", "", "done" if flags else ""]
    tensors = read_payload(fragment.header, fragment.payload)
    assert tensors["action"][tensors["valid"]].tolist() == [id_ for one in turns for id_ in one["token_ids"]]
    assert tensors["reward"].sum() == 1.25


def test_a_refusal_reaches_a_node_client_with_its_reason(tmp_path: Path) -> None:
    node_client.install()
    script = (
        "import { TextClient } from './text.js';"
        f"const client = new TextClient('unix:{tmp_path}/none.sock', {{ deadlineMs: 500 }});"
        "client.describe().catch((error) => { console.error(error.message); process.exitCode = 3; })"
        ".finally(() => client.close());"
    )
    done = subprocess.run(
        [node_client.node(), "--input-type=module", "--eval", script],
        cwd=node_client.FOLDER, capture_output=True, text=True, check=False, timeout=CONVERSE_S,
    )  # fmt: skip
    assert done.returncode == 3
    assert re.search("UNAVAILABLE|DEADLINE_EXCEEDED", done.stderr), (
        done.stderr
    )  # what it has time to find out
