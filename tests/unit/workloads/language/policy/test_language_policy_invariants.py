"""What must hold of a language model and its learner, exactly: real models, real fragments, small."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.gradient import PLAIN, Hardware
from penstock.learner.algorithms.responses import read_responses
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.batch import Batch
from penstock.policy import weights
from penstock.protocol.fragment import Fragment
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection
from tests.support.experience.fragment_messages import from_proto, to_proto
from tests.support.experience.token_experience import Response, batch_of, fragment, sample

PROMPTS = ((1, 20, 21), (1, 25))


def policy_of(base: Path, **kwargs: Any) -> LanguagePolicy:
    """A new adapter on the tiny model."""
    return LanguagePolicy(LanguageSection(model=str(base), rank=4, alpha=8.0, **kwargs), seed=0)


def moved(policy: LanguagePolicy) -> LanguagePolicy:
    """Away from its reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trained().values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def algorithm_of(policy: LanguagePolicy, hardware: Hardware = PLAIN, **section: Any) -> TokenPPO:
    """One gradient step on everything, unless it is said otherwise."""
    usual: dict[str, Any] = {"epochs": 1, "minibatches": 1, "learning_rate": 1e-3}
    return TokenPPO(policy, TokenPPOSection(**(usual | section)), seed=0, hardware=hardware)


def written_by(policy: LanguagePolicy, round_: int = 0) -> list[Response]:
    """Four responses to each prompt, of up to five tokens; scored −1, 0, 1, … in turn."""
    made = [
        one
        for index, prompt in enumerate(PROMPTS)
        for one in sample(policy, prompt, 4, 5, 10 * round_ + index, vocabulary=policy.vocabulary)
    ]
    scores = (-1.0, 0.0, 1.0)
    return [
        Response(one.prompt, one.tokens, one.log_prob, scores[index % 3], one.finished)
        for index, one in enumerate(made)
    ]


def flat(policy: LanguagePolicy) -> Tensor:
    """All that is trained."""
    return torch.cat(
        [one.detach().flatten() for one in (*policy.trained().values(), *policy.critic.parameters())]
    )


def test_a_fresh_adapter_has_no_divergence_and_ratio_one(base: Path) -> None:
    policy, actor = policy_of(base), policy_of(base)
    algorithm = algorithm_of(policy)
    weights.load_into(actor, weights.encode(algorithm.published_modules()["default"]))
    told = algorithm.update(
        batch_of(fragment(written_by(actor), vocabulary=policy.vocabulary)), progress=0.0
    ).metrics
    assert told["kl_reference"] == 0.0
    assert told["max_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert told["clip_fraction"] == 0.0
    assert told["score"] == pytest.approx(np.mean([-1, 0, 1, -1, 0, 1, -1, 0]))


def test_actor_and_learner_agree_on_what_was_sampled(base: Path) -> None:
    policy, actor = policy_of(base), policy_of(base)
    algorithm = algorithm_of(policy)
    algorithm.update(batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary)), progress=0.0)
    weights.load_into(actor, weights.encode(algorithm.published_modules()["default"]))
    responses = read_responses(batch_of(fragment(written_by(actor), vocabulary=policy.vocabulary)))
    assert responses is not None
    with torch.no_grad():
        for part in responses.micro_batches(np.arange(len(responses)), 10_000):
            error = (policy.outputs(part.rows).log_prob - responses.behaviour[part.index]).abs()
            assert error.max() <= 1e-5
            assert error.exp().mean() < 1.001


def through_the_wire(sent: Fragment) -> Batch:
    """Bytes as an actor sends them, checked and put together as the learner does."""
    message = to_proto(sent).SerializeToString()
    return batch_of(from_proto(type(to_proto(sent)).FromString(message)))


@pytest.mark.parametrize("lag", [0, 1])
def test_an_actor_that_never_lags_is_the_synchronous_loop(base: Path, lag: int) -> None:
    policy, learner, actor = (policy_of(base) for _ in range(3))
    alone, apart = algorithm_of(policy, minibatches=2), algorithm_of(learner, minibatches=2)
    published = [weights.encode(apart.published_modules()["default"])] * (lag + 1)
    for update in range(3):
        alone.update(
            batch_of(fragment(written_by(policy, update), vocabulary=policy.vocabulary)), progress=0.0
        )
        weights.load_into(actor, published[-1 - lag])
        sent = fragment(written_by(actor, update), vocabulary=policy.vocabulary, update=update)
        apart.update(through_the_wire(sent), progress=0.0)
        published.append(weights.encode(apart.published_modules()["default"]))
    assert torch.equal(flat(policy), flat(learner)) is (lag == 0)


