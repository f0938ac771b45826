import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.broker.log.replies import ProbeAnswer
from penstock.config.settings import PolicySection
from penstock.launch.inspection.curve import read_rows
from penstock.learner.batch import reward_of
from penstock.learner.evaluation import BEFORE, EPISODES, EpisodeLog
from penstock.learner.feed.log_feed import LogBatch
from penstock.learner.probe import ROWS, Quarantine, make_probe
from penstock.learner.publish.kept_versions import FinalPolicy, read_final, write_final
from penstock.learner.recorder import Recorder, Staleness, TrainingClock
from penstock.policy import weights
from penstock.policy.policy import Policy, build
from penstock.protocol.messages import Episode
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, leaves
from penstock.runtime import metrics
from tests.support.run.small_run import specification


def episode(number: int) -> Episode:
    return Episode(
        slot_id=0, episode_id=number, episode_return=number / 2, length=number, terminated=True, version=3
    )


def test_each_episode_has_a_line(tmp_path: Path) -> None:
    EpisodeLog(tmp_path).add(1, [episode(4), episode(5)])
    EpisodeLog(tmp_path).add(3, [episode(6)])
    lines = [json.loads(line) for line in (tmp_path / EPISODES).read_text().splitlines()]
    shown = [(one["episode"], one["return"], one["length"]) for one in lines]
    assert shown == [(1, 2, 4), (2, 2.5, 5), (3, 3, 6)]
    assert {(one["version"], one["terminated"]) for one in lines} == {(3, True)}


def test_a_full_file_replaces_the_previous_one(tmp_path: Path) -> None:
    written = EpisodeLog(tmp_path, most_bytes=1000)
    for number in range(1, 100):
        written.add(number, [episode(number)])
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEFORE, EPISODES]
    assert all((tmp_path / name).stat().st_size < 1200 for name in (BEFORE, EPISODES))
    last = json.loads((tmp_path / EPISODES).read_text().splitlines()[-1])
    assert last["episode"] == 99


def test_episodes_that_the_disk_does_not_take_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / EPISODES).mkdir()
    written = EpisodeLog(tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 4):
            written.add(number, [episode(number)])
    assert [record.message for record in caplog.records] == ["episodes are not written"]


FAR = np.array([4.8, np.inf, 3.4e38], np.float32)
OBSERVATION = Box(-FAR, FAR)
ACTION = Discrete(2)


def policy(seed: int = 0) -> Policy:
    return build(OBSERVATION, ACTION, PolicySection(hidden_sizes=(8,)), seed)


def held(
    quarantine: Quarantine, log_prob: Sequence[float] | NDArray[Any], version: int = 7, sha256: str = "digest"
) -> bool:
    answer = tuple(map(float, log_prob))
    quarantine.check([ProbeAnswer(session=3, actor_id="a", version=version, sha256=sha256, log_prob=answer)])
    return quarantine.holds(3)


@pytest.mark.parametrize(
    "space",
    [
        OBSERVATION,
        Box(np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)),
        Dict((("a", Discrete(3, start=2)), ("b", MultiDiscrete((2, 5))), ("c", MultiBinary(4)))),
    ],
)
def test_probe_observations_are_in_the_space_and_fixed_by_the_seed(space: Space) -> None:
    small = PolicySection(hidden_sizes=(8,))
    one, two = (make_probe(space, build(space, ACTION, small, 0), 3) for _ in range(2))
    for path, leaf in leaves(space, "observation"):
        array = one.observation[path]
        assert array.shape == (ROWS, *leaf.shape)
        assert array.dtype == leaf.dtype
        assert np.array_equal(array, two.observation[path])
        assert np.isfinite(array.astype(np.float64)).all()
        if isinstance(leaf, Box):
            assert np.greater_equal(array, leaf.low).all()
            assert np.less_equal(array, leaf.high).all()


