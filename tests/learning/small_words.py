"""The small form of learning which words earn.

Prompts, generation, rewards, fragments and learner in one process.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.actor import specification as actor_run
from penstock.actor.rollout.generator import HeaderFields
from penstock.config.settings import Settings, load
from penstock.learner.batch import assemble, check_meaning
from penstock.learner.model import make_model
from penstock.policy.weights import encode
from penstock.protocol.fragment import check
from penstock.protocol.messages import Publication
from penstock.workloads.language.conversation import ColumnFragments
from penstock.workloads.rlhf.environment import for_environment
from penstock.workloads.rlhf.responses import Equipment, columns_of, in_random_order
from penstock.workloads.rlhf.sentiment import Sentiment

TRUE = "penstock.workloads.rlhf.sentiment:true_rewards"
PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """Means over the responses of one update. kl: to the policy that it began with, nats."""

    reward: float
    kl: float


def settings_of(
    base: Path, folder: Path, seed: int, asked: Sequence[str] = (), reward: str = TRUE, **algorithm: Any
) -> Settings:
    """Of a run that learns from a reward, by default the true one of sentiment with prompts of that task."""
    rng, file = np.random.default_rng(seed), folder / "prompts.jsonl"
    prompts = asked or [Sentiment().prompt(rng) for _ in range(PROMPTS)]
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    places = {"model": str(base), "prompts": str(file), "reward": reward}
    said = {
        "run": "small-form",
        "workload": "rlhf",
        "seed": seed,
        "environment": {"id": "words", "count": 128, "kwargs": {**places, "response_tokens": 12}},
        "policy": {"kwargs": {"model": str(base), "rank": 8, "alpha": 16.0}},
        "actor": {"unroll_length": 15, "places": places},
        "algorithm": {"name": "token_ppo", "batch_steps": 1024, **algorithm},
    }
    return load([for_environment("words", "token_ppo"), said])


class Learned(NamedTuple):
    """What each update found, and the weights that the last one left, as they are published."""

    batches: list[Batch]
    weights: bytes


def learned(settings: Settings, updates: int) -> Learned:
    """Experience that never lags, and so many updates with it."""
    torch.set_num_threads(1)
    model = make_model(settings)
    of = actor_run.read(model.specification, settings.actor)
    equipment = Equipment(of)
    section, algorithm, slots = equipment.section, model.algorithm, of.environment.count
    scorer = equipment.scorer(section.reward, settings, standardise=False)
    fragments = ColumnFragments(model.specification.schema, slots, equipment.tokenizer.pad_token_id)
    order = in_random_order(equipment.prompts.train, settings.seed)
    equipment.backend.seed(settings.seed)
    found = []
    for update in range(updates):
        equipment.local.policy.load(encode(algorithm.published_modules()["default"]))
        asked = [next(order) for _ in range(slots)]
        generated = equipment.backend.generate([one.ids for one in asked], section.response_tokens)
        responses = [generated.response(row) for row in range(len(asked))]
        rewards = scorer.score(asked, responses, lambda: False)
        assert rewards is not None
        weights = Publication(version=update + 1, update=update)
        fields = HeaderFields(run=settings.run, session=1, sequence=update + 1, weights=weights, round=0)
        columns, attributes = columns_of(asked, generated, rewards.values, rewards.by, weights)
        fragment, episodes = fragments.cut(columns, fields, attributes)
        check(fragment, model.specification.schema, settings.run)
        check_meaning(fragment.header, fragment.arrays())
        assert algorithm.makes_batch(1, fragment.header.charge)
        batch = assemble([(fragment.header, fragment.arrays())], model.device)
        made = algorithm.update(batch, progress=update / updates)
        assert made.applied, made.reason
        reward = float(np.mean([one.episode_return for one in episodes]))
        found.append(Batch(reward, made.metrics["kl_reference"]))
    scorer.close()
    return Learned(found, encode(algorithm.published_modules()["default"]))
