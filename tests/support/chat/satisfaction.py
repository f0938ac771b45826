import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import AutoModelForCausalLM

from penstock.launch.run.supervisor import penstock
from penstock.workloads.chat.people import (
    REFERENCE,
    USUAL,
    Reference,
    Taste,
    draw_prompt,
    population,
    read_profile,
)
from penstock.workloads.chat.tasks import CANDIDATES
from penstock.workloads.language.cached_generation import CachedGeneration
from penstock.workloads.language.prompt import Message, plain
from penstock.workloads.language.settings import check_adapter
from penstock.workloads.language.tokenizer import Encoder, Tokenizer, load_tokenizer, pad
from tests.support.chat.opinions import (
    CRITERIA,
    FEATURES,
    Criterion,
    comparison,
    make_people_base,
    opinions,
    preference,
    profile_chances,
    rating_chances,
)

# ---- The best that anybody can tell of what people will say, and what a model reaches of it.


Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Bayes ceilings over responses of a reference.

    auc: of telling thumbs up from thumbs down. pair_accuracy: of telling which of two responses is better.
    squared_error: least mean squared error of each criterion, on the scale 0 to 1.
    """

    auc: float
    pair_accuracy: float
    squared_error: dict[str, float]


def ceilings(taste: Taste, reference: Reference = REFERENCE) -> Ceilings:
    """Return the ceilings of a taste, exactly: a sum over all 64 profiles."""
    chances = profile_chances(reference)
    thumbs = taste.thumb_chance(FEATURES)
    return Ceilings(
        auc=expected_auc(thumbs, thumbs, chances),
        pair_accuracy=_best_pair_accuracy(taste, FEATURES, chances),
        squared_error={
            one.name: float(chances @ expected_rating(taste, one, FEATURES)[1]) for one in CRITERIA
        },
    )


def expected_auc(scores: Array, thumbs: Array, weights: Array | None = None) -> float:
    """Return the area under the ROC curve that scores have over all thumbs that may be given.

    scores: of K responses, [K]. thumbs: the chance of a thumb up for each, [K]. weights: how often each
    comes, [K]; None: equally often. Equal scores count half.
    """
    often = np.ones(len(scores)) if weights is None else weights
    up, down = often * thumbs, often * (1 - thumbs)
    order = (np.sign(scores[:, None] - scores[None, :]) + 1) / 2
    return float(up @ order @ down / (up.sum() * down.sum()))


def expected_pair_accuracy(taste: Taste, scores: Array, features: Array) -> tuple[float, float]:
    """Return how often the order of scores agrees with somebody, over all pairs, and its ceiling.

    scores: of K responses, [K]. features: their attributes, [K, 6]. Equal scores agree in half of the cases.
    """
    first, second = np.triu_indices(len(scores), k=1)
    said = preference(taste, features[first], features[second])
    order = (np.sign(scores[first] - scores[second]) + 1) / 2
    accuracy = order * said + (1 - order) * (1 - said)
    return float(accuracy.mean()), float(np.maximum(said, 1 - said).mean())


def expected_rating(taste: Taste, criterion: Criterion, features: Array) -> tuple[Array, Array]:
    """Return mean and variance of what people say of a criterion on the scale 0 to 1, [K] each.

    The mean is the prediction of least squared error. features: [K, 6].
    """
    values = np.linspace(0, 1, 5)
    chances = rating_chances(taste, criterion, features)
    mean = chances @ values
    return mean, chances @ values**2 - mean**2


def tilted(reference: Array, rewards: Array, beta: float) -> Array:
    """Return the policy that maximises E[r] − β · KL(π ‖ π_ref): π* ∝ π_ref · exp(r / β).

    reference: chances [..., K]. rewards: [..., K]. beta: per nat, positive. Returns [..., K].
    """
    weighed = reference * np.exp((rewards - rewards.max(-1, keepdims=True)) / beta)
    best: Array = weighed / weighed.sum(-1, keepdims=True)
    return best


def best_policy(rewards: Array, beta: float) -> Array:
    """Return the chances of the best policy beside an even one.

    rewards: [PROMPTS, CANDIDATES]. beta: weight of the distance to the even policy, per nat. Returns
    [PROMPTS, CANDIDATES].
    """
    return tilted(np.full_like(rewards, 1 / CANDIDATES), rewards, beta)


def total_variation(first: Array, second: Array) -> Array:
    """Return half of the absolute differences of two policies, for each prompt: [PROMPTS]."""
    apart: Array = np.abs(first - second).sum(-1) / 2
    return apart


def _best_pair_accuracy(taste: Taste, features: Array, chances: Array) -> float:
    """Return the ceiling over two independent responses; of equal profiles either may be preferred."""
    said = preference(taste, features[:, None, :], features[None, :, :])
    return float(chances @ np.maximum(said, 1 - said) @ chances)


# ---- A policy that is to please the simulated people, by what they say alone; and how much it does.


PROMPTS: Final = 3000
RATED: Final = 4000
COMPARED: Final = 3000
FRESH: Final = 1024
"""Prompts on which a policy is judged."""
RESPONSE_TOKENS: Final = 12
PROMPT_TOKENS: Final = 8
"""Most tokens of a question."""
MAX_TOKENS: Final = 64
_PEOPLE: Final = 60
_JUDGE: Final = ("epochs=8", "batch=64", "learning_rate=2e-3", "lora=false")
_HEADS: Final = ("thumb=thumbs", "relevance=stars", "helpfulness=stars", "safety=stars")
BETA: Final = 0.05
"""Weight of the distance to the base, per nat, in the reward of PPO."""
TOKENS: Final = 120_000
"""Of answers, that PPO learns from."""
_RECIPE: Final = """
workload = "rlhf"
run = "satisfaction"
seed = {seed}
[environment]
id = "satisfaction"
count = 96
[environment.kwargs]
model = "{base}"
prompts = "{prompts}"
reward = "{judge}"
reward_reads = "tokens"
response_tokens = {response_tokens}
[policy.kwargs]
rank = 8
alpha = 16.0
[actor]
count = 1
unroll_length = {unroll_length}
[algorithm]
name = "token_ppo"
batch_steps = 1024
kl_coefficient = {beta}
learning_rate = 2e-3
critic_learning_rate = 2e-3
[learner]
total_steps = {tokens}
[evaluation]
episodes = 128
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pleased:
    """A policy on fresh prompts.

    satisfaction: mean chance of a thumb up. kl: to the base, nats per answer. words: of an answer. ended:
    share of answers that came to their end.
    """

    satisfaction: float
    kl: float
    words: float
    ended: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Folders and files. prompts: what people ask, to train on."""

    folder: Path
    seed: int

    @property
    def base(self) -> Path:
        """The supervised model."""
        return self.folder / "base"

    @property
    def ratings(self) -> Path:
        """What people said of its answers."""
        return self.folder / "ratings.jsonl"

    @property
    def judge(self) -> Path:
        """The reward model of these ratings."""
        return self.folder / "judge"

    @property
    def prompts(self) -> Path:
        """What people ask, to train on."""
        return self.folder / "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Said:
    """An answer. ids: of its tokens, the end token last where `ended`."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    ended: bool


