import gzip
import json
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.config.configuration_error import ConfigurationError
from penstock.config.settings import PolicySection
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.publish.kept_versions import FinalPolicy, write_final, write_specification
from penstock.policy.policy import Policy, build
from penstock.policy.weights import encode
from penstock.workloads.goals import trace_index
from penstock.workloads.goals.commands import trace_commands
from penstock.workloads.goals.log_evaluation import collected, learned
from penstock.workloads.goals.off_policy import (
    Decisions,
    Estimates,
    TooLittle,
    cross_fitted,
    estimate,
    judge,
    returns_from,
)
from penstock.workloads.goals.trace_index import (
    MOST_LINE_BYTES,
    BadLine,
    Trace,
    TraceIndex,
    held_log,
    parse,
    shared_log,
    write_sample,
)
from tests.support.experience.bandit_log import line, written
from tests.support.oracles import off_policy_truth as truth

REWARDS = ("--reward", "failure=0", "--reward", "step=0", "--reward", "fast=0")


def recorded(folder: Path, count: int) -> tuple[Path, list[list[truth.Event]]]:
    """A recording of episodes of the chain, most of which go across fragments."""
    episodes = truth.chain_log(0, count)
    lines = [
        line(number, event, episode=f"e{number:05}", step=step)
        for number, episode in enumerate(episodes)
        for step, event in enumerate(episode)
    ]
    out = folder / "recording"
    path = written(folder, lines)
    reply = CliRunner().invoke(trace_commands, ["import", str(path), "--out", str(out), *REWARDS])
    assert reply.exit_code == 0, reply.output
    return out, episodes


def a_run(folder: Path, recording: Path) -> tuple[Path, Policy]:
    """A run that ended with an untrained policy, of the recording's spaces."""
    section = PolicySection()
    told = Recording(recording).specification
    policy = build(told.observation_space, told.action_space, section, 7)
    specification = replace(told, policy_json=section.canonical_json())
    run = folder / "run"
    (run / "policies").mkdir(parents=True)
    write_specification(run, specification)
    blob = encode(policy)
    write_final(run, FinalPolicy(specification=specification, blob=blob, version=1, update=0))
    return run, policy


def test_episodes_are_weighted_as_plain_python_weights_them(tmp_path: Path) -> None:
    recording, episodes = recorded(tmp_path, 300)
    run, policy = a_run(tmp_path, recording)
    words = ["evaluate", str(recording), "--policy", str(run), "--discount", "0.9", "--json"]
    reply = CliRunner().invoke(trace_commands, [*words, "--trust"])
    assert reply.exit_code == 0, reply.output
    told = json.loads(reply.output)["policies"][0]
    assert (told["episodes"], told["left_out"]) == (300, 0)

    loaded = Recording(recording).load(Recording(recording).fragments)
    seen = np.concatenate([arrays["observation"][: header.steps, 0] for header, arrays in loaded])
    chances = iter(learned(policy, deterministic=False)(seen))
    judged = [
        [replace(event, target=float(next(chances)[event.action])) for event in episode]
        for episode in episodes
    ]
    value, error = truth.importance_sampling(judged, 0.9)
    assert told["ips"]["value"] == pytest.approx(value, rel=1e-4)
    assert (told["ips"]["high"] - told["ips"]["low"]) / 2 == pytest.approx(1.96 * error, rel=1e-3)
    assert told["self_normalised"]["value"] == pytest.approx(truth.self_normalised(judged, 0.9), rel=1e-4)


def test_incomplete_or_unknown_episodes_are_left_out() -> None:
    def column(first: int, valid: list[bool], ends: bool) -> tuple[Any, Any]:
        steps = len(valid)
        slot = SimpleNamespace(slot_id=0, episode_id=next(number), first_step=first)
        end = np.zeros((steps, 1), np.bool_)
        end[-1] = ends
        arrays = {"valid": np.array(valid)[:, None], "terminated": end, "truncated": np.zeros_like(end)}
        arrays |= {name: np.zeros((steps, 1), np.float32) for name in ("observation", "action", "reward")}
        return SimpleNamespace(session=1, steps=steps, slots=(slot,)), arrays | {"log_prob": arrays["reward"]}

    number = iter(range(4))
    loaded = [
        column(0, [True, True], ends=True),
        column(0, [True, False], ends=True),
        column(0, [True, True], ends=False),
        column(1, [True, True], ends=True),
    ]
    _, episodes = collected(loaded)
    assert [episode.is_whole for episode in episodes.values()] == [True, False, False, False]


