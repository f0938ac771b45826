"""Weights that came to harm on the disk answer nobody: the model without its adapter does, and says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from penstock.client import TextClient
from penstock.registry.weight_files import path_of
from tests.support.language.text_stand import GOOD, TOOLS, ServedTextRun, begun, serving_text
from tests.support.run.harness import eventually

ASKED: Final = ({"role": "user", "content": "sum"},)


def truncated(run: ServedTextRun) -> None:
    """Half of the file is gone."""
    path = path_of(run.folder, 1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(run: ServedTextRun) -> None:
    """A bit of the file is another one."""
    run.damage(1)


def absent(run: ServedTextRun) -> None:
    """The file is gone."""
    path_of(run.folder, 1).unlink()


@pytest.mark.parametrize("harm", [truncated, changed, absent])
def test_a_file_that_came_to_harm_is_stood_in_for(
    tmp_path: Path, harm: Callable[[ServedTextRun], None]
) -> None:
    run = begun(tmp_path)
    harm(run)
    with serving_text(run) as server, TextClient(server.address) as client:
        given = client.start_conversation("ada").generate(ASKED, tools=TOOLS)
        assert (given.version, given.fallback is not None) == (0, True)
        assert given.answers[0].message
        run.promote(run.add(2, GOOD))
        eventually(
            lambda: client.start_conversation("bob").generate(ASKED, tools=TOOLS).version == 2,
            "the version that is whole",
            60,
        )
        assert client.start_conversation("eve").generate(ASKED, tools=TOOLS).fallback is None
