from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import ConfigurationError, ServingSection
from penstock.policy import weights
from penstock.protocol.specification import Probe
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.workloads.language.cached_generation import only_likely
from penstock.workloads.language.engine import (
    OWN,
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
from tests.support.language.text_stand import EOS as TEXT_STAND_EOS
from tests.support.language.text_stand import PAD as TEXT_STAND_PAD
from tests.support.language.text_stand import adapter, make_model, plain_log_prob, specification
from tests.support.language.text_stand import policy_of as text_stand_policy_of

# ---- Requests join and leave a running batch; each is answered as if alone, under its own version.


EOS, PAD = 2, 0
PROMPTS = ((1, 20, 21), (1, 22), (1, 23, 24, 25, 26, 27), (1, 27, 28), (1, 29))
MOST = 12


def policy_of(base: Path, seed: int = 0, **kwargs: Any) -> LanguagePolicy:
    """The tiny model, what is trained of it moved away by noise of this seed."""
    policy = LanguagePolicy(
        LanguageSection(model=str(base), rank=4, alpha=8.0, **kwargs), seed=0, has_reference=False
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trained().values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


@pytest.fixture(scope="module", params=[True, False], ids=["adapters", "models"])
def lora(request: pytest.FixtureRequest) -> bool:
    """Whether versions are adapters of one model, or each a model of its own."""
    return bool(request.param)


@pytest.fixture(scope="module")
def blobs(base: Path, lora: bool) -> dict[int, bytes]:
    """Of versions 1 and 2."""
    return {version: weights.encode(policy_of(base, version, lora=lora).published) for version in (1, 2)}


def engine_of(base: Path, blobs: dict[int, bytes], eos_id: int, *, lora: bool) -> ContinuousEngine:
    """With both loaded, and room for four answers."""
    policy = LanguagePolicy(LanguageSection(model=str(base), rank=4, alpha=8.0, lora=lora), seed=0)
    loaded = LoadedPolicies(policy)
    made = ContinuousEngine(loaded, eos_id=eos_id, pad_id=PAD, max_rows=4)
    for version, blob in blobs.items():
        made.load(version, blob)
    return made


@pytest.fixture
def engine(base: Path, blobs: dict[int, bytes], lora: bool) -> ContinuousEngine:
    """Whose answers may end by themselves."""
    return engine_of(base, blobs, EOS, lora=lora)


@pytest.fixture
def endless(base: Path, blobs: dict[int, bytes], lora: bool) -> ContinuousEngine:
    """Whose answers end at their length alone, so that it is known who is under way."""
    return engine_of(base, blobs, -1, lora=lora)


def ask(engine: ContinuousEngine, number: int, version: int, **kwargs: Any) -> Growing:
    """For up to twelve tokens, drawn with a seed of the prompt's own."""
    return engine.submit(Request(ids=PROMPTS[number], most=MOST, version=version, seed=number, **kwargs))


def finished(engine: ContinuousEngine, *answers: Growing) -> list[tuple[list[int], str]]:
    """Steps until all are."""
    while not all(one.finish for one in answers):
        assert engine.step()
    return [(one.ids, one.finish) for one in answers]


@pytest.mark.promise("request-language-model-joins")
def test_who_joins_a_running_batch_is_answered_as_alone(endless: ContinuousEngine) -> None:
    cases = [(number, version, MOST - number) for number, version in enumerate((1, 1, 1, 2, 1))]
    alone = [finished(endless, _asked(endless, *case))[0] for case in cases]
    assert [len(ids) for ids, _ in alone] == [MOST - number for number in range(5)]
    first, second = (_asked(endless, *case) for case in cases[:2])
    for _ in range(2):
        endless.step()
    third, fourth = (_asked(endless, *case) for case in cases[2:4])
    endless.step()
    fifth = _asked(endless, *cases[4])
    endless.step()
    assert endless.under_way == 4
    assert not fifth.ids
    assert finished(endless, first, second, third, fourth, fifth) == alone
    assert endless.under_way == 0
    assert not endless.step()


def _asked(engine: ContinuousEngine, number: int, version: int, most: int) -> Growing:
    return engine.submit(Request(ids=PROMPTS[number], most=most, version=version, seed=number))


def test_an_answer_that_cannot_be_drawn_fails_alone(endless: ContinuousEngine) -> None:
    alone = finished(endless, ask(endless, 0, 1))
    broken, whole = ask(endless, 1, 1, bias={3: float("nan")}), ask(endless, 0, 1)
    finished(endless, broken, whole)
    assert (broken.finish, broken.ids) == ("failed", [])
    assert [(whole.ids, whole.finish)] == alone


def test_the_likeliest_token_is_left_by_the_smallest_share() -> None:
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


def test_version_0_is_the_base_model(engine: ContinuousEngine, base: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPTS[0]])
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, pad_token_id=PAD
    )
    beside = ask(engine, 1, 1)
    answer = ask(engine, 0, 0, deterministic=True)
    finished(engine, beside, answer)
    assert answer.ids == plain[0, ids.shape[1] :].tolist()


