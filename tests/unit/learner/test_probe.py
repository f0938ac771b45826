"""The probe finds out who serves other weights than it names."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.broker.log.replies import ProbeAnswer
from penstock.config.settings import PolicySection
from penstock.learner.probe import ROWS, Quarantine, make_probe
from penstock.policy import weights
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, leaves

FAR = np.array([4.8, np.inf, 3.4e38], np.float32)
OBSERVATION = Box(-FAR, FAR)
ACTION = Discrete(2)


def policy(seed: int = 0) -> Policy:
    """A small one."""
    return build(OBSERVATION, ACTION, PolicySection(hidden_sizes=(8,)), seed)


@pytest.mark.parametrize(
    "space",
    [
        OBSERVATION,
        Box(np.zeros((8, 8, 3), np.uint8), np.full((8, 8, 3), 255, np.uint8)),
        Dict((("a", Discrete(3, start=2)), ("b", MultiDiscrete((2, 5))), ("c", MultiBinary(4)))),
    ],
)
def test_questions_lie_within_the_space_and_are_the_same_for_a_seed(space: Space) -> None:
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


def test_a_right_answer_passes_and_a_wrong_one_is_held_until_it_is_right() -> None:
    served, other = policy(0), policy(1)
    probe = make_probe(OBSERVATION, served, 0)
    quarantine = Quarantine(probe, policy(0), 1e-3)
    quarantine.expect(7, "digest", weights.snapshot(served))
    right = tuple(map(float, served.log_prob(probe.observation, probe.action)))
    wrong = tuple(map(float, other.log_prob(probe.observation, probe.action)))

    def answered(log_prob: tuple[float, ...], sha256: str = "digest", version: int = 7) -> bool:
        quarantine.check(
            [ProbeAnswer(session=3, actor_id="a", version=version, sha256=sha256, log_prob=log_prob)]
        )
        return quarantine.holds(3)

    assert not answered(right)
    assert answered(wrong)
    assert answered(wrong, version=99)
    assert not answered(right)
    assert answered(right, sha256="other")
    assert not answered(right)
    assert answered((float("nan"),) * ROWS)
    assert not answered(right)
    assert answered(right[:-1])
    assert not quarantine.holds(4)


def test_an_update_smaller_than_the_tolerance_that_did_not_arrive_is_found() -> None:
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

    def held(session: int, version: int, log_prob: NDArray[np.float64]) -> bool:
        answer = ProbeAnswer(
            session=session, actor_id="a", version=version, sha256="digest", log_prob=tuple(log_prob.tolist())
        )
        quarantine.check([answer])
        return quarantine.holds(session)

    assert not held(5, 1, right[1])
    assert held(5, 2, right[1])
    assert held(5, 2, right[1])
    assert not held(5, 3, right[3])
    assert not held(5, 2, right[2] + np.abs(right[1] - right[2]).max() / 2)


def test_a_large_answer_may_be_off_by_its_rounding() -> None:
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

    def answered(log_prob: NDArray[np.float32]) -> bool:
        answer = ProbeAnswer(
            session=3, actor_id="a", version=7, sha256="digest", log_prob=tuple(map(float, log_prob))
        )
        quarantine.check([answer])
        return quarantine.holds(3)

    assert not answered(right)
    assert not answered(np.nextafter(right, np.float32(0)))
    assert answered(right * np.float32(1.01))


@pytest.mark.parametrize(
    "section", [{"recurrent": "lstm"}, {"recurrent": "gru"}, {"frame_stack": 3}], ids=str
)
def test_a_policy_that_remembers_is_asked_in_the_middle_of_an_episode(section: dict[str, Any]) -> None:
    made = PolicySection(hidden_sizes=(8,), recurrent_size=4, **section)
    served, replica = (build(OBSERVATION, ACTION, made, seed) for seed in (0, 1))
    probe = make_probe(OBSERVATION, served, 0)
    quarantine = Quarantine(probe, replica, 1e-3)
    quarantine.expect(7, "digest", weights.snapshot(served))

    def answered() -> bool:
        log_prob = tuple(map(float, served.acting_log_prob(probe.observation, probe.action)))
        quarantine.check(
            [ProbeAnswer(session=3, actor_id="a", version=7, sha256="digest", log_prob=log_prob)]
        )
        return quarantine.holds(3)

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


def test_a_session_that_sent_what_cannot_be_learned_from_is_held_for_good() -> None:
    served = policy(0)
    probe = make_probe(OBSERVATION, served, 0)
    quarantine = Quarantine(probe, policy(0), 1e-3)
    quarantine.expect(7, "digest", weights.snapshot(served))
    before = quarantine.sessions
    quarantine.convict(3, "log entry 9 is invalid")
    assert quarantine.sessions != before
    right = tuple(map(float, served.log_prob(probe.observation, probe.action)))
    answer = ProbeAnswer(session=3, actor_id="a", version=7, sha256="digest", log_prob=right)
    quarantine.check([answer])
    assert quarantine.holds(3)
    assert not quarantine.holds(4)


def test_who_is_held_for_good_is_so_in_the_next_process() -> None:
    served = policy(0)
    probe = make_probe(OBSERVATION, served, 0)
    first, second = (Quarantine(probe, policy(0), 1e-3) for _ in range(2))
    first.convict(3, "log entry 9 is invalid")
    for _ in range(2):
        first.suspect(4, "log entry 10 makes updates fail")
    second.restore(json.loads(json.dumps(first.state())))
    assert second.holds(3)
    assert not second.holds(4)
    second.suspect(4, "log entry 11 makes updates fail")
    assert second.sessions == {3, 4}
