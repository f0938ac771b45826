"""How the learner's model of a language run is made, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.broker.log.replies import ProbeAnswer
from penstock.config import settings as configuration
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.config.workload import Workload, find
from penstock.learner.algorithms.rows import RankGroup
from penstock.learner.model import Model
from penstock.policy import weights
from penstock.policy.tokens import TokenRows
from penstock.protocol.spaces import Discrete, Space
from penstock.workloads.language.language_model import make_model
from penstock.workloads.language.policy import LanguagePolicy, build
from tests.support.experience.token_experience import batch_of, fragment, sample

VOCABULARY = 36
WORDS = Workload(
    name="words",
    environment="absent:steps",
    spaces=f"{__name__}:spaces",
    policy="penstock.workloads.language.policy:build",
    defaults="absent:asks",
    target=f"{__name__}:target",
    model="penstock.workloads.language.language_model:make_model",
    generator="absent:generates",
    runner="absent:plays",
)


def spaces(section: EnvironmentSection) -> tuple[Space, Space]:
    """Of the tiny model's tokens."""
    return Discrete(VOCABULARY), Discrete(VOCABULARY)


def target(section: EnvironmentSection) -> float:
    """A score."""
    return 0.5


def made(base: Path, **sections: Any) -> Model:
    """From settings as a file would give them."""
    usual: dict[str, Any] = {
        "run": "words",
        "algorithm": {"name": "token_ppo", "batch_steps": 512},
        "policy": {"kwargs": {"model": str(base), "rank": 4}},
        "actor": {"unroll_length": 24},
    }
    settings = configuration.load([usual, sections])
    return make_model(settings, WORDS, RankGroup(), torch.device("cpu"))


def test_a_model_publishes_its_adapter(base: Path) -> None:
    model = made(base)
    module = model.algorithm.published_modules()["default"]
    assert model.weight_bytes == len(weights.encode(module)) < 100_000
    assert model.specification.schema.by_name["observation"].dtype == "int64"
    assert model.target == 0.5


def test_a_critic_with_an_adapter_is_the_learners_alone(base: Path) -> None:
    asked = {"model": str(base), "rank": 4, "critic": "adapter"}
    settings = configuration.load(
        [
            {
                "workload": "rlhf",
                "environment": {
                    "id": "words",
                    "kwargs": {
                        "model": str(base),
                        "prompts": "p",
                        "reward": "grpc://x:1",
                        "response_tokens": 8,
                    },
                },
                "policy": {"kwargs": asked},
                "algorithm": {"name": "token_ppo", "batch_steps": 512},
                "actor": {"unroll_length": 12},
            }
        ]
    )
    model = make_model(settings, find("rlhf"), RankGroup(), torch.device("cpu"))
    assert "critic" not in json.loads(model.specification.policy_json)["kwargs"]
    assert any(name.startswith("critic/adapter.") for name in model.algorithm.state().tensors)
    assert model.weight_bytes == made(base).weight_bytes
    without = {"name": "token_ppo", "batch_steps": 512, "advantage": "group"}
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs\.critic='adapter': .*advantage='group'"):
        made(base, policy={"kwargs": asked}, algorithm=without)


def test_an_adapter_that_has_not_arrived_is_found_out_by_the_probe(base: Path) -> None:
    rates = {"name": "token_ppo", "batch_steps": 512, "learning_rate": 2e-3, "critic_learning_rate": 2e-3}
    model = made(base, algorithm=rates)
    module, probe = model.algorithm.published_modules()["default"], model.specification.probe
    actor = build(Discrete(VOCABULARY), Discrete(VOCABULARY), _policy(base), 5)
    weights.load_into(actor, weights.encode(module))
    behind = actor.acting_log_prob(probe.observation, probe.action)
    written = sample(actor, (1, 20, 21), 8, 5, 0, vocabulary=VOCABULARY)
    scored = [replace(one, score=float(index % 2)) for index, one in enumerate(written)]
    model.algorithm.update(batch_of(fragment(scored, vocabulary=VOCABULARY)), progress=0.0)
    model.quarantine.expect(1, "sha", weights.snapshot(module))
    weights.load_into(actor, weights.encode(module))
    right = actor.acting_log_prob(probe.observation, probe.action)
    for answer, held in ((right, False), (behind, True), (right, False)):
        told = ProbeAnswer(
            session=3, actor_id="actor-0", version=1, sha256="sha", log_prob=tuple(answer.tolist())
        )
        model.quarantine.check([told])
        assert model.quarantine.holds(3) is held


def _policy(base: Path) -> configuration.PolicySection:
    return configuration.PolicySection(kwargs={"model": str(base), "rank": 4})


def test_a_training_begins_with_weights_that_are_named(base: Path, tmp_path: Path) -> None:
    first = made(base)
    module = first.algorithm.published_modules()["default"]
    moved = {name: np.add(array, 0.05, dtype=np.float32) for name, array in weights.snapshot(module).items()}
    file = tmp_path / "7.safetensors"
    file.write_bytes(weights.encode(moved))
    begun = made(base, policy={"kwargs": {"model": str(base), "rank": 4, "begin_with": str(file)}})
    policy = begun.algorithm.published_modules()["default"]
    assert weights.encode(policy) == file.read_bytes()
    assert isinstance(policy, LanguagePolicy)
    rows = _rows(5)
    assert torch.equal(policy.reference_log_prob(rows), _reference(first).reference_log_prob(rows))
    assert not torch.equal(policy.reference_log_prob(rows), policy.outputs(rows).log_prob)


def _reference(model: Model) -> LanguagePolicy:
    found = model.algorithm.published_modules()["default"]
    assert isinstance(found, LanguagePolicy)
    return found


def _rows(length: int) -> TokenRows:
    tokens = torch.arange(3, 3 + length).unsqueeze(0)
    return TokenRows(tokens, torch.ones_like(tokens, dtype=torch.bool), torch.arange(length), tokens[0] + 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"policy\.kwargs\.begin_with='.*absent': No such file or directory; name a file of weights"),
        (b"x", r"policy\.kwargs\.begin_with='.*other': holds no weights of this network"),
    ],
)
def test_weights_that_cannot_be_begun_with_are_refused(
    base: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / ("absent" if content is None else "other")
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        made(base, policy={"kwargs": {"model": str(base), "rank": 4, "begin_with": str(file)}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"algorithm": {"name": "ppo"}},
            r"algorithm\.name='ppo': does not learn .* writes tokens; use token_ppo",
        ),
        ({"actor": {"unroll_length": 65}}, r"actor\.unroll_length=65: .* reads 64 tokens"),
        ({"policy": {"kwargs": {"rank": 4}}}, r"policy\.kwargs\.model=: Field required"),
        ({"policy": {"kwargs": {"model": "a", "ranks": 4}}}, r"policy\.kwargs\.ranks=4: Extra inputs"),
    ],
)
def test_what_does_not_fit_together_is_refused(base: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made(base, **section)