class Speaker:
    """A model that answers questions. network: with or without an adapter."""

    def __init__(self, network: Any, tokenizer: Tokenizer, seed: int) -> None:
        self.network, self.tokenizer = network.eval(), tokenizer
        self.encoder = Encoder(tokenizer, MAX_TOKENS)
        self._backend = CachedGeneration(
            network, end_ids=(tokenizer.eos_token_id,), pad_id=tokenizer.pad_token_id
        )
        self._backend.seed(seed)

    @classmethod
    def of(cls, base: Path, seed: int) -> "Speaker":
        """Return the supervised model."""
        network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
        return cls(network, load_tokenizer(str(base)), seed)

    def answer(self, prompts: Sequence[str]) -> list[Said]:
        """Return an answer to each, drawn from the whole distribution."""
        rows = [self.encoder.prompt_ids(asked(prompt)) for prompt in prompts]
        made = self._backend.generate(rows, RESPONSE_TOKENS)
        found = []
        for row, prompt in enumerate(prompts):
            ids = made.response(row)
            text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
            found.append(Said(prompt, text, ids, bool(made.ended[row])))
        return found

    @torch.inference_mode()
    def log_probs(self, answers: Sequence[Said]) -> torch.Tensor:
        """Return the log-probability of each answer, [N]."""
        return answers_log_prob(self.network, self.encoder, answers)


def asked(prompt: str) -> tuple[Message, ...]:
    """Return a question as the conversation that it begins."""
    return (Message("user", prompt),)