def test_a_wrong_answer_quarantines_a_session_until_a_right_one() -> None:
    served, other = policy(0), policy(1)
    probe = make_probe(OBSERVATION, served, 0)
    quarantine = Quarantine(probe, policy(0), 1e-3)
    quarantine.expect(7, "digest", weights.snapshot(served))
    right, wrong = (made.log_prob(probe.observation, probe.action) for made in (served, other))
    assert not held(quarantine, right)
    assert held(quarantine, wrong)
    assert held(quarantine, wrong, version=99)
    assert not held(quarantine, right)
    assert held(quarantine, right, sha256="other")
    assert not held(quarantine, right)
    assert held(quarantine, (math.nan,) * ROWS)
    assert not held(quarantine, right)
    assert held(quarantine, right[:-1])
    assert not quarantine.holds(4)


def test_a_missed_update_smaller_than_the_tolerance_is_found() -> None:
    before, after = policy(0), policy(0)
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.mul_(1.005)
    probe = make_probe(OBSERVATION, before, 0)
    quarantine = Quarantine(probe, policy(0), 1e-3)
    right = {}
    for version, made in ((1, before), (2, after), (3, before)):
        quarantine.expect(version, "digest", weights.snapshot(made))
        right[version] = made.log_prob(probe.observation, probe.action).astype(np.float64)
    assert 1e-5 < np.abs(right[1] - right[2]).max() < 1e-4
    assert not held(quarantine, right[1], 1)
    assert held(quarantine, right[1], 2)
    assert held(quarantine, right[1], 2)
    assert not held(quarantine, right[3], 3)
    assert not held(quarantine, right[2] + np.abs(right[1] - right[2]).max() / 2, 2)


def test_a_large_answer_may_differ_by_its_rounding() -> None:
    far = np.full(24, 100, np.float32)
    observation, action = Box(-far[:3], far[:3]), Box(-far, far)
    narrow = PolicySection(hidden_sizes=(8,), initial_log_std=-6.0)
    served, replica = (build(observation, action, narrow, seed) for seed in (0, 1))
    probe = make_probe(observation, served, 0)
    quarantine = Quarantine(probe, replica, 1e-3)
    served.actor_head.bias.data += 0.5
    quarantine.expect(7, "digest", weights.snapshot(served))
    right = served.acting_log_prob(probe.observation, probe.action)
    assert np.spacing(right).min() < -1e-3
    assert not held(quarantine, right)
    assert not held(quarantine, np.nextafter(right, np.float32(0)))
    assert held(quarantine, right * np.float32(1.01))


@pytest.mark.parametrize(
    "section", [{"recurrent": "lstm"}, {"recurrent": "gru"}, {"frame_stack": 3}], ids=str
)
def test_a_policy_with_memory_is_probed_in_the_middle_of_an_episode(section: dict[str, Any]) -> None:
    made = PolicySection(hidden_sizes=(8,), recurrent_size=4, **section)
    served, replica = (build(OBSERVATION, ACTION, made, seed) for seed in (0, 1))
    probe = make_probe(OBSERVATION, served, 0)
    quarantine = Quarantine(probe, replica, 1e-3)
    quarantine.expect(7, "digest", weights.snapshot(served))

    def answered() -> bool:
        return held(quarantine, served.acting_log_prob(probe.observation, probe.action))

    assert not answered()
    core = served.memory.actor_core
    recurrent = None if core is None else core.rnn.weight_hh_l0
    changed = recurrent if isinstance(recurrent, torch.Tensor) else next(served.actor_body.parameters())
    with torch.no_grad():
        served.actor_head.weight.mul_(1000)
    quarantine.expect(7, "digest", weights.snapshot(served))
    assert not answered()
    with torch.no_grad():
        changed[:, -1] += 1.0  # of what was remembered, or of the newest frame
    assert answered()


def test_a_sender_of_unlearnable_fragments_stays_quarantined_after_a_restart() -> None:
    served = policy(0)
    probe = make_probe(OBSERVATION, served, 0)
    first, second = (Quarantine(probe, policy(0), 1e-3) for _ in range(2))
    first.expect(7, "digest", weights.snapshot(served))
    before = first.sessions
    first.convict(3, "a", "log entry 9 is invalid")
    assert first.sessions != before
    assert held(first, served.log_prob(probe.observation, probe.action)), "whatever it answers"
    for _ in range(2):
        first.suspect(4, "a", "log entry 10 makes updates fail")
    second.restore(json.loads(json.dumps(first.state())))
    assert second.holds(3)
    assert not second.holds(4)
    second.suspect(4, "a", "log entry 11 makes updates fail")
    assert second.sessions == {3, 4}


