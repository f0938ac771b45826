"""Language models: updates beside a bare loop over transformers and peft, and GRPO beside TRL.

    python -m benchmarks.language make SHAPE FOLDER            writes a model of random weights
    python -m benchmarks.language WAY SHAPE FOLDER SECONDS     updates it; prints one JSON object
    python -m benchmarks.language task FOLDER                  writes the task on which GRPO is compared

WAY: lora, full: `TokenPPO`; critic: as lora, with an adapter of the critic's own; bare-lora, bare-full: the
bare loop. A sampled token counts once per update, for any number of epochs. Memory is the peak that the
process has had resident, less what it had before the model was read.
"""

import copy
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from benchmarks import peers
from benchmarks.stand import PREFIX, Cell, Options, Table, memory_bytes, shell
from benchmarks.train import Trained, trained
from penstock.config.algorithm_sections import TokenPPOSection
from penstock.learner.algorithms.token_ppo import TokenPPO
from penstock.learner.batch import Batch
from penstock.protocol.limits import MIB
from penstock.workloads.language.policy import LanguagePolicy, LanguageSection
from penstock.workloads.language.pretraining.tiny_models import SPECIAL, build_tokenizer, save
from penstock.workloads.language.settings import quieten

ME: Final = (sys.executable, "-m", "benchmarks.language")
WAYS: Final = ("bare-lora", "lora", "bare-full", "full")
SECONDS: Final = {"tiny": 5.0, "small": 0.0}
"""CPU seconds of a measurement, behind two updates to get warm and one."""
PROMPT: Final = 16
RESPONSE: Final = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a GPT-2 and of the batch that it learns from. head: width of one of its heads."""

    layers: int
    width: int
    vocabulary: int
    responses: int
    head: int = 32

    def model(self, positions: int = PROMPT + RESPONSE) -> Any:
        """Return the model with random weights, without dropout."""
        config = GPT2Config(
            vocab_size=self.vocabulary, n_positions=positions, n_embd=self.width, n_layer=self.layers,
            n_head=self.width // self.head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)


SHAPES: Final = {
    "tiny": Shape(layers=2, width=64, vocabulary=256, responses=128),
    "small": Shape(layers=8, width=512, vocabulary=8192, responses=16),
    "gpt2": Shape(layers=12, width=768, vocabulary=50257, responses=8, head=64),
}


def table(options: Options) -> Table:
    """Return the rows of both shapes, each way in a process of its own, in turn, on one thread."""
    rows: list[tuple[Cell, ...]] = []
    for shape, seconds in SECONDS.items():
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            shell((*ME, "make", shape, folder))
            rounds = [
                {way: json.loads(shell((*ME, way, shape, folder, str(seconds)))) for way in WAYS}
                for _ in range(options.repeat)
            ]
        rows += [_row(way, shape, rounds) for way in WAYS]
    return Table(
        title="updates of a language model: 16 tokens of prompt, 32 of response, one thread",
        columns=("what", "million parameters", "tokens per CPU second", "of the bare loop", "MiB", "of full"),
        rows=rows,
        note="aims: rate 1 of the bare loop; LoRA at most 0.6 of the memory of all weights",
    )


def _row(way: str, shape: str, rounds: Sequence[Mapping[str, dict[str, float]]]) -> tuple[Cell, ...]:
    kind = way.removeprefix("bare-")
    bare, full = f"bare-{kind}", way.replace(kind, "full")
    return (
        *(f"{shape}, {way}", rounds[0]["full"]["parameters"] / 1e6),
        median(one[way]["rate"] for one in rounds),
        median(one[way]["rate"] / one[bare]["rate"] for one in rounds),
        median(one[way]["bytes"] / MIB for one in rounds),
        median(one[way]["bytes"] / one[full]["bytes"] for one in rounds),
    )


def measure(way: str, shape: Shape, folder: str, seconds: float) -> dict[str, float]:
    """Make two updates to get warm, then as many as fit into so many seconds of the CPU."""
    start = memory_bytes(os.getpid())
    critic: Any = "adapter" if way == "critic" else "head"
    language = LanguageSection(model=folder, lora=not way.endswith("full"), critic=critic)
    tokens = torch.randint(3, shape.vocabulary, (shape.responses, PROMPT + RESPONSE))
    once, parameters = (_bare if way.startswith("bare") else _ours)(language, tokens)
    for _ in range(2):
        once()
    updates, began_s = 0, time.process_time()
    while not updates or time.process_time() - began_s < seconds:
        once()
        updates += 1
    rate = updates * shape.responses * RESPONSE / (time.process_time() - began_s)
    return {"parameters": parameters, "rate": rate, "bytes": memory_bytes(os.getpid()) - start}


def _bare(language: LanguageSection, tokens: Tensor) -> tuple[Callable[[], None], int]:
    loop = Loop(language, TokenPPOSection(), tokens, PROMPT)
    scores = torch.randn(len(tokens))
    return lambda: loop.update(scores), loop.network.num_parameters()


def _ours(language: LanguageSection, tokens: Tensor) -> tuple[Callable[[], None], int]:
    policy = LanguagePolicy(language, seed=0)
    algorithm, batch = TokenPPO(policy, TokenPPOSection(), seed=0), batch_of(tokens, policy.vocabulary)

    def once() -> None:
        if not algorithm.update(batch, progress=0.0).applied:
            raise RuntimeError("the update was not applied: the made-up batch diverged")

    return once, policy.network.num_parameters()


def batch_of(tokens: Tensor, vocabulary: int) -> Batch:
    """Return the batch that the learner would assemble of these rows.

    All responses end by their length and have random scores.
    """
    observation = tokens.t()
    places = observation[1:]
    valid = (torch.arange(len(places)) >= PROMPT - 1)[:, None].expand_as(places).clone()
    reward, ended = torch.zeros(places.shape), torch.zeros_like(valid)
    reward[-1], ended[-1] = torch.randn(len(tokens)), True
    return Batch(
        observation={"observation": observation}, action={"action": places}, reward=reward,
        terminated=torch.zeros_like(valid), truncated=ended, valid=valid,
        log_prob=valid * -math.log(vocabulary), final_observation={"observation": observation[-1]},
        final_slot=torch.arange(len(tokens)), final_step=torch.full((len(tokens),), len(places) - 1),
        update=torch.zeros(len(tokens), dtype=torch.long),
        slots=tuple((0, slot) for slot in range(len(tokens))),
    )  # fmt: skip


class Loop:
    """PPO in plain transformers and peft of `tokens` [R, P + L], of which the first P are the prompt's.

    As in a single-file trainer: once per batch the log-probabilities, values and reference of all responses
    without gradients, then epochs of minibatches with logits of whole rows, autograd, `clip_grad_norm_` and
    `torch.optim.AdamW`. No metrics, no checks of finiteness, no way back.
    """

    def __init__(
        self, language: LanguageSection, section: TokenPPOSection, tokens: Tensor, prompt: int
    ) -> None:
        self._section, self._tokens, self._prompt = section, tokens, prompt
        network: Any = AutoModelForCausalLM.from_pretrained(
            language.model, dtype=torch.float32, trust_remote_code=False
        )
        self._reference = None if language.lora else copy.deepcopy(network).requires_grad_(False).eval()
        self.network: Any = _adapted(network, language) if language.lora else network
        self.network.eval()
        width = network.config.hidden_size
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        own = [one for one in self.network.parameters() if one.requires_grad]
        self._parameters = [*own, *self.head.parameters()]
        groups = [
            {"params": own, "lr": section.learning_rate},
            {"params": list(self.head.parameters()), "lr": section.critic_learning_rate},
        ]
        self._adam = torch.optim.AdamW(groups, eps=section.adam_epsilon, weight_decay=0.0, fused=True)

    def update(self, scores: Tensor) -> None:
        """Run all epochs; scores: [R]."""
        with torch.no_grad():
            proximal, value = self.read(self.network, self._tokens)
            reward = -self._section.kl_coefficient * (proximal - self._reference_log_prob())
            reward[:, -1] += scores
            advantage, target = self._gae(reward, value)
            advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
        for _ in range(self._section.epochs):
            for rows in torch.randperm(len(self._tokens)).chunk(self._section.minibatches):
                self._step(self._tokens[rows], proximal[rows], advantage[rows], target[rows])

    def _step(self, tokens: Tensor, proximal: Tensor, advantage: Tensor, target: Tensor) -> None:
        log_prob, value = self.read(self.network, tokens)
        ratio, clip = (log_prob - proximal).exp(), self._section.clip_range
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        error = 0.5 * (value - target).square().mean()
        self._adam.zero_grad()
        (self._section.value_coefficient * error - surrogate).backward()
        nn.utils.clip_grad_norm_(self._parameters, self._section.max_gradient_norm)
        self._adam.step()

    def read(self, network: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and values of the responses, [R, L] each."""
        outputs = network(input_ids=tokens[:, :-1], output_hidden_states=True, use_cache=False)
        first = self._prompt - 1
        log_probs = outputs.logits[:, first:].log_softmax(-1)
        chosen = log_probs.gather(-1, tokens[:, self._prompt :, None]).squeeze(-1)
        value: Tensor = self.head(outputs.hidden_states[-1][:, first:]).squeeze(-1)
        return chosen, value

    def _reference_log_prob(self) -> Tensor:
        if self._reference is not None:
            return self.read(self._reference, self._tokens)[0]
        with self.network.disable_adapter():
            return self.read(self.network, self._tokens)[0]

    def _gae(self, reward: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return GAE(γ = 1, λ) and returns."""
        advantage, carried = torch.zeros_like(reward), torch.zeros(len(reward))
        following = torch.zeros(len(reward))
        for step in reversed(range(reward.shape[1])):
            carried = reward[:, step] + following - value[:, step] + self._section.gae_lambda * carried
            advantage[:, step], following = carried, value[:, step]
        return advantage, reward.flip(1).cumsum(1).flip(1)


def _adapted(network: Any, language: LanguageSection) -> Any:
    rank, alpha, task = language.rank, language.alpha, TaskType.CAUSAL_LM
    return get_peft_model(
        network, LoraConfig(task_type=task, r=rank, lora_alpha=alpha, target_modules="all-linear")
    )


# ---- beside TRL

WARM, BATCHES = 10, 100
RESPONSES, GROUP = 128, 8
RECIPE: Final = f"""
workload = "rlhf"
run = "bench"
[environment]
id = "liked-words"
count = {RESPONSES}
[environment.kwargs]
model = "FOLDER/model"
prompts = "FOLDER/prompts.jsonl"
reward = "others:liked"
group = {GROUP}
response_tokens = {RESPONSE}
[policy.kwargs]
lora = false
[actor]
count = 1
unroll_length = {PROMPT + RESPONSE - 1}
[algorithm]
name = "token_ppo"
advantage = "group"
batch_steps = {RESPONSES * (PROMPT + RESPONSE - 1)}
epochs = 1
minibatches = 1
kl_coefficient = 0.0
learning_rate = 1e-6
"""
"""Of a batch one gradient step of all weights, as TRL makes it by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one run behind its warm-up. cpu_seconds: of all its processes."""

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def peers_table(options: Options) -> Table:
    """Return GRPO of a small GPT-2 by all processes of `penstock train`, and by TRL, alternately.

    Both start from one model, sample 32 tokens to 16 prompts eight times each, reward them by one function,
    and make one gradient step on these 128 responses, in float32, with advantages relative to the group and
    no penalty.
    """
    peers.python_of("trl")
    os.environ["PYTHONPATH"] = str(peers.HERE)  # of the function that rewards
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        shell((*ME, "task", name))
        task, recipe = Path(name), Path(name) / "recipe.toml"
        recipe.write_text(RECIPE.replace("FOLDER", name))
        rounds = [
            {
                "Penstock": _penstock(recipe, seed),
                **{f"TRL GRPO, threads: {threads}": _trl(task, threads, seed) for threads in (1, 2)},
            }
            for seed in range(1, options.repeat + 1)
        ]
    return summarise(rounds)


def summarise(rounds: Sequence[Mapping[str, Outcome]]) -> Table:
    """Return a row each; the ratio is ours / the best of the others within a round, its median shown."""
    ours, *others = rounds[0]
    ratio = median(one[ours].rate / max(one[name].rate for name in others) for one in rounds)
    rows: list[tuple[Cell, ...]] = [
        (
            *(name, median(one[name].rate for one in rounds), ratio if name == ours else None),
            median(one[name].tokens / one[name].cpu_seconds for one in rounds),
        )
        for name in rounds[0]
    ]
    return Table(
        title=f"GRPO of a GPT-2 with 0.13 million parameters: {RESPONSES} responses of {RESPONSE} tokens",
        columns=("who", "tokens/s", "÷ best of TRL", "tokens per CPU second"),
        rows=rows,
        note=f"{BATCHES} batches behind {WARM}; aim: 1.3 × the better of TRL's",
    )


def _trl(task: Path, threads: int, seed: int) -> Outcome:
    numbers = {"warm": WARM, "batches": BATCHES, "threads": threads, "seed": seed}
    return Outcome(**peers.other("trl", "grpo", str(task), **numbers))


def _penstock(recipe: Path, seed: int) -> Outcome:
    """Measure a training behind its warm-up; the CPU seconds of the warm-up are those of a short one."""

    def ran(batches: int) -> Trained:
        return trained("--seed", str(seed), task=str(recipe), steps=batches * RESPONSES * RESPONSE)

    short, long = ran(WARM), ran(WARM + BATCHES)
    warm, end = (run.summary["env_steps"] for run in (short, long))
    first, last = (next(line for line in long.metrics if line["env_steps"] >= steps) for steps in (warm, end))
    tokens = last["env_steps"] - first["env_steps"]
    return Outcome(
        tokens=tokens,
        seconds=last["time"] - first["time"],
        cpu_seconds=(_spent_s(long) - _spent_s(short)) * tokens / (end - warm),
    )


def _spent_s(run: Trained) -> float:
    return sum(seconds for role, seconds in run.cpu_seconds.items() if role != "evaluator")


def _write_task(folder: Path) -> None:
    """Write FOLDER/model, with a tokenizer of one token per word, and FOLDER/prompts.jsonl."""
    words = [f"w{number}" for number in range(SHAPES["tiny"].vocabulary - len(SPECIAL))]
    tokenizer, model = build_tokenizer(words), SHAPES["tiny"].model(positions=256)
    for name in ("bos", "eos", "pad"):
        setattr(model.config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    save(model, tokenizer, folder / "model")
    drawn = np.random.default_rng(0).integers(len(words), size=(1024, PROMPT - 1))
    rows: Iterable[dict[str, str]] = ({"prompt": " ".join(words[index] for index in row)} for row in drawn)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    quieten()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    way, *words = sys.argv[1:]
    if way == "task":
        _write_task(Path(words[0]))
    elif way == "make":
        SHAPES[words[0]].model().save_pretrained(words[1])
    else:
        print(json.dumps(measure(way, SHAPES[words[0]], words[1], float(words[2]))))


if __name__ == "__main__":
    main()
