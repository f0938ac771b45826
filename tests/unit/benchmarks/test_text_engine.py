"""The bench of served text asks as it says: all requests are answered in full, at any number of streams."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

from benchmarks import language_update, text_engine
from penstock.policy import weights
from workloads.language.engine.continuous_engine import ContinuousEngine
from workloads.language.engine.loaded_adapters import LoadedAdapters
from workloads.language.engine.requests import Growing
from workloads.language.policy.language_policy import LanguagePolicy
from workloads.language.policy.policy_section import LanguageSection

SHAPE = language_update.Shape(layers=1, width=32, vocabulary=40, responses=6)


@pytest.mark.parametrize(("streams", "versions"), [(1, 1), (3, 2)])
def test_every_request_is_answered_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: int, versions: int
) -> None:
    """And never more of them at a time than there are streams."""
    torch.manual_seed(0)
    GPT2LMHeadModel(language_update._config(SHAPE)).save_pretrained(tmp_path)
    policy = LanguagePolicy(LanguageSection(model=str(tmp_path), rank=4), seed=0)
    blob = weights.encode(policy.published)
    engine = ContinuousEngine(LoadedAdapters(policy), eos_id=-1, pad_id=0)
    for version in range(1, versions + 1):
        engine.load(version, blob)
    made, most, submit = list[Growing](), 0, engine.submit

    def watched(*arguments: object) -> Growing:
        nonlocal most
        made.append(submit(*arguments))  # type: ignore[arg-type]
        most = max(most, sum(not one.finish for one in made))
        return made[-1]

    monkeypatch.setattr(engine, "submit", watched)
    prompts = torch.randint(3, SHAPE.vocabulary, (5, language_update.PROMPT)).tolist()
    way = text_engine.measured(engine, prompts, streams, versions=versions)
    assert [len(one.ids) for one in made] == [language_update.RESPONSE] * 5
    assert {one.request.version for one in made} == {*range(1, versions + 1)}
    assert most == streams
    assert way.tokens_per_s > 0
    assert way.first_ms > 0