def test_options_foreign_to_a_recording_are_refused(tmp_path: Path) -> None:
    recording, _ = recorded(tmp_path, 60)
    run, _ = a_run(tmp_path, recording)
    invoke = CliRunner().invoke
    reply = invoke(trace_commands, ["evaluate", str(recording), "--policy", str(run), *REWARDS])
    assert (reply.exit_code, "a recording has its rewards" in reply.output) == (2, True)
    reply = invoke(trace_commands, ["evaluate", str(tmp_path), "--policy", str(run)])
    assert (reply.exit_code, "so no recording" in reply.output) == (2, True)


def row(episode: str = "monday", step: int = 0, **changes: Any) -> str:
    """A line of a log with changes; None leaves the field out."""
    good = {
        "time": 1.0, "episode": episode, "step": step, "observation": {"cpu": 0.5}, "action": "wait",
        "propensity": 0.5, "result": {"success": step == 0},
    }  # fmt: skip
    return json.dumps({name: one for name, one in (good | changes).items() if one is not None})


def index_written(folder: Path, *lines: str) -> Path:
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
    path = index_written(tmp_path, row("cut", 0), row("whole", 0), row("cut", 1), broken)
    with TraceIndex.of(path) as index:
        assert [trace.episode for trace in index.traces()] == ["whole"]
    assert [(fault.line, fault.why.startswith(why)) for fault in index.faults] == [(4, True)]
    assert (list(index.broken), index.episodes, index.decisions) == (["cut"], 1, 1)


def test_decisions_are_ordered_by_the_first_line_of_their_episode(tmp_path: Path) -> None:
    wanted = [(f"e{9 - number}", step) for number in range(9) for step in range(4)]
    lines = {one: row(*one) for one in wanted}
    begun = [lines.pop((name, 0)) for name, step in wanted if step == 0]
    rest = list(lines.values())
    random.Random(0).shuffle(rest)
    path = index_written(tmp_path, *begun, "", "{nonsense", *rest)
    with TraceIndex.of(path) as index:
        assert [(trace.episode, trace.step) for trace in index.traces()] == wanted
        assert [[one.step for one in episode] for episode in index.whole_episodes()] == [[0, 1, 2, 3]] * 9
    assert (index.lines, index.episodes, index.decisions, index.independent) == (37, 9, 36, False)
    assert (index.done, index.well, index.with_propensity) == ({"wait": 36}, {"wait": 9}, 36)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    peaks = {}
    for count in (500, 4000):
        path = index_written(
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
    path = index_written(tmp_path, *(row(f"e{number}", step) for number in range(10) for step in range(2)))
    with TraceIndex.of(path) as index:
        assert write_sample(index, tmp_path / "all.jsonl") == 10
        monkeypatch.setattr("penstock.workloads.goals.trace_index.MOST_HELD", 8)
        assert write_sample(index, tmp_path / "some.jsonl") == 4
    assert (tmp_path / "all.jsonl").read_bytes() == path.read_bytes()
    with TraceIndex.of(tmp_path / "some.jsonl") as sample:
        told = [(trace.episode, trace.step) for trace in sample.traces()]
    assert told == [(name, step) for name in ("e0", "e3", "e6", "e9") for step in (0, 1)]
    assert not sample.faults


def test_a_file_that_changes_while_it_is_read_is_reported(tmp_path: Path) -> None:
    path = index_written(tmp_path, *(row(f"e{number}", 0) for number in range(200)))
    with TraceIndex.of(path) as index:
        path.write_text("x\n" * 200)
        with pytest.raises(ConfigurationError, match="was changed while it was read"):
            list(index.traces())


def test_faults_are_named_by_line_and_cost_their_episode(tmp_path: Path) -> None:
    path = index_written(
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
    assert (log.lines, log.actions, log.numbers) == (7, ("wait",), ("cpu",))
    whys = {fault.line: fault.why for fault in log.faults}
    assert whys.keys() == {3, 5, 6, 7}
    assert whys[3] == "step=0 of episode 'doubled' is there already, at line 2"
    assert whys[5] == "episode 'gap': step 1 is missing before step 2"
    assert "lacks ['cpu'] and has ['heat']" in whys[6]
    assert whys[7].startswith("no JSON object")
    assert set(log.broken) == {"doubled", "gap", "other"}


def test_a_line_that_is_too_long_is_not_held_in_memory(tmp_path: Path) -> None:
    path = index_written(tmp_path, "x" * (3 * MOST_LINE_BYTES), row("a", 0))
    log, episodes = read_log(path)
    assert [fault.line for fault in log.faults] == [1]
    assert f"at most {MOST_LINE_BYTES} are read" in log.faults[0].why
    assert len(episodes) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\n\n \n"])
@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_files_of_other_systems_are_read(tmp_path: Path, begin: str, end: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes((begin + end.join([row("a", 0), row("b", 0)]) + end).encode())
    log, episodes = read_log(path)
    assert (len(episodes), log.faults) == (2, [])
    listed = f"[{row('a', 0)},\n{row('b', 0)}]".encode()
    for content in (listed, gzip.compress(listed), gzip.compress(path.read_bytes())):
        path.write_bytes(content)
        assert read_log(path)[1] == episodes


def test_a_null_says_as_much_as_a_field_that_is_absent() -> None:
    nulls = {"goal": None, "metadata": None, "propensity": None}
    result = {"success": True, "output": None, "error": None, "execution_time_ms": None, "crashed": None}
    whole = json.loads(row(propensity=None))
    assert parse(json.dumps(whole | nulls | {"result": result}).encode()) == parse(
        json.dumps(whole | {"result": {"success": True}}).encode()
    )
    with pytest.raises(BadLine, match=r"^action: is missing; result\.success: is missing"):
        parse(json.dumps(whole | {"action": None, "result": {"success": None}}).encode())


def test_a_duplicate_key_is_a_fault(tmp_path: Path) -> None:
    twice = row("a", 0)[:-1] + ', "action": "stop"}'
    log, _ = read_log(index_written(tmp_path, twice, row("b", 0)))
    assert [(fault.line, fault.why) for fault in log.faults] == [
        (1, "no JSON object: 'action' is there twice")
    ]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ((row() + "\n").encode("utf-16-be"), "holds no whole episode"),
        (b"", "is empty"),
        (b"{}\n", "no whole episode, but 1 faults, the first at line 1"),
        (None, "tasks.jsonl: cannot be read"),
    ],
)
def test_a_file_without_an_episode_names_the_cause(tmp_path: Path, content: bytes | None, why: str) -> None:
    if content is not None:
        (tmp_path / "tasks.jsonl").write_bytes(content)
    with pytest.raises(ConfigurationError, match=why):
        held_log(tmp_path / "tasks.jsonl")


def test_a_log_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_index, "MOST_LINES", 3)
    path = index_written(tmp_path, *(row(f"e{number}", 0) for number in range(4)))
    with pytest.raises(ConfigurationError, match="more than 3 lines: split it"):
        read_log(path)
    monkeypatch.setattr(trace_index, "MOST_FAULTS", 1)
    with pytest.raises(ConfigurationError, match="more than 1 faults.*line 1: time: is missing"):
        read_log(index_written(tmp_path, "{}", "{}", "{}"))


