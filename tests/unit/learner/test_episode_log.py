"""Episodes are written one a line, and the file is bounded."""

import json
import logging
from pathlib import Path

import pytest

from penstock.learner.evaluation import BEFORE, EPISODES, EpisodeLog
from penstock.protocol.messages import Episode


def episode(number: int) -> Episode:
    """Of `number` steps."""
    return Episode(
        slot_id=0, episode_id=number, episode_return=number / 2, length=number, terminated=True, version=3
    )


def test_each_episode_has_a_line(tmp_path: Path) -> None:
    EpisodeLog(tmp_path).add(1, [episode(4), episode(5)])
    EpisodeLog(tmp_path).add(3, [episode(6)])
    lines = [json.loads(line) for line in (tmp_path / EPISODES).read_text().splitlines()]
    assert [(one["episode"], one["return"], one["length"]) for one in lines] == [
        (1, 2, 4),
        (2, 2.5, 5),
        (3, 3, 6),
    ]
    assert {(one["version"], one["terminated"]) for one in lines} == {(3, True)}


def test_a_full_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    written = EpisodeLog(tmp_path, most_bytes=1000)
    for number in range(1, 100):
        written.add(number, [episode(number)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEFORE, EPISODES]
    assert all((tmp_path / name).stat().st_size < 1200 for name in (BEFORE, EPISODES))
    last = json.loads((tmp_path / EPISODES).read_text().splitlines()[-1])
    assert last["episode"] == 99


def test_what_the_disk_does_not_take_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / EPISODES).mkdir()
    written = EpisodeLog(tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 4):
            written.add(number, [episode(number)])
    assert [record.message for record in caplog.records] == ["episodes are not written"]
