"""Environments as people write them train, lose a step where they fail, or are refused in words."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from penstock.actor.acting.masks import Masks
from penstock.actor.acting.stepper import Stepper
from penstock.actor.rollout.generator import FragmentBuilder, HeaderFields
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.protocol.messages import Publication
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import MultiBinary, leaves
from penstock.runtime.exit import Fatal
from penstock.runtime.health import on_made
from penstock.workloads.control import environment as control
from penstock.workloads.control.defaults import for_environment
from tests.support.experience import odd_environments as odd

SLOTS = 4
STEPS = 120
FAILING = (
    odd.RaisesNowAndThen, odd.NanNowAndThen, odd.InfiniteRewardNowAndThen, odd.ExitsNowAndThen,
    odd.BrokenUntilMadeAgain,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _float32_again() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def section_of(kind: type[odd.Odd], **more: Any) -> EnvironmentSection:
    mask = "action_mask" if kind in odd.MASKED else ""
    return EnvironmentSection(id=f"{odd.__name__}:{kind.__name__}-v0", mask_key=mask, count=SLOTS, **more)


def stepper_of(kind: type[odd.Odd], **more: Any) -> Stepper:
    section = section_of(kind, **more)
    observation, action = control.spaces(section)
    masks = Masks("action_mask", action, SLOTS) if section.mask_key else None
    return Stepper(control.make(section, SLOTS, 0), observation, masks)


def chosen(stepper: Stepper, seen: dict[str, Any], random: np.random.Generator) -> Any:
    """An action for each slot: the second choice where a mask is there, else any."""
    if "mask/action" in seen:
        assert seen["mask/action"][:, 1].all()
        return np.ones(SLOTS, np.int64)
    space = stepper.environment.single_action_space
    space.seed(int(random.integers(2**31)))
    return np.stack([space.sample() for _ in range(SLOTS)])


def played(stepper: Stepper) -> list[Any]:
    random = np.random.default_rng(0)
    seen, steps = stepper.reset(range(SLOTS)), []
    for _ in range(STEPS):
        steps.append(stepper.step(chosen(stepper, seen, random)))
        seen = steps[-1].observation
    stepper.close()
    return steps


@pytest.mark.parametrize("kind", odd.TRAINS, ids=lambda kind: kind.__name__)
def test_an_odd_environment_is_stepped(kind: type[odd.Odd]) -> None:
    steps = played(stepper_of(kind))
    lost = sum(int(one.lost.sum()) for one in steps if one.lost is not None)
    assert (lost > 0) == (kind in FAILING)
    for one in steps:
        assert np.isfinite(one.reward).all()
        assert all(np.isfinite(array).all() for array in one.observation.values())
        if one.lost is not None:
            assert not (one.valid & one.lost).any()
            assert one.begins[one.lost].all()
            assert not one.reward[one.lost].any()
            assert not one.truncated[one.lost].any()


@pytest.mark.parametrize("kind", [odd.RaisesNowAndThen, odd.InfosOfEveryKind, odd.MaskAsList])
def test_environments_in_processes_are_stepped_alike(kind: type[odd.Odd]) -> None:
    steps = played(stepper_of(kind, vectorise="async"))
    assert any(one.lost is not None for one in steps) == (kind in FAILING)
    assert {int(one.truncated.sum()) for one in steps} != {0}


def test_the_end_of_an_environments_process_is_named() -> None:
    stepper = stepper_of(odd.LeavesItsProcess, vectorise="async")
    stepper.reset(range(SLOTS))
    with pytest.raises(Fatal, match=r"LeavesItsProcess.*: step: .*exit code 7.*vectorise='sync'"):
        stepper.step(np.ones(SLOTS, np.int64))
    stepper.close()


@pytest.mark.parametrize("kind", odd.REFUSED, ids=lambda kind: kind.__name__)
def test_what_breaks_the_rules_is_refused_by_environment_method_and_value(kind: type[odd.Odd]) -> None:
    error = Fatal if kind is odd.AlwaysRaises else ConfigurationError
    with pytest.raises(error, match=f"environment.id='.*:{kind.__name__}-v0': {odd.REFUSED[kind]}"):
        played(stepper_of(kind))


def test_a_form_that_is_refused_in_a_process_of_its_own_is_so_here() -> None:
    with pytest.raises(ConfigurationError, match=odd.REFUSED[odd.OtherShapeLater]):
        played(stepper_of(odd.OtherShapeLater, vectorise="async"))


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_error_of_this_package_passes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigurationError("environment.kwargs.executor: not here")

    monkeypatch.setattr(odd.Odd, method, refuse)
    with pytest.raises(ConfigurationError, match="not here"):
        played(stepper_of(odd.SameArrayAgain))


def widened(action: Any) -> Any:
    """The action as policies store it: int64 and float32, whatever the space has."""
    if isinstance(action, dict):
        return {key: widened(part) for key, part in action.items()}
    if isinstance(action, tuple):
        return tuple(map(widened, action))
    return action.astype(np.int64 if action.dtype.kind in "iub" else np.float32)


@pytest.mark.parametrize("which", range(len(odd.STRICT)), ids=lambda which: str(odd.STRICT[which]))
def test_an_action_has_the_dtype_of_its_space(which: int) -> None:
    stepper = stepper_of(odd.StrictAboutActions, kwargs={"which": which})
    stepper.reset(range(SLOTS))
    for _ in range(3):
        stepped = stepper.step(widened(stepper.environment.action_space.sample()))
        assert stepped.lost is None
        assert stepped.reward.tolist() == [1.0] * SLOTS
    stepper.close()


class OnlyAVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Without a form of its own for one environment. Its episodes end without their last observation."""

    def __init__(self, num_envs: int) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros((self.num_envs, 2), np.float32), {}

    def step(self, actions: Any) -> Any:
        ends, none = np.ones(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        return np.zeros((self.num_envs, 2), np.float32), np.ones(self.num_envs), ends, none, {}


gymnasium.register("OnlyAVector-v0", vector_entry_point=f"{__name__}:OnlyAVector")


@pytest.mark.parametrize("evaluation", [False, True])
def test_an_environment_that_is_a_vector_alone_is_made_and_held_to_its_form(*, evaluation: bool) -> None:
    section = EnvironmentSection(id=f"{__name__}:OnlyAVector-v0", count=SLOTS)
    section = section.for_evaluation() if evaluation else section
    stepper = Stepper(control.make(section, SLOTS, 0), control.spaces(section)[0])
    stepper.reset([0])
    with pytest.raises(ConfigurationError, match=r"without infos\['final_obs'\].*vectorise='sync'"):
        stepper.step(np.zeros(SLOTS, np.int64))
    limited = section.model_copy(update={"max_episode_steps": 3})
    with pytest.raises(ConfigurationError, match=r"environment.max_episode_steps=3: .*max_episode_steps"):
        control.make(limited, SLOTS, 0)


def test_a_space_of_several_lines_is_refused_in_one() -> None:
    space = gymnasium.spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]))
    with pytest.raises(ConfigurationError, match=r"^action_space=MultiDiscrete\(\[\[2 3\] \[4 5\]\]\)"):
        control.to_space("action_space", space)


