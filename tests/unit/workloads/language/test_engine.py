from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.config.settings import ConfigurationError, ServingSection
from penstock.policy import weights
from penstock.protocol.specification import Probe
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.workloads.language.cached_generation import only_likely
from penstock.workloads.language.engine import (
    ContinuousEngine,
    EngineTolerance,
    Growing,
    LoadedPolicies,
    Request,
    TextEngine,
    open_engine,
)
from penstock.workloads.language.language_model import make_probe
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection
from penstock.workloads.language.serving.text_answerer import AdapterVersions
from penstock.workloads.plugin.serving import Weights
from tests.support.language import text_stand
from tests.support.language.text_stand import adapter, plain_log_prob, specification
from tests.support.language.tiny_models import move

EOS, PAD = 2, 0
PROMPTS = ((1, 20, 21), (1, 22), (1, 23, 24, 25, 26, 27), (1, 27, 28), (1, 29))
MOST = 12


def policy_of(base: Path, seed: int = 0, **kwargs: Any) -> LanguagePolicy:
    section = LanguageSection(model=str(base), rank=4, alpha=8.0, **kwargs)
    policy = LanguagePolicy(section, seed=0, has_reference=False)
    move(policy.trained().values(), seed, 0.2)
    return policy


@pytest.fixture(scope="module", params=[True, False], ids=["adapters", "models"])
def lora(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def blobs(base: Path, lora: bool) -> dict[int, bytes]:
    return {version: weights.encode(policy_of(base, version, lora=lora).published) for version in (1, 2)}


def engine_of(base: Path, blobs: dict[int, bytes], eos_id: int, *, lora: bool) -> ContinuousEngine:
    policy = LanguagePolicy(LanguageSection(model=str(base), rank=4, alpha=8.0, lora=lora), seed=0)
    made = ContinuousEngine(LoadedPolicies(policy), end_ids=(eos_id,), pad_id=PAD, max_rows=4)
    for version, blob in blobs.items():
        made.load(version, blob)
    return made


@pytest.fixture
def engine(base: Path, blobs: dict[int, bytes], lora: bool) -> ContinuousEngine:
    return engine_of(base, blobs, EOS, lora=lora)


@pytest.fixture
def endless(base: Path, blobs: dict[int, bytes], lora: bool) -> ContinuousEngine:
    return engine_of(base, blobs, -1, lora=lora)


def ask(engine: ContinuousEngine, number: int, version: int, most: int = MOST, **kwargs: Any) -> Growing:
    return engine.submit(Request(ids=PROMPTS[number], most=most, version=version, seed=number, **kwargs))


def finished(engine: ContinuousEngine, *answers: Growing) -> list[tuple[list[int], str]]:
    while not all(one.finish for one in answers):
        assert engine.step()
    return [(one.ids, one.finish) for one in answers]


@pytest.mark.promise("request-language-model-joins")
def test_a_request_that_joins_a_running_batch_is_answered_as_alone(endless: ContinuousEngine) -> None:
    cases = [(number, version, MOST - number) for number, version in enumerate((1, 1, 1, 2, 1))]
    alone = [finished(endless, ask(endless, *case))[0] for case in cases]
    assert [len(ids) for ids, _ in alone] == [MOST - number for number in range(5)]
    first, second = (ask(endless, *case) for case in cases[:2])
    for _ in range(2):
        endless.step()
    third, fourth = (ask(endless, *case) for case in cases[2:4])
    endless.step()
    fifth = ask(endless, *cases[4])
    endless.step()
    assert endless.under_way == 4
    assert not fifth.ids
    assert finished(endless, first, second, third, fourth, fifth) == alone
    assert endless.under_way == 0
    assert not endless.step()


def test_an_answer_that_cannot_be_drawn_fails_alone(endless: ContinuousEngine) -> None:
    alone = finished(endless, ask(endless, 0, 1))
    broken, whole = ask(endless, 1, 1, bias={3: float("nan")}), ask(endless, 0, 1)
    finished(endless, broken, whole)
    assert (broken.finish, broken.ids) == ("failed", [])
    assert [(whole.ids, whole.finish)] == alone


def test_the_smallest_share_leaves_the_likeliest_token() -> None:
    log_probs = torch.tensor([0.2, 0.5, 0.3]).log()
    assert only_likely(log_probs, 5e-324).argmax() == 1
    assert torch.isfinite(only_likely(log_probs, 5e-324)).sum() == 1


def test_a_step_is_one_pass_for_all_rows_of_a_version(endless: ContinuousEngine) -> None:
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    with endless._loaded.using(1) as policy, policy.network.register_forward_pre_hook(count):
        finished(endless, *(ask(endless, number, 1) for number in range(4)))
    assert passes == MOST


def test_log_probabilities_are_those_of_a_plain_pass(engine: ContinuousEngine) -> None:
    answers = [ask(engine, number, 1) for number in range(2)]
    engine.step()
    answers += [ask(engine, number, 2) for number in (2, 3)]
    finished(engine, *answers)
    for one in answers:
        prompt = one.request.ids
        plain = plain_log_prob(engine, one.request.version, (*prompt, *one.ids), len(prompt))
        assert one.log_prob == pytest.approx(plain, abs=1e-5)
        other = plain_log_prob(engine, 3 - one.request.version, (*prompt, *one.ids), len(prompt))
        assert one.log_prob != pytest.approx(other, abs=1e-3)


@pytest.mark.promise("request-language-model-joins")
def test_tokens_and_log_probabilities_are_those_of_bare_generate(
    engine: ContinuousEngine, base: Path, lora: bool
) -> None:
    networks: dict[int, Any] = {0: AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()}
    networks |= {version: policy_of(base, version, lora=lora).network for version in (1, 2)}
    answers = [ask(engine, number, number % 3, deterministic=True) for number in range(4)]
    engine.step()
    answers.append(ask(engine, 4, 1, deterministic=True))
    finished(engine, *answers)
    for one in answers:
        ids = torch.tensor([one.request.ids])
        plain = networks[one.request.version].generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MOST,
            pad_token_id=PAD,
            eos_token_id=EOS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        expected = plain.sequences[0, ids.shape[1] :].tolist()
        logits = torch.cat(plain.logits).float().log_softmax(-1)
        chosen = [float(row[token]) for row, token in zip(logits, expected, strict=True)]
        assert one.ids == expected
        assert one.log_prob == pytest.approx(chosen, abs=1e-4)


@pytest.mark.promise("request-language-model-joins")
def test_a_version_with_nan_weights_fails_alone(engine: ContinuousEngine, base: Path, lora: bool) -> None:
    (alone,) = finished(engine, ask(engine, 1, 1))
    broken = policy_of(base, 3, lora=lora)
    with torch.no_grad():
        for parameter in broken.trained().values():
            parameter.fill_(torch.nan)
    engine.load(3, weights.encode(broken.published))
    lost, kept = ask(engine, 0, 3), ask(engine, 1, 1)
    assert finished(engine, lost, kept) == [([], "failed"), alone]
    assert "probabilities are no numbers" in str(lost.error)


def test_a_call_cancelled_while_waiting_is_never_read(endless: ContinuousEngine) -> None:
    running = [ask(endless, number, 1) for number in range(4)]
    waiting = ask(endless, 4, 1)
    endless.step()
    waiting.cancel()
    finished(endless, *running, waiting)
    assert (waiting.ids, waiting.finish) == ([], "cancelled")


def test_the_probe_is_answered_by_the_weights_of_the_version(
    engine: ContinuousEngine, base: Path, lora: bool
) -> None:
    probe = make_probe(policy_of(base).vocabulary, seed=5)
    expected = policy_of(base, 2, lora=lora).log_prob(probe.observation, probe.action)
    assert engine.probe_answer(2, probe) == pytest.approx(expected.tolist(), abs=1e-4)
    assert engine.probe_answer(0, probe) != pytest.approx(expected.tolist(), abs=1e-2)


def test_a_version_in_use_is_not_dropped(engine: ContinuousEngine) -> None:
    answer = ask(engine, 0, 1)
    assert not engine.drop(1)
    engine.step()
    assert not engine.drop(1)
    finished(engine, answer)
    (kept,) = finished(engine, ask(engine, 0, 2))
    assert engine.drop(1)
    with pytest.raises(ValueError, match=r"version=1: is not loaded; loaded are \[2\]"):
        ask(engine, 0, 1)
    assert finished(engine, ask(engine, 0, 2)) == [kept]
    assert engine.drop(0)
    assert finished(engine, ask(engine, 0, 0))


def test_loading_a_version_changes_no_answer_under_way(
    engine: ContinuousEngine, base: Path, blobs: dict[int, bytes]
) -> None:
    (expected,) = finished(engine, ask(engine, 0, 1))
    answer = ask(engine, 0, 1)
    engine.step()
    engine.load(3, blobs[2])
    engine.step()
    assert engine.drop(3)
    assert finished(engine, answer) == [expected]


def test_a_cancelled_answer_leaves_and_the_others_go_on(engine: ContinuousEngine) -> None:
    (alone,) = finished(engine, ask(engine, 1, 1))
    first, second = ask(engine, 0, 1), ask(engine, 1, 1)
    engine.step()
    first.cancel()
    engine.step()
    assert (len(first.ids), first.finish) == (1, "cancelled")
    assert finished(engine, second) == [alone]


def test_ending_cancels_remaining_calls(engine: ContinuousEngine) -> None:
    told: list[str] = []
    for number in range(5):
        request = Request(ids=PROMPTS[number], most=MOST, version=1)
        engine.submit(request, lambda one: told.append(one.finish))
    engine.step()
    engine.run(lambda: True)
    assert told.count("cancelled") == 5 - sum(finish == "eos" for finish in told)
    assert engine.under_way == 0


def test_top_p_changes_the_draw_and_not_the_log_probability(
    engine: ContinuousEngine,
) -> None:
    sharp, greedy = ask(engine, 0, 1, top_p=1e-6), ask(engine, 0, 1, deterministic=True)
    finished(engine, sharp, greedy)
    assert sharp.ids == greedy.ids
    assert sharp.log_prob == pytest.approx(greedy.log_prob, abs=1e-5)
    assert min(sharp.log_prob) < -0.01


def test_changed_logits_change_the_sample_and_not_its_log_probability(
    engine: ContinuousEngine,
) -> None:
    biased = ask(engine, 0, 1, bias={25: 100.0})
    plain = engine.submit(Request(ids=PROMPTS[0], most=MOST, version=1, bias={}, frequency_penalty=100.0))
    finished(engine, biased, plain)
    assert set(biased.ids) == {25}
    told = plain_log_prob(engine, 1, (*PROMPTS[0], *biased.ids), len(PROMPTS[0]))
    assert biased.log_prob == pytest.approx(told, abs=1e-4)
    assert len(set(plain.ids)) == len(plain.ids)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ids": ()}, "give at least 1 of each"),
        ({"most": 0}, "give at least 1 of each"),
        ({"temperature": 0.0}, "use a temperature of"),
        ({"temperature": 1e-300}, "use a temperature of"),
        ({"top_p": 1.5}, "a top_p of"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(wrong: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"ids": (1,), "most": 1}
    with pytest.raises(ValueError, match=message):
        Request(**(usual | wrong))


def test_weights_of_another_policy_are_refused_and_not_kept(base: Path, lora: bool) -> None:
    policy = policy_of(base, lora=lora)
    held = LoadedPolicies(policy)
    other = LanguagePolicy(LanguageSection(model=str(base), rank=2, lora=True), seed=0)
    with pytest.raises(ValueError, match=r"weights.*base_model.*"):
        held.load(1, weights.encode(other.published))
    with pytest.raises(ValueError, match="version=0: versions are numbered from 1"):
        held.load(0, weights.encode(policy.published))
    assert not held.versions
    with pytest.raises(ValueError, match="version=7: is not loaded"), held.using(7):
        pass


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_engine.py").write_text(
        "from penstock.workloads.language.engine import ContinuousEngine, LoadedPolicies\n"
        "def make(policy, **own): return ContinuousEngine(LoadedPolicies(policy), **own)\n"
    )
    metadata = tmp_path / "their_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-engine\nVersion: 1.0\n")
    lines = "[penstock.engines]\ntheirs = their_engine:make\nbroken = their_engine:missing\n"
    (metadata / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)


