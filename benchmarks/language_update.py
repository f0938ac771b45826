"""One way of updating a language model, in a process of its own: its rate, and the memory that it takes.

    python -m benchmarks.language_update make SHAPE FOLDER            writes a model of random weights
    python -m benchmarks.language_update WAY SHAPE FOLDER SECONDS     updates it; prints one JSON object

WAY: lora, full: `TokenPPO`; critic: as lora, with an adapter of the critic's own; bare-lora, bare-full:
`benchmarks.bare_language`. The batch is made up.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.bare_language import Loop
from benchmarks.many_actors import peak_memory
from learner.algorithms.tokens.token_ppo import TokenPPO
from learner.batch import Batch
from penstock.config.sections.token import TokenPPOSection
from workloads.language.policy.language_policy import LanguagePolicy
from workloads.language.policy.policy_section import LanguageSection
from workloads.language.quiet import quieten

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


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a measurement.

    tokens_per_s: sampled tokens per CPU second, each once per update.
    start, peak: bytes, before the model was read and at most.
    """

    parameters: int
    tokens_per_s: float
    start: int
    peak: int


SHAPES: Final = {
    "tiny": Shape(layers=2, width=64, vocabulary=256, responses=128),
    "small": Shape(layers=8, width=512, vocabulary=8192, responses=16),
    "gpt2": Shape(layers=12, width=768, vocabulary=50257, responses=8, head=64),
}


def main() -> None:
    """Write the model, or print the measurements."""
    way, shape, folder = sys.argv[1], SHAPES[sys.argv[2]], sys.argv[3]
    quieten()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if way == "make":
        GPT2LMHeadModel(_config(shape)).save_pretrained(folder)
    else:
        print(json.dumps(asdict(measure(way, shape, folder, float(sys.argv[4])))))


def _config(shape: Shape) -> GPT2Config:
    return GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=PROMPT + RESPONSE,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.width // shape.head,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def measure(way: str, shape: Shape, folder: str, seconds: float) -> Measured:
    """Make two updates to get warm, then as many as fit into so many seconds of the CPU."""
    start = peak_memory(os.getpid())
    language = LanguageSection(
        model=folder, lora=not way.endswith("full"), critic="adapter" if way == "critic" else "head"
    )
    tokens = torch.randint(3, shape.vocabulary, (shape.responses, PROMPT + RESPONSE))
    once, parameters = (_bare if way.startswith("bare") else _ours)(language, tokens)
    for _ in range(2):
        once()
    updates, began_s = 0, time.process_time()
    while not updates or time.process_time() - began_s < seconds:
        once()
        updates += 1
    rate = updates * shape.responses * RESPONSE / (time.process_time() - began_s)
    return Measured(parameters, rate, start, peak_memory(os.getpid()))


def _bare(language: LanguageSection, tokens: torch.Tensor) -> tuple[Callable[[], None], int]:
    loop = Loop(language, TokenPPOSection(), tokens, PROMPT)
    scores = torch.randn(len(tokens))
    return lambda: loop.update(scores), loop.network.num_parameters()


def _ours(language: LanguageSection, tokens: torch.Tensor) -> tuple[Callable[[], None], int]:
    policy = LanguagePolicy(language, seed=0)
    algorithm = TokenPPO(policy, TokenPPOSection(), seed=0)
    batch = batch_of(tokens, policy.vocabulary)

    def once() -> None:
        if not algorithm.update(batch, progress=0.0).applied:
            raise RuntimeError("the update was not applied: the made-up batch diverged")

    return once, policy.network.num_parameters()


def batch_of(tokens: torch.Tensor, vocabulary: int) -> Batch:
    """Return the batch that the learner would assemble of these rows.

    All responses end by their length and have random scores.
    """
    observation = tokens.t()
    places = observation[1:]
    valid = (torch.arange(len(places)) >= PROMPT - 1)[:, None].expand_as(places).clone()
    reward, ended = torch.zeros(places.shape), torch.zeros_like(valid)
    reward[-1], ended[-1] = torch.randn(len(tokens)), True
    return Batch(
        observation={"observation": observation},
        action={"action": places},
        reward=reward,
        terminated=torch.zeros_like(valid),
        truncated=ended,
        valid=valid,
        log_prob=valid * -math.log(vocabulary),
        final_observation={"observation": observation[-1]},
        final_slot=torch.arange(len(tokens)),
        final_step=torch.full((len(tokens),), len(places) - 1),
        update=torch.zeros(len(tokens), dtype=torch.long),
        slots=tuple((0, slot) for slot in range(len(tokens))),
    )


if __name__ == "__main__":
    main()