def test_an_episode_with_a_failed_step_is_dropped_and_the_next_is_counted_from_zero() -> None:
    stepper = stepper_of(odd.RaisesNowAndThen)
    observation, action = control.spaces(section_of(odd.RaisesNowAndThen))
    schema = fragment_schema(observation, action, ())
    builder = FragmentBuilder(schema, STEPS, SLOTS)
    builder.start(stepper.reset(range(SLOTS)))
    ones, zeros = np.ones(SLOTS, np.int64), np.zeros(SLOTS, np.float32)
    lost = 0
    for _ in range(STEPS):
        stepped = stepper.step(ones)
        builder.record({"action": ones}, zeros, stepped)
        lost += 0 if stepped.lost is None else int(stepped.lost.sum())
    fields = HeaderFields(run="r", session=1, sequence=1, weights=Publication(version=1), round=0)
    fragment, episodes = builder.cut(fields)
    arrays = fragment.arrays()
    assert lost > 1
    assert int((~arrays["valid"].astype(bool)).sum()) == lost
    # Whatever a failure has cut is in no episode: each is whole, and pays 1 a step.
    assert {(one.episode_return, one.length) for one in episodes} == {(odd.STEPS, odd.STEPS)}
    assert len(episodes) == len(arrays["final/slot"])


def test_each_environment_that_is_made_is_progress() -> None:
    made: list[int] = []
    with on_made(partial(made.append, 1)):
        stepper_of(odd.Heavy).close()
    assert len(made) == SLOTS + 1  # one is made for its spaces
    stepper_of(odd.Heavy).close()
    assert len(made) == SLOTS + 1


def test_bits_of_one_axis_are_taken_in_either_form() -> None:
    observation, _ = control.spaces(section_of(odd.TupleOfBoth))
    assert MultiBinary(4) in [leaf for _, leaf in leaves(observation)]
    with pytest.raises(ConfigurationError, match=r"MultiBinary of one axis \(such as MultiBinary\(6\)\)"):
        control.to_space("action_space", gymnasium.spaces.MultiBinary((2, 3)))


def test_a_fork_of_an_actor_is_ended_by_a_signal_and_its_parent_is_not() -> None:
    script = """
        import multiprocessing, signal
        from penstock.runtime.lifecycle import Lifecycle
        lifecycle = Lifecycle("actor")
        lifecycle.install()
        for _ in range(40):
            child = multiprocessing.get_context("fork").Process(target=signal.pause)
            child.start()
            child.terminate()
            child.join(10)
            assert child.exitcode == -signal.SIGTERM, child.exitcode
        assert not lifecycle.draining.wait(0.2), lifecycle.reason
        signal.raise_signal(signal.SIGTERM)
        assert lifecycle.draining.wait(10)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


@pytest.mark.parametrize(
    ("environment_id", "known"),
    [
        ("Pendulum-v1", True),
        ("gymnasium:Pendulum-v1", False),
        ("mine:Pendulum-v0", False),
        ("mine:Pendulum-v1", False),
        ("mine/Pendulum-v1", False),
        ("Pendulum-v7", False),
        ("Catch-v0", True),
        ("penstock.workloads.control.tasks:Catch-v0", True),
        ("mine:Catch-v0", False),
        ("mine:ALE/Pong-v5", False),
        ("ALE/Pong-v5", True),
        ("CarRacing-v3", True),
    ],
)
def test_only_known_environments_have_settings_of_their_own(environment_id: str, known: bool) -> None:
    for algorithm in ("ppo", "random"):
        assert (for_environment(environment_id, algorithm) != for_environment("", algorithm)) == known
