import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tomli_w
import torch
from torch import nn

from penstock.policy import weights
from penstock.policy.tokens import TokenRows
from penstock.protocol.fragment import Fragment
from penstock.protocol.specification import Probe
from penstock.training import lay_over
from penstock.workloads.language.reward.reward_source import Sample
from penstock.workloads.rlhf.sentiment import NEUTRAL
from tests.support.language.tiny_models import make_base, make_reward_model, move
from tests.support.run.actor_run import Plan, ScriptedLearner
from tests.support.run.harness import BrokerProcess, eventually, launch

# ---- The learner's side of a run of language models, one call at a time, and what it makes of a
# fragment.


UNROLL: Final = 12
PATIENCE_S: Final = 120.0


def words_run(folder: Path, base: Path, prompts: Path, reward: object, **over: Any) -> dict[str, Any]:
    """The configuration of a small run of language models in this folder, with `over` laid over it."""
    kwargs = {"model": str(base), "prompts": str(prompts), "reward": str(reward), "response_tokens": 8}
    said: dict[str, Any] = {
        "workload": "rlhf",
        "run": "words",
        "environment": {"id": "words", "count": 4, "kwargs": kwargs},
        "policy": {"kwargs": {"rank": 4}},
        "actor": {"unroll_length": UNROLL, "ack_journal": str(folder / "run" / "journals")},
        "algorithm": {"batch_steps": 192, "learning_rate": 2e-3},
        "evaluation": {"episodes": 8},
    }
    lay_over(said, over)
    return said


def words_file(folder: Path, base: Path, prompts: Path, reward: object, **over: Any) -> str:
    """The same as a file, for `penstock train`."""
    file = folder / "words.toml"
    file.write_text(tomli_w.dumps(words_run(folder, base, prompts, reward, **over)))
    return str(file)


class ScriptedLanguageLearner(ScriptedLearner):
    """Every publication is another adapter."""

    def __init__(self, redis_url: str, base: Path, *, evaluates_base: bool = False, **kwargs: Any) -> None:
        """kwargs: of the environment.

        The places that its specification names are those of another machine.
        """
        told = {"model": str(base), "prompts": "/theirs", "reward": "theirs:function", "response_tokens": 8}
        plan = Plan(
            workload="rlhf",
            unroll=UNROLL,
            environment={"id": "words", "count": 8, "kwargs": told | kwargs},
            policy={"kwargs": {"model": str(base), "rank": 4}},
            evaluation={"episodes": 6, "both": True, "base": evaluates_base},
        )
        super().__init__(redis_url, plan)

    def base_policy(self) -> Any:
        """The policy that training begins with: a new adapter does nothing."""
        return super().build(0)

    def build(self, seed: int) -> Any:
        """A policy whose adapter does something."""
        policy = self.base_policy()
        move(policy.trained().values(), seed)
        return policy

    def _make_probe(self) -> Probe:
        rows = np.random.default_rng(0).integers(4, 30, (2, 6))
        return Probe({"observation": rows[:, :-1]}, {"action": rows[:, 1:]})


def log_probs(learner: ScriptedLanguageLearner, fragment: Fragment) -> Any:
    """What the learner's side finds for the tokens that were drawn, under the version in the header: [n]."""
    arrays: dict[str, Any] = fragment.arrays()
    rows = torch.from_numpy(arrays["observation"][:-1].T.copy())
    valid = torch.from_numpy(arrays["valid"].T.copy())
    last = valid.long().cumsum(1).argmax(1)
    present = torch.arange(rows.shape[1]) <= last[:, None]
    place = valid.flatten().nonzero()[:, 0]
    action = torch.from_numpy(arrays["action"].T.copy()).flatten()[place]
    policy: Any = learner.policies[fragment.header.oldest_version]
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


# ---- What a run of language models needs: a model, a reward model, prompts, a broker, the learner's
# side.


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny language model."""
    return make_base(tmp_path_factory.mktemp("language") / "base", steps=5)


@pytest.fixture(scope="session")
def reward(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model on it."""
    folder = tmp_path_factory.mktemp("language") / "reward"
    make_reward_model(base, folder)
    return folder


@pytest.fixture(scope="session")
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
def begin(redis_url: str, base: Path) -> Iterator[Callable[..., ScriptedLanguageLearner]]:
    """Opens a run and publishes its first adapter."""
    learners: list[ScriptedLanguageLearner] = []

    def make(**kwargs: Any) -> ScriptedLanguageLearner:
        learner = ScriptedLanguageLearner(redis_url, base, **kwargs)
        learners.append(learner)
        learner.publish()
        return learner

    yield make
    for learner in learners:
        learner.log.close()


# ---- Adapters that do not become what was published: they never arrive, arrive late or arrive broken.


WRONG: Final = ("never", "late", "corrupted")


class Fault:
    """What becomes of weights between their digest and the policy, in the actor that was first to apply any.

    way: applied, or one of `WRONG`. The actor goes on to say that it has the version it was sent.
    """

    def __init__(self) -> None:
        self.way = "applied"
        self._victim: nn.Module | None = None
        self._before = b""

    def __call__(self, module: nn.Module, blob: bytes) -> None:
        """In place of the policy's `load`."""
        self._victim = self._victim or module
        way = self.way if module is self._victim else "applied"
        if way != "never":
            weights.load_into(module, {"late": self._before, "corrupted": _broken(blob)}.get(way, blob))
        if module is self._victim:
            self._before = blob

    @property
    def has_victim(self) -> bool:
        """Whether an actor has applied anything."""
        return self._victim is not None


def _broken(blob: bytes) -> bytes:
    """One of the tensors is zero, as if its pages had not been written."""
    arrays = weights.decode(blob)
    name = next(name for name in sorted(arrays) if "lora_B" in name)
    return weights.encode({**arrays, name: np.zeros_like(arrays[name])})
