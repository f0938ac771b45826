"""A log of any size: what is left out of it, in which order it is read, and that it is never held."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.traces.trace_file import write_sample
from penstock.workloads.goals.traces.trace_index import TraceIndex


def row(episode: str, step: int, **changes: Any) -> str:
    """A line of a log."""
    good = {
        "time": 1.0, "episode": episode, "step": step, "observation": {"cpu": 0.5}, "action": "wait",
        "propensity": 0.5, "result": {"success": step == 0},
    }  # fmt: skip
    return json.dumps(good | changes)


def written(folder: Path, *lines: str) -> Path:
    """A file of lines."""
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (row("cut", 2, propensity=7.2), "propensity='7.2'"),
        (row("cut", 2, observation={"heat": 1.0}), "observation: lacks ['cpu'] and has ['heat']"),
        (row("cut", 2)[:70], "no JSON object"),
        (row("cut", 2, more=1), "more='1': extra inputs are not permitted"),
    ],
)
def test_an_episode_whose_last_line_is_broken_is_left_out(tmp_path: Path, broken: str, why: str) -> None:
    path = written(tmp_path, row("cut", 0), row("whole", 0), row("cut", 1), broken)
    with TraceIndex.of(path) as index:
        assert [trace.episode for trace in index.traces()] == ["whole"]
    assert [(fault.line, fault.why.startswith(why)) for fault in index.faults] == [(4, True)]
    assert (list(index.broken), index.episodes, index.decisions) == (["cut"], 1, 1)


def test_decisions_come_by_the_first_line_of_their_episode(tmp_path: Path) -> None:
    wanted = [(f"e{9 - number}", step) for number in range(9) for step in range(4)]
    lines = {one: row(*one) for one in wanted}
    begun = [lines.pop((name, 0)) for name, step in wanted if step == 0]
    rest = list(lines.values())
    random.Random(0).shuffle(rest)
    path = written(tmp_path, *begun, "", "{nonsense", *rest)
    with TraceIndex.of(path) as index:
        assert [(trace.episode, trace.step) for trace in index.traces()] == wanted
    assert (index.lines, index.episodes, index.decisions, index.independent) == (37, 9, 36, False)
    assert (index.done, index.well, index.with_propensity) == ({"wait": 36}, {"wait": 9}, 36)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    peaks = {}
    for count in (500, 4000):
        path = written(
            tmp_path, *(row(f"episode-{number}", step) for number in range(count) for step in (0, 1))
        )
        tracemalloc.start()
        with TraceIndex.of(path) as index:
            assert sum(1 for _ in index.traces()) == 2 * count
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[4000] < 1.5 * peaks[500], peaks


def test_a_sample_has_whole_episodes_of_all_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, *(row(f"e{number}", step) for number in range(10) for step in range(2)))
    with TraceIndex.of(path) as index:
        assert write_sample(index, tmp_path / "all.jsonl") == 10
        monkeypatch.setattr("penstock.workloads.goals.traces.trace_file.MOST_HELD", 8)
        assert write_sample(index, tmp_path / "some.jsonl") == 4
    assert (tmp_path / "all.jsonl").read_bytes() == path.read_bytes()
    with TraceIndex.of(tmp_path / "some.jsonl") as sample:
        told = [(trace.episode, trace.step) for trace in sample.traces()]
    assert told == [(name, step) for name in ("e0", "e3", "e6", "e9") for step in (0, 1)]
    assert not sample.faults


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, row("a", 0), row("b", 0))
    with TraceIndex.of(path) as index:
        path.write_text("x\n" * 200)
        with pytest.raises(ConfigurationError, match="was changed while it was read"):
            list(index.traces())