def opened(name: str, dialogue: Path) -> TextEngine:
    policy = text_stand.policy_of(dialogue)
    return open_engine(name, policy, end_ids=(text_stand.EOS,), pad_id=text_stand.PAD, max_rows=2, seed=0)


@pytest.mark.promise("server-answers-engine-run")
@pytest.mark.usefixtures("installed")
def test_engines_of_all_names_answer_alike(dialogue: Path) -> None:
    found = []
    for name in ("transformers", "theirs"):
        engine = opened(name, dialogue)
        engine.load(1, adapter(dialogue, 1))
        answer = engine.submit(Request(ids=(4, 8, 2, 5, 8), most=4, version=1, seed=3))
        engine.run(lambda answer=answer: bool(answer.finish))  # type: ignore[misc]
        found.append((answer.ids, answer.finish))
    assert found[0] == found[1]


@pytest.mark.promise("server-answers-engine-run")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm", "engine='vllm': no installed package offers it .* use one of broken, theirs, transformers"),
        ("", "engine='': no installed package"),
        ("broken", "engine='broken': their_engine:missing cannot be loaded"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_an_unknown_engine_is_refused_with_the_known_ones(dialogue: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        opened(name, dialogue)


PROBE = specification().probe


class Rounding(ContinuousEngine):
    digits = 2

    def probe_answer(self, version: int, probe: Probe) -> tuple[float, ...]:
        given = np.asarray(super().probe_answer(version, probe))
        scale = 10.0 ** (self.digits - 1 - np.floor(np.log10(np.abs(given))))
        return tuple((np.round(given * scale) / scale).tolist())


def versions_of(
    engine: type[ContinuousEngine], dialogue: Path, most: float
) -> tuple[AdapterVersions, list[int]]:
    policy, made = text_stand.policy_of(dialogue), list[int]()

    def another() -> object:
        made.append(1)
        return text_stand.policy_of(dialogue)

    tolerance = EngineTolerance("theirs", another, most)  # type: ignore[arg-type]
    running = engine(LoadedPolicies(policy), end_ids=(text_stand.EOS,), pad_id=text_stand.PAD)
    return AdapterVersions(running, policy, {}.get, ServingSection(), tolerance), made


async def test_an_engine_is_measured_once_with_the_first_weights(dialogue: Path) -> None:
    for engine, least, most in ((Rounding, 1e-4, 0.1), (ContinuousEngine, 0.0, 1e-5)):
        versions, made = versions_of(engine, dialogue, most)
        for version in (1, 2):
            weights = Weights(version, version - 1, adapter(dialogue, version, size=0.1))
            await versions.take_probed(weights, PROBE)
        assert len(made) == 1
        assert least <= metrics.ENGINE_PROBE_DIFFERENCE._value.get() < most


@pytest.mark.promise("server-answers-engine-run")
async def test_an_engine_that_would_be_quarantined_does_not_begin(dialogue: Path) -> None:
    versions, _ = versions_of(Rounding, dialogue, 1e-5)
    message = r"engine='theirs': .* learner.probe_tolerance=1e-05: .* Set the tolerance to 0\.0\d"
    with pytest.raises(RunFailed, match=message):
        await versions.take_probed(Weights(1, 0, adapter(dialogue, 1)), PROBE)
    assert versions.served() == {}