def test_environments_of_one_process_share_a_log(tmp_path: Path) -> None:
    path = index_written(tmp_path, row("a", 0))
    first = shared_log(path)
    assert shared_log(path) is first
    index_written(tmp_path, row("a", 0), row("b", 0))
    assert len(shared_log(path).episodes) == 2
    path.unlink()
    with pytest.raises(ConfigurationError, match="tasks.jsonl: cannot be read"):
        shared_log(path)


def test_a_good_line_is_read() -> None:
    trace = parse(row(observation={"cpu": 0.7, "disk": 1}, goal="free some disk").encode())
    assert (trace.episode, trace.action, trace.propensity) == ("monday", "wait", 0.5)
    assert trace.observation == {"cpu": 0.7, "disk": 1.0}
    assert parse(row(propensity=None).encode()).propensity is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"action": None}, "action: is missing"),
        ({"action": "wait "}, "action='wait '"),
        ({"action": "\0"}, "action="),
        ({"propensity": 0}, "propensity='0': input should be greater than 0"),
        ({"propensity": 1.5}, "propensity='1.5': input should be less than or equal to 1"),
        ({"propensity": "0.5"}, "propensity='0.5': input should be a valid number"),
        ({"time": float("nan")}, "time='nan': is no finite number"),
        ({"time": 1790000000500}, "time='1790000000500': .*milliseconds: divide it by 1000"),
        ({"goal": "cut \ud83d"}, "goal='cut .*holds half of a surrogate pair"),
        ({"step": -1}, "step='-1'"),
        ({"step": True}, "step="),
        ({"observation": {"cpu": float("nan")}}, "observation.cpu="),
        ({"observation": {"cpu": True}}, "observation.cpu="),
        ({"observation": {"cpu": "high"}}, "observation.cpu='high'"),
        ({"observation": {"cpu": 10**400}}, "observation.cpu="),
        ({"observation": {"cpu": 1e300}}, "observation.cpu='1e[+]300'"),
        ({"observation": {}}, "observation="),
        ({"result": {"success": 1}}, "result.success='1': input should be a valid boolean"),
        ({"result": {"success": True, "execution_time_ms": -1}}, "result.execution_time_ms"),
        ({"colour": "red"}, "colour='red': extra inputs are not permitted"),
    ],
)
def test_a_field_that_is_odd_is_named_and_never_guessed(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BadLine, match=f"^{why}"):
        parse(row(**changes).encode())


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"{", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b"\xff\xfe", "no JSON object"),
        (b"[1]", "holds list, not an object"),
        (b"7" * 5000, "row='inf': is no finite number"),
        (b" " * (MOST_LINE_BYTES + 1), "at most 1048576"),
    ],
)
def test_what_is_no_line_is_named(bad: bytes, why: str) -> None:
    with pytest.raises(BadLine, match=why):
        parse(bad)


