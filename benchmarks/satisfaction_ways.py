"""Four ways to use what people say of answers, each from the same stage and judged alike.

supervised   the base, which has learned conversations and no rating
thumbs       the base moved towards answers with a thumb up (`thumb_weighting`), no reward model
best of 8    of eight answers of the base the one that the judge likes most
ppo          `penstock train`: PPO on new answers that the judge rewards
"""

import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import PeftModel

from benchmarks.satisfaction_stage import (
    FRESH,
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    Said,
    Speaker,
    Stage,
    asked,
    liked,
)
from benchmarks.thumb_weighting import weigh
from launch.run.child_process import penstock
from workloads.chat.people.chat_texts import draw_prompt
from workloads.language.heads.heads_model import HeadsModel
from workloads.language.loading import check_adapter
from workloads.language.reward.reward_source import Sample
from workloads.language.tokenizer import load_tokenizer

BETA: Final = 0.05
"""Weight of the distance to the base, per nat, in the reward of PPO."""
TOKENS: Final = 120_000
"""Of answers, that PPO learns from."""
CANDIDATES: Final = 8
STEPS: Final = (3e-4, 1e-3, 3e-3)
"""Step sizes of the thumbs' weighting; the one that the judge likes most is taken."""
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
    """What a way comes to, on fresh prompts.

    satisfaction: mean chance of a thumb up; error: its standard error. kl: to the base, nats per answer; of
    `best of 8` its bound, ln 8 − 7/8. words: of an answer. ended: share of answers that came to their end.
    """

    way: str
    seed: int
    satisfaction: float
    error: float
    kl: float
    words: float
    ended: float


def every_way(stage: Stage) -> list[Pleased]:
    """Return what each of the four comes to."""
    return [supervised(stage), thumbs(stage), best_of(stage), ppo(stage)]


def supervised(stage: Stage) -> Pleased:
    """Return what the base comes to."""
    return _judged("supervised", stage, Speaker.of(stage.base, stage.seed).answer(fresh(stage)), 0.0)


def best_of(stage: Stage) -> Pleased:
    """Return what the answers come to that the judge likes most of eight."""
    speaker, judge, prompts = Speaker.of(stage.base, stage.seed), HeadsModel.load(stage.judge), fresh(stage)
    several = [speaker.answer(prompts) for _ in range(CANDIDATES)]
    rewards = np.array([_rewards(judge, one) for one in several])
    chosen = [several[place][row] for row, place in enumerate(rewards.argmax(0))]
    return _judged("best of 8", stage, chosen, math.log(CANDIDATES) - 1 + 1 / CANDIDATES)


def thumbs(stage: Stage) -> Pleased:
    """Return what the weighting of thumbs comes to, with the step size that the judge likes most."""
    rows = [json.loads(line) for line in stage.ratings.read_text().splitlines()]
    told = [row for row in rows if row.get("key") == "thumb"]
    judge, prompts = HeadsModel.load(stage.judge), fresh(stage)
    best: tuple[float, Pleased] | None = None
    for step in STEPS:
        base = Speaker.of(stage.base, stage.seed)
        rated = [_again(base, row) for row in told]
        network = weigh(base, rated, [row["score"] for row in told], step=step, seed=stage.seed)
        answers = Speaker(network, base.tokenizer, stage.seed).answer(prompts)
        score = float(np.mean(_rewards(judge, answers)))
        if best is None or score > best[0]:
            best = score, _judged("thumbs", stage, answers, _kl(network, base, answers))
    assert best is not None
    return best[1]


def ppo(stage: Stage, *, beta: float = BETA, tokens: int = TOKENS) -> Pleased:
    """Return what a training comes to; raises CalledProcessError where it fails."""
    run, recipe = stage.folder / "run", stage.folder / "satisfaction.toml"
    recipe.write_text(
        _RECIPE.format(
            seed=stage.seed,
            base=stage.base,
            prompts=stage.prompts,
            judge=stage.judge,
            response_tokens=RESPONSE_TOKENS,
            unroll_length=PROMPT_TOKENS + RESPONSE_TOKENS - 1,
            beta=beta,
            tokens=tokens,
        )
    )
    subprocess.run(
        penstock("train", str(recipe), "--run-dir", str(run), "--json"), check=True, stdout=subprocess.DEVNULL
    )
    base = Speaker.of(stage.base, stage.seed)
    network = PeftModel.from_pretrained(base.network, _policy(run)).eval()
    answers = Speaker(network, base.tokenizer, stage.seed).answer(fresh(stage))
    return _judged("ppo", stage, answers, _kl(network, base, answers))


def fresh(stage: Stage) -> list[str]:
    """Return the prompts that every way of a stage is judged on."""
    rng = np.random.default_rng(10_000 + stage.seed)
    return [draw_prompt(rng) for _ in range(FRESH)]


def _policy(run: Path) -> Path:
    folder = run / str(json.loads((run / "manifest.json").read_text())["policy"])
    load_tokenizer(str(folder))  # the folder stands alone
    check_adapter(folder)
    return folder


def _again(base: Speaker, row: dict[str, Any]) -> Said:
    """Return a rated answer as the tokens that were drawn, which its words tell."""
    prompt, text = row["prompt"][-1]["content"], row["response"]
    ended = len(text.split()) < RESPONSE_TOKENS
    return Said(prompt, text, tuple(base.encoder.response_ids(text, cut_short=not ended)), ended)


def _rewards(judge: HeadsModel, answers: Sequence[Said]) -> list[float]:
    samples = [Sample(prompt=asked(one.prompt), response=one.text) for one in answers]
    return [one.reward for one in judge.judge(samples)]


@torch.inference_mode()
def _kl(network: Any, base: Speaker, answers: Sequence[Said]) -> float:
    now = Speaker(network, base.tokenizer, 0).log_probs(answers)
    with network.disable_adapter():
        before = Speaker(network, base.tokenizer, 0).log_probs(answers)
    return float((now - before).mean())


def _judged(way: str, stage: Stage, answers: Sequence[Said], kl: float) -> Pleased:
    chances = liked(answers)
    return Pleased(
        way=way,
        seed=stage.seed,
        satisfaction=float(chances.mean()),
        error=float(chances.std(ddof=1) / math.sqrt(len(chances))),
        kl=kl,
        words=float(np.mean([len(one.text.split()) for one in answers])),
        ended=float(np.mean([one.ended for one in answers])),
    )
