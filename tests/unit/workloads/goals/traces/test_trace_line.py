"""Lines of a log: what is a trace, and what a message says of one that is none."""

import json
from typing import Any

import pytest

from penstock.workloads.goals.trace_index import MOST_LINE_BYTES, BadLine, parse


def line(**changes: Any) -> bytes:
    """A good line with changes; None leaves the field out."""
    good: dict[str, Any] = {
        "time": 1790000000.5,
        "episode": "monday",
        "step": 0,
        "observation": {"cpu": 0.7, "disk": 1},
        "goal": "free some disk",
        "action": "rotate_logs",
        "propensity": 0.25,
        "result": {"success": True, "execution_time_ms": 41},
    }
    return json.dumps({name: one for name, one in (good | changes).items() if one is not None}).encode()


def test_a_good_line_is_read() -> None:
    trace = parse(line())
    assert (trace.episode, trace.action, trace.propensity) == ("monday", "rotate_logs", 0.25)
    assert trace.observation == {"cpu": 0.7, "disk": 1.0}
    assert parse(line(propensity=None, goal=None)).propensity is None


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (line(action=None), "action: is missing"),
        (line(propensity=0), "propensity=.*greater than 0"),
        (line(propensity=1.5), "propensity=.*less than or equal to 1"),
        (line(propensity="0.5"), "propensity=.*valid number"),
        (line(step=-1), "step='-1'"),
        (line(step=True), "step="),
        (line(observation={"cpu": float("nan")}), "observation.cpu="),
        (line(observation={"cpu": True}), "observation.cpu="),
        (line(observation={"cpu": "high"}), "observation.cpu='high'"),
        (line(observation={}), "observation="),
        (line(observation={"cpu": 10**400}), "observation.cpu="),
        (line(result={"success": 1}), "result.success='1'"),
        (line(result={"success": True, "execution_time_ms": -1}), "result.execution_time_ms"),
        (line(colour="red"), "colour='red': extra inputs are not permitted"),
        (b"{", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b"\xff\xfe", "no JSON object"),
        (b"[1]", "line="),
        (b"7" * 5000, "no JSON object|line="),
        (b" " * (MOST_LINE_BYTES + 1), "at most 1048576"),
    ],
)
def test_a_bad_line_is_named(bad: bytes, why: str) -> None:
    with pytest.raises(BadLine, match=why):
        parse(bad)