@pytest.mark.promise("request-language-model-joins")
def test_tokens_and_log_probabilities_are_those_of_bare_generate(
    engine: ContinuousEngine, base: Path, lora: bool
) -> None:
    answers = [ask(engine, number, 1 + number % 2, deterministic=True) for number in range(4)]
    engine.step()
    answers.append(ask(engine, 4, 1, deterministic=True))
    finished(engine, *answers)
    for one in answers:
        ids = torch.tensor([one.request.ids])
        plain = policy_of(base, one.request.version, lora=lora).network.generate(
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
def test_a_version_of_no_numbers_fails_alone(engine: ContinuousEngine, base: Path, lora: bool) -> None:
    (alone,) = finished(engine, ask(engine, 1, 1))
    broken = policy_of(base, 3, lora=lora)
    with torch.no_grad():
        for parameter in broken.trained().values():
            parameter.fill_(torch.nan)
    engine.load(3, weights.encode(broken.published))
    lost, kept = ask(engine, 0, 3), ask(engine, 1, 1)
    assert finished(engine, lost, kept) == [([], "failed"), alone]
    assert "probabilities are no numbers" in str(lost.error)


def test_what_is_cancelled_while_it_waits_is_never_read(endless: ContinuousEngine) -> None:
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


def test_a_version_that_answers_is_not_dropped(engine: ContinuousEngine) -> None:
    answer = ask(engine, 0, 1)
    assert not engine.drop(1)
    engine.step()
    assert not engine.drop(1)
    finished(engine, answer)
    assert engine.drop(1)
    with pytest.raises(ValueError, match=r"version=1: is not loaded; loaded are \[2\]"):
        ask(engine, 0, 1)


def test_a_version_that_is_loaded_meanwhile_changes_no_answer(
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


def test_an_end_cancels_what_is_left(engine: ContinuousEngine) -> None:
    told: list[str] = []
    for number in range(5):
        request = Request(ids=PROMPTS[number], most=MOST, version=1)
        engine.submit(request, lambda one: told.append(one.finish))
    engine.step()
    engine.run(lambda: True)
    assert told.count("cancelled") == 5 - sum(finish == "eos" for finish in told)
    assert engine.under_way == 0


def test_top_p_leaves_out_what_is_unlikely_and_the_log_probability_is_the_policys(
    engine: ContinuousEngine,
) -> None:
    sharp, greedy = ask(engine, 0, 1, top_p=1e-6), ask(engine, 0, 1, deterministic=True)
    finished(engine, sharp, greedy)
    assert sharp.ids == greedy.ids
    assert sharp.log_prob == pytest.approx(greedy.log_prob, abs=1e-5)
    assert min(sharp.log_prob) < -0.01


def test_logits_that_are_changed_change_the_draw_and_not_the_log_probability(
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


def test_weights_of_another_policy_are_refused_and_nothing_is_held(base: Path, lora: bool) -> None:
    policy = policy_of(base, lora=lora)
    held = LoadedPolicies(policy)
    other = LanguagePolicy(LanguageSection(model=str(base), rank=2, lora=True), seed=0)
    with pytest.raises(ValueError, match=r"weights.*base_model.*"):
        held.load(1, weights.encode(other.published))
    assert not held.versions


# ---- The engine by its name: the own one, one of an installed package, and names that no package offers.


MODULE = """
from penstock.workloads.language.engine import ContinuousEngine
from penstock.workloads.language.engine import LoadedPolicies

def make(policy, **own):
    return ContinuousEngine(LoadedPolicies(policy), **own)
"""


@pytest.fixture(scope="module")
def choice_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that offers two engines, of which one is broken."""
    (tmp_path / "their_engine.py").write_text(MODULE)
    metadata = tmp_path / "their_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-engine\nVersion: 1.0\n")
    lines = "[penstock.engines]\ntheirs = their_engine:make\nbroken = their_engine:missing\n"
    (metadata / "entry_points.txt").write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def opened(name: str, choice_base: Path) -> TextEngine:
    """The engine over a new policy."""
    return open_engine(
        name,
        text_stand_policy_of(choice_base),
        eos_id=TEXT_STAND_EOS,
        pad_id=TEXT_STAND_PAD,
        max_rows=2,
        seed=0,
    )


@pytest.mark.promise("server-answers-engine-run")
def test_engines_of_all_names_answer_alike(choice_base: Path, installed: Path) -> None:
    found = []
    for name in ("transformers", "theirs"):
        engine = opened(name, choice_base)
        engine.load(1, adapter(choice_base, 1))
        answer = engine.submit(Request(ids=(4, 8, 2, 5, 8), most=4, version=1, seed=3))
        engine.run(lambda answer=answer: bool(answer.finish))  # type: ignore[misc]
        found.append((answer.ids, answer.finish))
    assert found[0] == found[1]
    assert installed.exists()


@pytest.mark.promise("server-answers-engine-run")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm", "engine='vllm': no installed package offers it .* use one of broken, theirs, transformers"),
        ("", "engine='': no installed package"),
        ("broken", "engine='broken': their_engine:missing cannot be loaded"),
    ],
)
def test_an_unknown_engine_is_refused_with_what_there_is(
    choice_base: Path, installed: Path, name: str, message: str
) -> None:
    assert installed.exists()
    with pytest.raises(ConfigurationError, match=message):
        opened(name, choice_base)


# ---- How far an engine is from a plain pass is measured once, and one that is too far is refused.


PROBE = specification().probe


class Rounding(ContinuousEngine):
    """Another engine: its answers are those of the plain pass, rounded to so many digits."""

    digits = 2

    def probe_answer(self, version: int, probe: Probe) -> tuple[float, ...]:
        """As it rounds."""
        given = np.asarray(super().probe_answer(version, probe))
        scale = 10.0 ** (self.digits - 1 - np.floor(np.log10(np.abs(given))))
        return tuple((np.round(given * scale) / scale).tolist())


@pytest.fixture(scope="module")
def tolerance_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_model(tmp_path_factory.mktemp("engine") / "model")


def versions_of(
    engine: type[ContinuousEngine], tolerance_base: Path, most: float
) -> tuple[AdapterVersions, list[int]]:
    """The versions behind an engine, and how often a policy was made to measure it with."""
    policy, made = text_stand_policy_of(tolerance_base), list[int]()

    def another() -> object:
        made.append(1)
        return text_stand_policy_of(tolerance_base)

    tolerance = EngineTolerance("theirs", another, most)  # type: ignore[arg-type]
    running = engine(LoadedPolicies(policy), eos_id=TEXT_STAND_EOS, pad_id=TEXT_STAND_PAD)
    return AdapterVersions(running, policy, {}.get, ServingSection(), tolerance), made


async def test_an_engine_is_measured_once_with_the_first_weights(tolerance_base: Path) -> None:
    versions, made = versions_of(Rounding, tolerance_base, 0.1)
    for version in (1, 2):
        weights = Weights(version, version - 1, adapter(tolerance_base, version, size=0.1))
        await versions.take_probed(weights, PROBE)
    assert len(made) == 1
    assert 1e-4 < metrics.ENGINE_PROBE_DIFFERENCE._value.get() < 0.1


async def test_an_engine_of_the_plain_pass_is_within_the_tolerance(tolerance_base: Path) -> None:
    versions, _ = versions_of(ContinuousEngine, tolerance_base, 1e-5)
    await versions.take_probed(Weights(1, 0, adapter(tolerance_base, 1, size=0.2)), PROBE)
    assert metrics.ENGINE_PROBE_DIFFERENCE._value.get() < 1e-5


@pytest.mark.promise("server-answers-engine-run")
async def test_an_engine_that_would_be_quarantined_does_not_begin(tolerance_base: Path) -> None:
    versions, _ = versions_of(Rounding, tolerance_base, 1e-5)
    message = r"engine='theirs': .* learner.probe_tolerance=1e-05: .* Set the tolerance to 0\.0\d"
    with pytest.raises(RunFailed, match=message):
        await versions.take_probed(Weights(1, 0, adapter(tolerance_base, 1)), PROBE)
    assert versions.served() == {}


# ---- Versions of a model whose weights are all trained, each whole in memory.


def networks_policy_of(base: Path, seed: int = 0) -> LanguagePolicy:
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
    return weights.encode(networks_policy_of(base, seed).published)


@pytest.fixture
def networks_engine(base: Path) -> ContinuousEngine:
    """With versions 1 and 2."""
    made = open_engine(OWN, networks_policy_of(base), eos_id=EOS, pad_id=PAD, max_rows=4, seed=0)
    assert isinstance(made, ContinuousEngine)
    for version in (1, 2):
        made.load(version, blob_of(base, version))
    return made


def likeliest(networks_engine: ContinuousEngine, version: int) -> Growing:
    """The likeliest answer of a version, whole."""
    growing = networks_engine.submit(Request(ids=(1, 20, 21), most=8, version=version, deterministic=True))
    while not growing.finish:
        networks_engine.step()
    return growing


def test_each_version_answers_with_its_own_weights(base: Path, networks_engine: ContinuousEngine) -> None:
    asked = [
        networks_engine.submit(Request(ids=(1, 20, 21), most=8, version=version, deterministic=True))
        for version in (0, 1, 2)
    ]
    while not all(one.finish for one in asked):
        networks_engine.step()
    for version, growing in enumerate(asked):
        assert growing.ids == likeliest(networks_engine, version).ids
        network = networks_policy_of(base, version).network
        row = torch.tensor([[1, 20, 21, *growing.ids]])
        with torch.inference_mode():
            plain = network(input_ids=row).logits[0, 2:-1].log_softmax(-1)
        expected = plain.gather(1, row[0, 3:, None])[:, 0].tolist()
        assert growing.log_prob == pytest.approx(expected, abs=1e-4)
    assert len({tuple(one.ids) for one in asked}) == 3


def test_the_probe_is_answered_by_the_version_that_is_named(
    base: Path, networks_engine: ContinuousEngine
) -> None:
    probe = make_probe(networks_policy_of(base).vocabulary, 0)
    for version in (0, 1, 2):
        expected = networks_policy_of(base, version).acting_log_prob(probe.observation, probe.action)
        assert networks_engine.probe_answer(version, probe) == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_version_is_dropped_and_no_other_with_it(base: Path, networks_engine: ContinuousEngine) -> None:
    before = likeliest(networks_engine, 2).ids
    assert networks_engine.drop(1)
    assert networks_engine.versions == [2]
    with pytest.raises(ValueError, match="version=1: is not loaded"):
        networks_engine.submit(Request(ids=(1, 20), most=1, version=1))
    assert networks_engine.drop(0)
    assert likeliest(networks_engine, 0).ids
    assert likeliest(networks_engine, 2).ids == before
    networks_engine.load(1, blob_of(base, 1))
    assert networks_engine.versions == [1, 2]


def test_networks_weights_of_another_policy_are_refused_and_nothing_is_held(base: Path) -> None:
    loaded = LoadedPolicies(networks_policy_of(base))
    adapter = LanguagePolicy(LanguageSection(model=str(base), rank=2), seed=0)
    with pytest.raises(ValueError, match="on one side only|unexpected|missing"):
        loaded.load(1, weights.encode(adapter.published))
    with pytest.raises(ValueError, match="version=0: versions are numbered from 1"):
        loaded.load(0, blob_of(base, 1))
    assert not loaded.versions
    with pytest.raises(ValueError, match="version=7: is not loaded"), loaded.using(7):
        pass