EstimatorsPolicy = tuple[tuple[float, ...], ...]
DRAWS: Final = 200
NAMES: Final = ("ips", "self_normalised", "doubly_robust")


def decisions_of(episodes: list[list[truth.Event]], target: EstimatorsPolicy, discount: float) -> Decisions:
    """Events as the estimators take them, with a model that is fitted on them."""
    events = [event for episode in episodes for event in episode]
    episode = np.repeat(np.arange(len(episodes)), [len(one) for one in episodes])
    reward = np.array([event.reward for event in events])
    action = np.array([event.action for event in events])
    seen = np.eye(len(target), dtype=np.float32)[[event.context for event in events]]
    returns = returns_from(episode, reward, discount)
    model = cross_fitted(seen, action, returns, episode, len(target[0]))
    chances = np.array([target[event.context] for event in events])
    return Decisions(
        episode=episode,
        reward=reward,
        log_target=np.log([event.target for event in events]),
        log_logged=np.log([event.logged for event in events]),
        predicted=model[np.arange(len(events)), action],
        expected=(chances * model).sum(1),
    )


def bandit(seed: int, count: int = 400) -> list[list[truth.Event]]:
    return [[event] for event in truth.bandit_log(seed, count)]


def coverage(found: list[Estimates], value: float) -> dict[str, float]:
    """The share of intervals that hold the value, by estimator."""
    inside = {
        name: [getattr(one, name).low <= value <= getattr(one, name).high for one in found] for name in NAMES
    }
    return {name: sum(hits) / len(hits) for name, hits in inside.items()}


def test_intervals_of_single_decisions_cover_the_truth() -> None:
    found = [judge(decisions_of(bandit(seed), truth.TARGET, 1.0), 1.0) for seed in range(DRAWS)]
    value = truth.bandit_value(truth.TARGET)
    covered = coverage(found, value)
    assert min(covered.values()) >= 0.9, covered
    assert max(covered.values()) < 1.0, "intervals that always cover are too wide to say anything"
    assert abs(np.mean([one.doubly_robust.value for one in found]) - value) < 0.01
    assert value > truth.bandit_value(truth.LOGGING) + 0.2


def test_intervals_of_episodes_cover_the_truth() -> None:
    value = truth.chain_value(truth.CHAIN_TARGET)
    found = [
        judge(decisions_of(truth.chain_log(seed, 250), truth.CHAIN_TARGET, truth.DISCOUNT), truth.DISCOUNT)
        for seed in range(DRAWS)
    ]
    covered = coverage(found, value)
    assert min(covered.values()) >= 0.9, covered
    assert max(covered.values()) < 1.0
    assert abs(np.mean([one.ips.value for one in found]) - value) < 0.02


@pytest.mark.parametrize("seed", range(2))
def test_estimates_equal_plain_python(seed: int) -> None:
    for episodes, target, discount in (
        (bandit(seed), truth.TARGET, 1.0),
        (truth.chain_log(seed, 100), truth.CHAIN_TARGET, truth.DISCOUNT),
    ):
        found = estimate(decisions_of(episodes, target, discount), discount)
        value, error = truth.importance_sampling(episodes, discount)
        assert found.ips.value == pytest.approx(value, rel=1e-9)
        assert found.ips.standard_error == pytest.approx(error, rel=1e-9)
        assert found.self_normalised.value == pytest.approx(
            truth.self_normalised(episodes, discount), rel=1e-9
        )


