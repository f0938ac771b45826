"""A rollout worker and an evaluation actor of language models in a real run: broker, Redis, reward service, adapters."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from broker.state import ProbeAnswer
from penstock.policy.tokens import TokenRows
from penstock.policy.weights import encode
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.settings import ConfigurationError
from penstock.wire.fragment import Fragment
from penstock.wire.messages import Role
from penstock.wire.specification import Probe
from tests.integration.actor_run import ActorThread, Course, Plan, actors
from tests.integration.broker_process import BrokerProcess, eventually, launch
from tests.integration.reward_process import serving
from tests.tiny_reward import make_base, make_reward_model
from workloads.rlhf.reward.model import RewardModel
from workloads.rlhf.reward.source import Sample
from workloads.rlhf.sentiment import NEUTRAL
from workloads.rlhf.tokens import load_tokenizer

UNROLL: Final = 12
PATIENCE_S: Final = 120.0


class LanguageCourse(Course):
    """The learner's side; every publication is another adapter."""

    def build(self, seed: int) -> Any:
        """A policy whose adapter does something."""
        policy: Any = super().build(0)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.trained().values():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return policy

    def _make_probe(self) -> Probe:
        rows = np.random.default_rng(0).integers(4, 30, (2, 6))
        return Probe({"observation": rows[:, :-1]}, {"action": rows[:, 1:]})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model."""
    return make_base(tmp_path_factory.mktemp("language") / "base", steps=5)


@pytest.fixture(scope="module")
def reward(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model on it."""
    folder = tmp_path_factory.mktemp("language") / "reward"
    make_reward_model(base, folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one and of two words."""
    file = tmp_path_factory.mktemp("language") / "prompts.jsonl"
    words = [*NEUTRAL, *(f"{first} {second}" for first in NEUTRAL[:4] for second in NEUTRAL[:4])]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in words))
    return file


@pytest.fixture
def broker(redis_url: str, tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that is ready."""
    process = launch(redis_url, tmp_path)
    eventually(process.is_ready, "readiness of the broker")
    yield process
    process.end()


@pytest.fixture
def begin(redis_url: str, base: Path) -> Iterator[Callable[..., LanguageCourse]]:
    """Opens a run; the places that its specification names are those of another machine."""
    courses: list[LanguageCourse] = []

    def make(**kwargs: Any) -> LanguageCourse:
        told = {"model": str(base), "prompts": "/theirs", "reward": "theirs:function", "response_tokens": 8}
        plan = Plan(
            workload="rlhf",
            unroll=UNROLL,
            environment={"id": "words", "count": 8, "kwargs": told | kwargs},
            policy={"kwargs": {"model": str(base), "rank": 4}},
            evaluation={"episodes": 6, "both": True},
        )
        course = LanguageCourse(redis_url, plan)
        courses.append(course)
        course.publish()
        return course

    yield make
    for course in courses:
        course.log.close()


def log_probs(course: LanguageCourse, fragment: Fragment) -> Any:
    """What the learner's side finds for the tokens that were drawn, under the version in the header: [n]."""
    arrays: dict[str, Any] = fragment.arrays()
    rows = torch.from_numpy(arrays["observation"][:-1].T.copy())
    valid = torch.from_numpy(arrays["valid"].T.copy())
    last = valid.long().cumsum(1).argmax(1)
    present = torch.arange(rows.shape[1]) <= last[:, None]
    place = valid.flatten().nonzero()[:, 0]
    action = torch.from_numpy(arrays["action"].T.copy()).flatten()[place]
    policy: Any = course.policies[fragment.header.oldest_version]
    with torch.no_grad():
        return policy.outputs(TokenRows(rows, present, place, action)).log_prob.numpy()


def responses(fragment: Fragment, base: Path) -> list[Sample]:
    """Prompt and response of each column, as token ids."""
    arrays: dict[str, Any] = fragment.arrays()
    found = []
    for slot in range(arrays["valid"].shape[1]):
        drawn = arrays["valid"][:, slot].nonzero()[0]
        ids = arrays["observation"][:, slot].tolist()
        first, last = int(drawn[0]), int(drawn[-1])
        found.append(
            Sample(prompt_ids=tuple(ids[: first + 1]), response_ids=tuple(ids[first + 1 : last + 2]))
        )
    return found


def test_fragments_are_what_the_adapters_wrote_and_the_service_said(
    broker: BrokerProcess,
    begin: Callable[..., LanguageCourse],
    base: Path,
    reward: Path,
    prompts: Path,
    tmp_path: Path,
) -> None:
    """Log-probabilities to 1e-5 under the version named; rewards are the model's; the reward service may die meanwhile."""
    address = f"unix:{tmp_path}/reward.sock"
    course = begin(reward_reads="tokens", group=2)
    places = {"model": str(base), "prompts": str(prompts), "reward": address}
    with serving(reward, tmp_path / "first", address) as first:
        actor = ActorThread(broker.address, "actor-0", places=places)
        with actors(actor):
            eventually(lambda: course.learn() >= 4, "four fragments", within_s=PATIENCE_S)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(PATIENCE_S)
            with serving(reward, tmp_path / "second", address):
                before = len(course.fragments)
                eventually(lambda: course.learn() >= before + 4, "four more", within_s=PATIENCE_S)
                assert actor.drain() == EXIT_OK
                course.read()
    check_fragments(course, base, reward)
    episodes = course.episodes()
    assert {episode.terminated for episode in episodes} == {True, False}
    assert len({(episode.slot_id, episode.episode_id) for episode in episodes}) == len(episodes)


def check_fragments(course: LanguageCourse, base: Path, reward: Path) -> None:
    """Of several versions, each fragment."""
    model, eos = RewardModel.load(reward), load_tokenizer(str(base)).eos_token_id
    assert len({fragment.header.oldest_version for fragment in course.fragments}) > 3
    whole = [fragment for fragment in course.fragments if fragment.arrays()["valid"].any(0).all()]
    # One may have been handed over unfinished when the worker was asked to end.
    assert len(whole) >= len(course.fragments) - 1
    for fragment in whole:
        arrays: dict[str, Any] = fragment.arrays()
        np.testing.assert_allclose(
            arrays["log_prob"].T[arrays["valid"].T], log_probs(course, fragment), atol=1e-5
        )
        asked = responses(fragment, base)
        rewards = model.score(asked).values
        np.testing.assert_allclose(arrays["reward"].sum(0), rewards, atol=1e-5)
        ends = [one.response_ids[-1] == eos for one in asked]
        np.testing.assert_array_equal(arrays["terminated"].any(0), ends)
        np.testing.assert_array_equal(arrays["truncated"].any(0), ~np.array(ends))
        assert [one.prompt_ids for one in asked[::2]] == [one.prompt_ids for one in asked[1::2]]
        said = json.loads(fragment.header.attributes)
        assert said["reward"]["sha256"] == model.by.sha256


def test_the_probe_is_answered_with_the_adapter_that_generates(
    broker: BrokerProcess, begin: Callable[..., LanguageCourse], base: Path, reward: Path, prompts: Path
) -> None:
    """After each publish, by what the learner's side gets of the same adapter."""
    course = begin()
    places = {"model": str(base), "prompts": str(prompts), "reward": str(reward)}
    answers: dict[int, ProbeAnswer] = {}

    def answered(version: int) -> bool:
        course.learn()
        answers.update((answer.version, answer) for answer in course.log.renew().probes)
        return version in answers

    with actors(ActorThread(broker.address, "actor-0", places=places)):
        for _ in range(3):
            version = course.publish().version
            eventually(
                lambda version=version: max(answers, default=0) >= version or answered(version),
                "an answer",
                within_s=PATIENCE_S,
            )
    assert len(answers) >= 3
    for version, answer in answers.items():
        expected = course.policies[version].log_prob(course.probe.observation, course.probe.action)
        np.testing.assert_allclose(answer.log_prob, expected, atol=1e-5)
        others = (policy for other, policy in course.policies.items() if other != version)
        assert not any(
            np.allclose(
                answer.log_prob,
                policy.log_prob(course.probe.observation, course.probe.action),
                atol=1e-3,
            )
            for policy in others
        )


def test_an_evaluation_measures_held_out_prompts_by_the_true_reward(
    broker: BrokerProcess, begin: Callable[..., LanguageCourse], base: Path, prompts: Path
) -> None:
    """Deterministic and sampled, the same for the same version."""
    true = "workloads.rlhf.sentiment:true_rewards"
    course = begin(true_reward=true)
    places = {"model": str(base), "prompts": str(prompts), "reward": true, "true_reward": true}
    version = course.publish().version
    again = course.log.publish(
        encode(course.policies[version]), update=1, settled=course.position, scalars={}
    )
    with actors(ActorThread(broker.address, "evaluator", Role.EVALUATION, places=places)):
        for count, asked in ((12, version), (24, again.version)):
            course.log.request_evaluation(asked)
            eventually(
                lambda count=count: course.read() == 0 and len(course.episodes(evaluation=True)) == count,
                "both results",
                within_s=PATIENCE_S,
            )
    assert [report.deterministic for report in course.reports] == [True, False, True, False]
    returns = [[episode.episode_return for episode in report.episodes] for report in course.reports]
    assert returns[:2] == returns[2:]
    assert returns[0] != returns[1]
    assert all(-1 <= value <= 1 for value in returns[1])


def test_a_place_of_the_specification_is_not_used(
    broker: BrokerProcess, begin: Callable[..., LanguageCourse], base: Path
) -> None:
    """The actor ends and says how this machine names its own."""
    begin()
    actor = ActorThread(broker.address, "actor-0", places={"model": str(base)})
    error = actor.join()
    assert isinstance(error, ConfigurationError)
    assert "environment.kwargs.prompts='/theirs': places are not taken from a run's specification" in str(
        error
    )
    assert "actor.places.prompts" in str(error)