def test_quantiles_of_staleness_survive_a_checkpoint() -> None:
    staleness = Staleness()
    assert staleness.quantiles() == {"p50": 0, "p99": 0, "max": 0}
    staleness.add({0: 10, 1: 88, 4: 1, 9: 1})
    assert staleness.quantiles() == {"p50": 1, "p99": 4, "max": 9}
    again = Staleness(staleness.state())
    assert again.quantiles() == staleness.quantiles()


def test_training_begins_with_the_first_experience() -> None:
    clock = TrainingClock()
    assert clock.seconds() == 0
    clock.start(round((time.time() - 2) * 1e6))
    assert clock.seconds() == pytest.approx(2, abs=0.5)
    resumed = TrainingClock(100.0)
    assert resumed.seconds() == pytest.approx(100.0)
    resumed.start(1)
    assert resumed.seconds() == pytest.approx(100.0, abs=0.5)


def test_a_line_torn_by_a_crash_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"env_steps": 10}\n{"env_steps": 20}\n{"env_st')
    recorder = Recorder(tmp_path, Staleness(), 10)
    recorder.write(lambda: moment(15), now=True)
    assert [row["env_steps"] for row in read_rows(path)] == [10, 15]


def test_a_line_reports_the_evaluated_version_and_the_rewards(tmp_path: Path) -> None:
    valid = np.array([[1, 0], [1, 1]], bool)
    assert reward_of({"reward": np.array([[1, 50], [2, 4]], np.float32), "valid": valid}) == 7.0
    recorder = Recorder(tmp_path, Staleness(), 0)
    log_batch = LogBatch(
        last=1, trained=(1,), dropped={}, steps=8, updates=(0,), versions=(1,), batch=None, round=None,
        size=1, created_us=1, assemble_s=0.0, origins={}, reward=-2.0,
    )  # fmt: skip
    recorder.updated(log_batch, {"nll": 0.5}, update=0, wait_s=0.0, compute_s=0.0)
    evaluated = {"evaluation_deterministic": 3.5, "evaluation_sampled": 2.5, "evaluation_best": 4.0}
    recorder.write(lambda: moment(8, evaluated), now=True)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row.items() >= (evaluated | {"nll": 0.5, "mean_reward": -0.25}).items()
    shown = metrics.exposition("learner").decode()
    assert "penstock_mean_reward -0.25" in shown
    assert 'penstock_imitation_nll_nats{split="train"} 0.5' in shown


def moment(env_steps: int, evaluated: Mapping[str, float] | None = None) -> dict[str, Any]:
    none = dict.fromkeys(("mean_return", "episode_length"))
    nothing = dict.fromkeys(("episodes", "publish_s", "checkpoint_s", "log_bytes", "outstanding"), 0)
    one = dict.fromkeys(("training_seconds", "updates", "version", "publications", "budget"), 1)
    return {"evaluated": evaluated or {}, "env_steps": env_steps, **none, **nothing, **one}


def test_the_final_policy_needs_no_broker_to_be_read(tmp_path: Path) -> None:
    blob = weights.encode({"w": np.ones(3, np.float32)})
    final = FinalPolicy(specification=specification(), blob=blob, version=5, update=4)
    with pytest.raises(ValueError, match="has the run ended"):
        read_final(tmp_path)
    write_final(tmp_path, final)
    again = read_final(tmp_path)
    assert (again.blob, again.version, again.update) == (blob, 5, 4)
    assert again.specification.encode() == specification().encode()
    (tmp_path / "policies" / "final.safetensors").write_bytes(blob[:-1])
    with pytest.raises(ValueError, match="SHA-256"):
        read_final(tmp_path)
