"""What a page that looks at runs is sent: everything once, then what changes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra `ui`")

from penstock.launch.ui import application
from penstock.launch.ui.application import live
from penstock.launch.ui.catalogue import Catalogue
from tests.support.run.left_run import make_run


def parsed(text: str) -> tuple[str, Any]:
    """Kind and content of an event."""
    kind, data = text.rstrip("\n").split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_everything_is_sent_once_and_then_what_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "LOOK_S", 0.01)
    for name in ("a", "b"):
        make_run(tmp_path / name, summary={})

    async def listen() -> None:
        stream = live(Catalogue(tmp_path), "a", ["b"], can_act=True)
        first = [parsed(await anext(stream)) for _ in range(5)]
        assert [kind for kind, _ in first] == ["runs", "run", "versions", "curve", "curve"]
        assert first[0][1]["can_act"]
        assert {row["name"] for row in first[0][1]["runs"]} == {"a", "b"}
        assert [content["name"] for _, content in first[3:]] == ["a", "b"]
        with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
            file.write('{"env_steps": 300, "training_seconds": 2.0, "updates": 3, "mean_return": 9.0}\n')
        (runs, rows), (kind, curve) = [parsed(await anext(stream)) for _ in range(2)]
        assert (runs, kind, curve["name"]) == ("runs", "curve", "b"), "of the other run nothing is new"
        assert curve["columns"]["mean_return"][-1] == 9.0
        assert rows["runs"][0]["env_steps"] == 300 or rows["runs"][1]["env_steps"] == 300
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(listen())


def test_a_run_that_is_not_there_is_trouble_of_its_own(tmp_path: Path) -> None:
    make_run(tmp_path / "a", summary={})

    async def listen() -> None:
        stream = live(Catalogue(tmp_path), "a", ["../a"])
        found = [parsed(await anext(stream)) for _ in range(5)]
        assert [kind for kind, _ in found] == ["runs", "run", "versions", "curve", "trouble"]
        assert (found[-1][1]["status"], found[-1][1]["run"]) == (404, "../a")
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(listen())


def test_a_stream_without_news_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "LOOK_S", 0.001)

    async def listen() -> None:
        stream = live(Catalogue(tmp_path), "", ())
        assert parsed(await anext(stream))[0] == "runs"
        assert (await anext(stream)).startswith(":")
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(listen())