def answers_log_prob(network: Any, encoder: Encoder, answers: Sequence[Said]) -> torch.Tensor:
    """Return the log-probability of each answer to its question, [N], differentiable."""
    heads = [encoder.prompt_ids(asked(one.prompt)) for one in answers]
    rows = [[*head, *one.ids] for head, one in zip(heads, answers, strict=True)]
    ids, mask = pad(rows, encoder.tokenizer.pad_token_id)
    logits = network(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    own = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    begins = torch.tensor([len(head) for head in heads])
    place = torch.arange(1, ids.shape[1])
    found: torch.Tensor = (own * ((place >= begins[:, None]) & (mask[:, 1:] == 1))).sum(1)
    return found


def liked(answers: Sequence[Said]) -> np.ndarray:
    """Return the chance that somebody likes each answer, [N]."""
    features = np.array([read_profile(one.prompt, one.text) for one in answers], np.float64)
    return USUAL.thumb_chance(features)


def optimum(beta: float) -> tuple[float, float]:
    """Return satisfaction and KL, in nats, of the best policy by E[2p − 1] − β · KL to the reference.

    The reference is the language of the people, which the base has learned.
    """
    reference, chance = profile_chances(REFERENCE), USUAL.thumb_chance(FEATURES)
    best = tilted(reference, 2 * chance - 1, beta)
    return float(best @ chance), float(best @ np.log(best / reference))


def prepare(folder: Path, seed: int, *, is_mixed_up: bool = False) -> Stage:
    """Return a stage; raises CalledProcessError where a command fails.

    is_mixed_up: what people say of an answer stands at another one, so that ratings say nothing.
    """
    stage, rng = Stage(folder, seed), np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [draw_prompt(rng) for _ in range(PROMPTS)]
    make_people_base(stage.base, seed=seed)
    _write(stage.prompts, ({"prompt": plain(asked(one))} for one in dict.fromkeys(prompts)))
    _write(stage.ratings, _opinions(stage, rng, is_mixed_up=is_mixed_up))
    heads = [word for head in _HEADS for word in ("--head", head)]
    weights = [word for head in _HEADS[1:] for word in ("--weight", f"{head.partition('=')[0]}=0")]
    _run(
        "reward", "train", stage.ratings, "--model", stage.base, "--out", stage.judge, *heads, *weights,
        *_set(_JUDGE), "--set", f"seed={seed}",
    )  # fmt: skip
    return stage


def _opinions(stage: Stage, rng: np.random.Generator, *, is_mixed_up: bool) -> Iterator[dict[str, Any]]:
    people, speaker = population(_PEOPLE, seed=stage.seed), Speaker.of(stage.base, stage.seed)
    answers = speaker.answer([draw_prompt(rng) for _ in range(RATED)])
    shown = [answers[place] for place in rng.permutation(RATED)] if is_mixed_up else answers
    for seen, one in zip(answers, shown, strict=True):
        for row in opinions(people, rng, people.somebody(rng), seen.prompt, seen.text):
            yield {**row, "prompt": plain(asked(one.prompt)), "response": one.text}
    again = [draw_prompt(rng) for _ in range(COMPARED)]
    for first, second in zip(speaker.answer(again), speaker.answer(again), strict=True):
        if first.text != second.text:
            row = comparison(people, rng, people.somebody(rng), first.prompt, first.text, second.text)
            if is_mixed_up and rng.random() < 0.5:
                row |= {"chosen": row["rejected"], "rejected": row["chosen"]}
            yield {**row, "prompt": plain(asked(first.prompt))}


def supervised(stage: Stage) -> Pleased:
    """Return how much the base pleases."""
    return _judged(Speaker.of(stage.base, stage.seed).answer(fresh(stage)), 0.0)


def ppo(stage: Stage) -> Pleased:
    """Return how much a trained policy pleases; raises CalledProcessError where it fails."""
    run, recipe = stage.folder / "run", stage.folder / "satisfaction.toml"
    recipe.write_text(
        _RECIPE.format(
            seed=stage.seed,
            base=stage.base,
            prompts=stage.prompts,
            judge=stage.judge,
            response_tokens=RESPONSE_TOKENS,
            unroll_length=PROMPT_TOKENS + RESPONSE_TOKENS - 1,
            beta=BETA,
            tokens=TOKENS,
        )
    )
    subprocess.run(
        penstock("train", str(recipe), "--run-dir", str(run), "--json"), check=True, stdout=subprocess.DEVNULL
    )
    base = Speaker.of(stage.base, stage.seed)
    network = PeftModel.from_pretrained(base.network, _policy(run)).eval()
    answers = Speaker(network, base.tokenizer, stage.seed).answer(fresh(stage))
    return _judged(answers, _kl(network, base, answers))


def fresh(stage: Stage) -> list[str]:
    """Return the prompts that a policy is judged on."""
    rng = np.random.default_rng(10_000 + stage.seed)
    return [draw_prompt(rng) for _ in range(FRESH)]


def _policy(run: Path) -> Path:
    folder = run / str(json.loads((run / "manifest.json").read_text())["policy"])
    load_tokenizer(str(folder))  # the folder stands alone
    check_adapter(folder)
    return folder


@torch.inference_mode()
def _kl(network: Any, base: Speaker, answers: Sequence[Said]) -> float:
    now = Speaker(network, base.tokenizer, 0).log_probs(answers)
    with network.disable_adapter():
        before = Speaker(network, base.tokenizer, 0).log_probs(answers)
    return float((now - before).mean())


def _judged(answers: Sequence[Said], kl: float) -> Pleased:
    chances = liked(answers)
    return Pleased(
        satisfaction=float(chances.mean()),
        kl=kl,
        words=float(np.mean([len(one.text.split()) for one in answers])),
        ended=float(np.mean([one.ended for one in answers])),
    )


def _write(file: Path, rows: Any) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _set(settings: Sequence[str]) -> list[str]:
    return [word for one in settings for word in ("--set", one)]


def _run(*words: str | Path) -> None:
    subprocess.run(penstock(*map(str, words)), check=True, stdout=subprocess.DEVNULL)
