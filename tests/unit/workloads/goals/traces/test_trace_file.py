"""A log as a whole: whole episodes, and faults with the number of their line."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.traces import trace_file, trace_index
from penstock.workloads.goals.traces.trace_file import need_episodes, read_log, shared_episodes
from penstock.workloads.goals.traces.trace_line import MOST_LINE_BYTES


def row(episode: str, step: int, **changes: Any) -> str:
    """A line of a log."""
    good = {
        "time": 1.0,
        "episode": episode,
        "step": step,
        "observation": {"cpu": 0.5, "disk": 0.1},
        "action": "wait",
        "result": {"success": step == 0},
    }
    return json.dumps(good | changes)


def written(folder: Path, *lines: str) -> Path:
    """A file of lines."""
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_episodes_are_put_together(tmp_path: Path) -> None:
    path = written(tmp_path, row("b", 1), "", row("a", 0, action="stop"), row("b", 0))
    log = read_log(path)
    assert [[trace.step for trace in episode] for episode in log.episodes] == [[0, 1], [0]]
    assert (log.lines, log.faults, log.independent) == (3, (), False)
    assert (log.actions, log.numbers) == (("stop", "wait"), ("cpu", "disk"))


def test_faults_are_named_by_line_and_cost_their_episode(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        row("good", 0),
        row("doubled", 0),
        row("doubled", 0),
        row("gap", 0),
        row("gap", 2),
        row("other", 0, observation={"cpu": 0.5, "heat": 1}),
        "{nonsense",
    )
    log = read_log(path)
    assert [episode[0].episode for episode in log.episodes] == ["good"]
    assert {fault.line: fault.why for fault in log.faults}.keys() == {3, 5, 6, 7}
    whys = {fault.line: fault.why for fault in log.faults}
    assert whys[3] == "step=0 of episode 'doubled' is there already, at line 2"
    assert whys[5] == "episode 'gap': step 1 is missing before step 2"
    assert "lacks ['disk'] and has ['heat']" in whys[6]
    assert whys[7].startswith("no JSON object")
    assert set(log.broken) == {"doubled", "gap", "other"}


def test_a_line_that_is_too_long_is_not_held_in_memory(tmp_path: Path) -> None:
    path = written(tmp_path, "x" * (3 * MOST_LINE_BYTES), row("a", 0))
    log = read_log(path)
    assert [fault.line for fault in log.faults] == [1]
    assert f"at most {MOST_LINE_BYTES} are read" in log.faults[0].why
    assert len(log.episodes) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_files_of_other_systems_are_read(tmp_path: Path, begin: str, end: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes((begin + end.join([row("a", 0), row("b", 0)]) + end).encode())
    log = read_log(path)
    assert (len(log.episodes), log.faults) == (2, ())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"propensity": 0}, "propensity='0': input should be greater than 0"),
        ({"propensity": 1.5}, "propensity='1.5': input should be less than or equal to 1"),
        ({"propensity": "0.5"}, "propensity='0.5': input should be a valid number"),
        ({"time": float("nan")}, "time='nan': input should be a finite number"),
        ({"observation": {"cpu": 1e300, "disk": 0.0}}, "observation.cpu='1e+300'"),
        ({"action": "wait "}, "action='wait '"),
        ({"action": "\0"}, "action="),
        ({"result": {"success": 1}}, "result.success='1': input should be a valid boolean"),
    ],
)
def test_odd_numbers_are_faults_and_never_guessed(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    log = read_log(written(tmp_path, row("bad", 0, **changes), row("good", 0)))
    assert [fault.line for fault in log.faults] == [1]
    assert log.faults[0].why.startswith(why), log.faults[0].why
    assert [episode[0].episode for episode in log.episodes] == ["good"]


def test_a_key_that_is_there_twice_is_a_fault(tmp_path: Path) -> None:
    twice = row("a", 0)[:-1] + ', "action": "stop"}'
    log = read_log(written(tmp_path, twice, row("b", 0)))
    assert [(fault.line, fault.why) for fault in log.faults] == [
        (1, "no JSON object: 'action' is there twice")
    ]
    path = tmp_path / "wide.jsonl"
    path.write_bytes((row("a", 0) + "\n").encode("utf-16-be"))
    with pytest.raises(ConfigurationError, match="holds no whole episode"):
        need_episodes(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigurationError, match="is empty"):
        need_episodes(path)


def test_a_log_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_file, "MOST_LINES", 3)
    path = written(tmp_path, *(row(f"e{number}", 0) for number in range(4)))
    with pytest.raises(ConfigurationError, match="more than 3 lines: split it"):
        read_log(path)
    monkeypatch.setattr(trace_index, "MOST_FAULTS", 1)
    with pytest.raises(ConfigurationError, match="more than 1 faults.*line 1: time: is missing"):
        read_log(written(tmp_path, "{}", "{}", "{}"))


def test_environments_of_one_process_share_a_log(tmp_path: Path) -> None:
    path = written(tmp_path, row("a", 0))
    first = shared_episodes(path)
    assert shared_episodes(path) is first
    written(tmp_path, row("a", 0), row("b", 0))
    assert len(shared_episodes(path).episodes) == 2
    path.unlink()
    with pytest.raises(ConfigurationError, match="tasks.jsonl: cannot be read"):
        shared_episodes(path)


def test_a_file_without_an_episode_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no whole episode, but 1 faults, the first at line 1"):
        need_episodes(written(tmp_path, "{}"))
    with pytest.raises(ConfigurationError, match="absent.jsonl: cannot be read"):
        read_log(tmp_path / "absent.jsonl")
