"""A ring of six symbols, a network that knows nothing of it, and batches of its thoughts."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from penstock.config.sections import PolicySection
from penstock.learner.batch import Batch, assemble
from penstock.protocol.fragment import FragmentHeader, Slot, WeightSpan, build, check
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.workloads.language.conversation import Column, SampledTurn, column_tensors
from penstock.workloads.language.policy import LanguagePolicy
from penstock.workloads.thoughts.environment import Layout, ThoughtReinforceSection
from penstock.workloads.thoughts.model import ThinkingModel
from penstock.workloads.thoughts.model import build as build_policy
from penstock.workloads.thoughts.reinforce import ThoughtReinforce
from penstock.workloads.thoughts.start import build_transformer, save_transformer
from penstock.workloads.thoughts.tasks import Rings, draw_mixed

TASK: Final = Rings(6, 3)
LAYOUT: Final = Layout(TASK)
TOKENS: Final = 4
RUN: Final = "run"
QUIET: Final[dict[str, Any]] = {"validate_every": 0, "validation_questions": 32}


def small_base(folder: Path, seed: int = 0) -> Path:
    save_transformer(build_transformer(LAYOUT, seed=seed, hidden=16, layers=1), LAYOUT, folder)
    return folder


def thinking_policy(base: Path, *, has_reference: bool = False, mixing: int = 0) -> LanguagePolicy:
    """All of whose weights are trained. mixing: width of its mixing head; 0: it has none."""
    space = Discrete(LAYOUT.vocabulary)
    section = PolicySection(kwargs={"model": str(base), "lora": False, "mixing": mixing})
    return build_policy(space, space, section, 0, has_reference=has_reference)


def reinforce(
    base: Path, *, mixing: int = 0, total_updates: int | None = None, **section: Any
) -> ThoughtReinforce:
    """The algorithm over a policy of the base; without validations unless the section says otherwise."""
    settings = ThoughtReinforceSection(**(QUIET | section))
    policy = thinking_policy(base, has_reference=settings.kl_coefficient > 0.0, mixing=mixing)
    return ThoughtReinforce(
        policy, settings, task=TASK, layout=LAYOUT, thought_tokens=TOKENS, total_updates=total_updates, seed=0
    )


def thought_columns(policy: LanguagePolicy, questions: int, group: int, seed: int = 0) -> list[Column]:
    """Thoughts of a policy, laid out as an actor does."""
    model = ThinkingModel(policy.network, LAYOUT)
    model.seed(seed)
    drawn = draw_mixed(TASK, np.random.default_rng(seed), questions)
    examples = [one for one in drawn for _ in range(group)]
    asked, answers = model.questions(examples), model.answers(examples)
    sampled = model.sample(asked, TOKENS)
    assert sampled is not None
    gain = (
        model.answered(asked, [one for one, _ in sampled], answers).log_prob
        - model.answered(asked, None, answers).log_prob
    )
    return [
        Column(
            ids=LAYOUT.thinking(question, thought, answer),
            turns=(
                SampledTurn(
                    start=len(question) + 1, log_prob=log_prob, version=1, update=0, reward=float(reward)
                ),
            ),
            terminated=thought[-1] == LAYOUT.end,
        )
        for question, answer, (thought, log_prob), reward in zip(asked, answers, sampled, gain, strict=True)
    ]


def thought_batch(*fragments: list[Column]) -> Batch:
    space = Discrete(LAYOUT.vocabulary)
    schema = fragment_schema(space, space)
    built = []
    for columns in fragments:
        tensors = column_tensors(columns, LAYOUT.pad)
        steps = len(tensors["reward"])
        header = FragmentHeader(
            run=RUN,
            session=1,
            sequence=1,
            schema_id=schema.schema_id,
            steps=steps,
            slots=tuple(Slot(index, 0, 0) for index in range(len(columns))),
            weights=(WeightSpan(0, 0, steps, 1, 0),),
            tensors=(),
        )
        one = build(header, tensors)
        check(one, schema, RUN)
        built.append((one.header, one.arrays()))
    entries = [(number, 1) for number in range(1, len(built) + 1)]
    return assemble(built, torch.device("cpu"), entries)