def test_every_reward_arrives_as_it_was_given(base: Path) -> None:
    policy = policy_of(base)
    given = written_by(policy)
    assert {one.score for one in given} == {-1.0, 0.0, 1.0}
    responses = read_responses(through_the_wire(fragment(given, vocabulary=policy.vocabulary)))
    assert responses is not None
    assert responses.left_out == 0
    assert responses.reward[responses.last].tolist() == [one.score for one in given]
    assert responses.counts.tolist() == [len(one.tokens) for one in given]


@pytest.mark.parametrize("kwargs", [{}, {"shared_trunk": False}, {"critic": "adapter"}])
def test_micro_batches_padding_and_order_are_nothing(base: Path, kwargs: dict[str, Any]) -> None:
    given = written_by(moved(policy_of(base)))
    vocabulary = policy_of(base).vocabulary
    whole = batch_of(fragment(given, vocabulary=vocabulary))
    variants: dict[str, tuple[dict[str, Any], Batch]] = {
        "micro-batches of one": ({"micro_batch_tokens": 1}, whole),
        "other padding": ({}, batch_of(fragment(given, vocabulary=vocabulary, pad=30, steps=20))),
        "other order": ({}, batch_of(fragment(given[::-1], vocabulary=vocabulary))),
    }
    plain = policy_of(base, **kwargs)
    before = flat(plain)
    # Not Adam's first step, in which rounding decides the sign of a gradient that is next to 0.
    wanted: dict[str, Any] = {"adam_epsilon": 1.0, "learning_rate": 1.0, "critic_learning_rate": 1.0}
    told = algorithm_of(plain, **wanted).update(whole, progress=0.0).metrics
    assert (flat(plain) - before).abs().max() > 1e-3
    for name, (section, batch) in variants.items():
        other = policy_of(base, **kwargs)
        again = algorithm_of(other, **wanted, **section).update(batch, progress=0.0).metrics
        assert again == pytest.approx(told, rel=1e-4, abs=1e-5), name
        assert (flat(plain) - flat(other)).abs().max() <= 1e-6, name


def test_all_weights_can_be_trained(base: Path) -> None:
    policy = policy_of(base, lora=False)
    algorithm = algorithm_of(policy, epochs=2)
    batch = batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary))
    first = algorithm.update(batch, progress=0.0).metrics
    second = algorithm.update(batch, progress=0.0).metrics
    assert first["kl_reference"] == 0.0
    assert second["kl_reference"] != 0.0
    assert policy.state_dict().keys() == policy.trained().keys()
    assert sum(one.numel() for one in policy.trained().values()) == policy.network.num_parameters()


@pytest.mark.parametrize("mixed", [True, False])
def test_bfloat16_trains_an_adapter_in_float32(base: Path, mixed: bool) -> None:
    policy = policy_of(base, dtype="float32" if mixed else "bfloat16")
    assert {one.dtype for one in policy.trained().values()} == {torch.float32}
    algorithm = algorithm_of(policy, Hardware(bfloat16=mixed))
    before = flat(policy)
    update = algorithm.update(
        batch_of(fragment(written_by(policy), vocabulary=policy.vocabulary)), progress=0.0
    )
    assert update.applied
    assert not torch.equal(flat(policy), before)
    assert update.metrics["max_ratio"] == pytest.approx(1.0, abs=0.1)


def test_a_restored_learner_goes_on_bit_by_bit(base: Path) -> None:
    first, second = policy_of(base), LanguagePolicy(LanguageSection(model=str(base), rank=4, alpha=8.0), 9)
    algorithms = [algorithm_of(one, epochs=2, minibatches=2) for one in (first, second)]
    batch = batch_of(fragment(written_by(policy_of(base)), vocabulary=first.vocabulary))
    algorithms[0].update(batch, progress=0.0)
    algorithms[1].load(algorithms[0].state())
    for algorithm in algorithms:
        algorithm.update(batch, progress=0.5)
    assert torch.equal(flat(first), flat(second))