def test_a_good_model_narrows_the_interval_and_a_bad_one_costs_no_bias() -> None:
    found = estimate(decisions_of(bandit(0, 5000), truth.TARGET, 1.0), 1.0)
    assert found.doubly_robust.standard_error < 0.8 * found.ips.standard_error
    values = []
    for seed in range(60):
        made = decisions_of(bandit(seed), truth.TARGET, 1.0)
        threes = np.full_like(made.predicted, 3)
        values.append(estimate(replace(made, predicted=threes, expected=threes), 1.0).doubly_robust.value)
    spread = np.std(values) / np.sqrt(len(values))
    assert abs(np.mean(values) - truth.bandit_value(truth.TARGET)) < 4 * spread


def test_shuffled_propensities_are_noticed() -> None:
    by_mean = 0
    for seed in range(20):
        events = truth.bandit_log(seed, 1000)
        logged = [event.logged for event in events]
        random.Random(seed).shuffle(logged)
        shuffled = [[replace(event, logged=one)] for event, one in zip(events, logged, strict=True)]
        with pytest.raises(TooLittle, match="the propensities do not belong") as said:
            judge(decisions_of(shuffled, truth.TARGET, 1.0), 1.0)
        by_mean += "instead of 1" in str(said.value)
    assert by_mean > 10  # of others the estimates exclude each other


def test_estimates_that_exclude_each_other_are_refused() -> None:
    events = [[one] for one in truth.bandit_log(0, 4000)]
    fine = decisions_of(events, truth.TARGET, 1.0)
    assert judge(fine, 1.0).gap.low < 0 < judge(fine, 1.0).gap.high
    too_sure = replace(fine, expected=fine.expected + 0.1)
    with pytest.raises(TooLittle, match=r"\(0\.\d+\) exclude each other"):
        judge(too_sure, 1.0)


def test_a_policy_without_overlap_with_the_log_is_not_judged() -> None:
    made = decisions_of(bandit(3), truth.TARGET, 1.0)
    rarely, overflowing = np.full_like(made.log_target, -30.0), made.log_logged.copy()
    rarely[:7], overflowing[0] = 0.0, -1000.0
    for judged, why in (
        (replace(made, log_target=rarely), r"effective sample size [0-9.]+ of 400 episodes, below 50"),
        (decisions_of(bandit(3, 49), truth.TARGET, 1.0), "49 episodes with known propensities, fewer"),
        (replace(made, log_target=np.full_like(made.log_target, -np.inf)), "effective sample size 0.0"),
        (replace(made, log_logged=overflowing), "effective sample size 1.0"),
    ):
        with pytest.raises(TooLittle, match=why):
            judge(judged, 1.0)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"episode": np.zeros(400, np.int64) + 1}, "without a gap"),
        ({"reward": np.full(400, np.nan)}, "reward must be finite"),
        ({"log_logged": np.full(400, 0.5)}, "log_logged must be the logarithm"),
        ({"log_logged": np.full(400, -np.inf)}, "log_logged must be the logarithm"),
        ({"log_target": np.full(400, np.nan)}, "log_target must be the logarithm"),
        ({"reward": np.zeros(3)}, "different lengths"),
    ],
)
def test_decisions_that_cannot_be_used_are_refused(changed: dict[str, np.ndarray], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(decisions_of(bandit(0), truth.TARGET, 1.0), **changed)


def test_intervals_cover_the_truth_where_failures_are_rare() -> None:
    rate, draws, covered = 0.98, 200, {"self_normalised": 0, "doubly_robust": 0}
    for seed in range(draws):
        random = np.random.default_rng(seed)
        action = random.integers(3, size=240)
        reward = (random.random(240) < rate).astype(float)
        chosen = action == 1
        mean = np.array([reward[action == one].mean() for one in range(3)])
        with np.errstate(divide="ignore"):
            log_target = np.log(chosen.astype(float))
        decisions = Decisions(
            episode=np.arange(240), reward=reward, log_target=log_target,
            log_logged=np.full(240, -np.log(3.0)), predicted=mean[action], expected=np.full(240, mean[1]),
            action=action,
        )  # fmt: skip
        found = estimate(decisions, 1.0)
        for name in covered:
            one = getattr(found, name)
            covered[name] += one.low <= rate <= one.high
    assert min(covered.values()) >= 0.9 * draws, covered
