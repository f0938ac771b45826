"""Versions of a model whose weights are all trained, each whole in memory."""

from pathlib import Path

import pytest
import torch

from penstock.policy import weights
from penstock.workloads.language.engine import (
    OWN,
    ContinuousEngine,
    Growing,
    LoadedPolicies,
    Request,
    open_engine,
)
from penstock.workloads.language.language_model import make_probe
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection

EOS, PAD = 2, 0


def policy_of(base: Path, seed: int = 0) -> LanguagePolicy:
    """The model, moved away from it by noise of this seed; 0: as it is."""
    policy = LanguagePolicy(LanguageSection(model=str(base), lora=False), seed=0, has_reference=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trained().values():
            if seed:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def blob_of(base: Path, seed: int) -> bytes:
    """The weights of that policy."""
    return weights.encode(policy_of(base, seed).published)


@pytest.fixture
def engine(base: Path) -> ContinuousEngine:
    """With versions 1 and 2."""
    made = open_engine(OWN, policy_of(base), eos_id=EOS, pad_id=PAD, max_rows=4, seed=0)
    assert isinstance(made, ContinuousEngine)
    for version in (1, 2):
        made.load(version, blob_of(base, version))
    return made


def likeliest(engine: ContinuousEngine, version: int) -> Growing:
    """The likeliest answer of a version, whole."""
    growing = engine.submit(Request(ids=(1, 20, 21), most=8, version=version, deterministic=True))
    while not growing.finish:
        engine.step()
    return growing


def test_each_version_answers_with_its_own_weights(base: Path, engine: ContinuousEngine) -> None:
    asked = [
        engine.submit(Request(ids=(1, 20, 21), most=8, version=version, deterministic=True))
        for version in (0, 1, 2)
    ]
    while not all(one.finish for one in asked):
        engine.step()
    for version, growing in enumerate(asked):
        assert growing.ids == likeliest(engine, version).ids
        network = policy_of(base, version).network
        row = torch.tensor([[1, 20, 21, *growing.ids]])
        with torch.inference_mode():
            plain = network(input_ids=row).logits[0, 2:-1].log_softmax(-1)
        expected = plain.gather(1, row[0, 3:, None])[:, 0].tolist()
        assert growing.log_prob == pytest.approx(expected, abs=1e-4)
    assert len({tuple(one.ids) for one in asked}) == 3


def test_the_probe_is_answered_by_the_version_that_is_named(base: Path, engine: ContinuousEngine) -> None:
    probe = make_probe(policy_of(base).vocabulary, 0)
    for version in (0, 1, 2):
        expected = policy_of(base, version).acting_log_prob(probe.observation, probe.action)
        assert engine.probe_answer(version, probe) == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_version_is_dropped_and_no_other_with_it(base: Path, engine: ContinuousEngine) -> None:
    before = likeliest(engine, 2).ids
    assert engine.drop(1)
    assert engine.versions == [2]
    with pytest.raises(ValueError, match="version=1: is not loaded"):
        engine.submit(Request(ids=(1, 20), most=1, version=1))
    assert engine.drop(0)
    assert likeliest(engine, 0).ids
    assert likeliest(engine, 2).ids == before
    engine.load(1, blob_of(base, 1))
    assert engine.versions == [1, 2]


def test_weights_of_another_policy_are_refused_and_nothing_is_held(base: Path) -> None:
    loaded = LoadedPolicies(policy_of(base))
    adapter = LanguagePolicy(LanguageSection(model=str(base), rank=2), seed=0)
    with pytest.raises(ValueError, match="on one side only|unexpected|missing"):
        loaded.load(1, weights.encode(adapter.published))
    with pytest.raises(ValueError, match="version=0: versions are numbered from 1"):
        loaded.load(0, blob_of(base, 1))
    assert not loaded.versions
    with pytest.raises(ValueError, match="version=7: is not loaded"), loaded.using(7):
        pass
