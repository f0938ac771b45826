"""A log of any size: what is left out of it, in which order it is read, and that it is never held."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals import trace_index
from penstock.workloads.goals.trace_index import (
    MOST_LINE_BYTES,
    Trace,
    TraceIndex,
    held_log,
    shared_log,
    write_sample,
)


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


def read_log(path: Path) -> tuple[TraceIndex, list[tuple[Trace, ...]]]:
    """The index of a log that may be held, and its whole episodes."""
    with TraceIndex.of(path, trace_index.MOST_LINES) as index:
        return index, list(index.whole_episodes())


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
        monkeypatch.setattr("penstock.workloads.goals.trace_index.MOST_HELD", 8)
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


def test_episodes_are_put_together(tmp_path: Path) -> None:
    path = written(tmp_path, row("b", 1), "", row("a", 0, action="stop"), row("b", 0))
    log, episodes = read_log(path)
    assert [[trace.step for trace in episode] for episode in episodes] == [[0, 1], [0]]
    assert (log.lines, log.faults, log.independent) == (3, [], False)
    assert (log.actions, log.numbers) == (("stop", "wait"), ("cpu",))


def test_faults_are_named_by_line_and_cost_their_episode(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        row("good", 0),
        row("doubled", 0),
        row("doubled", 0),
        row("gap", 0),
        row("gap", 2),
        row("other", 0, observation={"heat": 1}),
        "{nonsense",
    )
    log, episodes = read_log(path)
    assert [episode[0].episode for episode in episodes] == ["good"]
    assert {fault.line: fault.why for fault in log.faults}.keys() == {3, 5, 6, 7}
    whys = {fault.line: fault.why for fault in log.faults}
    assert whys[3] == "step=0 of episode 'doubled' is there already, at line 2"
    assert whys[5] == "episode 'gap': step 1 is missing before step 2"
    assert "lacks ['cpu'] and has ['heat']" in whys[6]
    assert whys[7].startswith("no JSON object")
    assert set(log.broken) == {"doubled", "gap", "other"}


def test_a_line_that_is_too_long_is_not_held_in_memory(tmp_path: Path) -> None:
    path = written(tmp_path, "x" * (3 * MOST_LINE_BYTES), row("a", 0))
    log, episodes = read_log(path)
    assert [fault.line for fault in log.faults] == [1]
    assert f"at most {MOST_LINE_BYTES} are read" in log.faults[0].why
    assert len(episodes) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_files_of_other_systems_are_read(tmp_path: Path, begin: str, end: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes((begin + end.join([row("a", 0), row("b", 0)]) + end).encode())
    log, episodes = read_log(path)
    assert (len(episodes), log.faults) == (2, [])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"propensity": 0}, "propensity='0': input should be greater than 0"),
        ({"propensity": 1.5}, "propensity='1.5': input should be less than or equal to 1"),
        ({"propensity": "0.5"}, "propensity='0.5': input should be a valid number"),
        ({"time": float("nan")}, "time='nan': input should be a finite number"),
        ({"observation": {"cpu": 1e300}}, "observation.cpu='1e+300'"),
        ({"action": "wait "}, "action='wait '"),
        ({"action": "\0"}, "action="),
        ({"result": {"success": 1}}, "result.success='1': input should be a valid boolean"),
    ],
)
def test_odd_numbers_are_faults_and_never_guessed(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    log, episodes = read_log(written(tmp_path, row("bad", 0, **changes), row("good", 0)))
    assert [fault.line for fault in log.faults] == [1]
    assert log.faults[0].why.startswith(why), log.faults[0].why
    assert [episode[0].episode for episode in episodes] == ["good"]


def test_a_key_that_is_there_twice_is_a_fault(tmp_path: Path) -> None:
    twice = row("a", 0)[:-1] + ', "action": "stop"}'
    log, _ = read_log(written(tmp_path, twice, row("b", 0)))
    assert [(fault.line, fault.why) for fault in log.faults] == [
        (1, "no JSON object: 'action' is there twice")
    ]
    path = tmp_path / "wide.jsonl"
    path.write_bytes((row("a", 0) + "\n").encode("utf-16-be"))
    with pytest.raises(ConfigurationError, match="holds no whole episode"):
        held_log(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigurationError, match="is empty"):
        held_log(path)


def test_a_log_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_index, "MOST_LINES", 3)
    path = written(tmp_path, *(row(f"e{number}", 0) for number in range(4)))
    with pytest.raises(ConfigurationError, match="more than 3 lines: split it"):
        read_log(path)
    monkeypatch.setattr(trace_index, "MOST_FAULTS", 1)
    with pytest.raises(ConfigurationError, match="more than 1 faults.*line 1: time: is missing"):
        read_log(written(tmp_path, "{}", "{}", "{}"))


def test_environments_of_one_process_share_a_log(tmp_path: Path) -> None:
    path = written(tmp_path, row("a", 0))
    first = shared_log(path)
    assert shared_log(path) is first
    written(tmp_path, row("a", 0), row("b", 0))
    assert len(shared_log(path).episodes) == 2
    path.unlink()
    with pytest.raises(ConfigurationError, match="tasks.jsonl: cannot be read"):
        shared_log(path)


def test_a_file_without_an_episode_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no whole episode, but 1 faults, the first at line 1"):
        held_log(written(tmp_path, "{}"))
    with pytest.raises(ConfigurationError, match="absent.jsonl: cannot be read"):
        read_log(tmp_path / "absent.jsonl")
