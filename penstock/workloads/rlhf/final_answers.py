"""Responses of a run's final policy to prompts of the user's.

They are drawn as in training, or are the most likely ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.settings import ActorSection
from penstock.protocol.specification import RunSpecification
from penstock.workloads.language.generation.cached_generation import make_backend
from penstock.workloads.language.tokenizer import Encoder, load_tokenizer
from penstock.workloads.plugin import acting
from penstock.workloads.rlhf.language_section import language


@dataclass(frozen=True, slots=True)
class Answer:
    """A response.

    tokens: its ids, `<eos>` too, which its text may not show. log_prob: of all its tokens together, in nats.
    """

    prompt: str
    response: str
    tokens: tuple[int, ...]
    log_prob: float
    ended: bool


def generate(
    specification: RunSpecification,
    blob: bytes,
    local: ActorSection,
    prompts: Sequence[str],
    *,
    tokens: int | None,
    seed: int,
    deterministic: bool,
) -> list[Answer]:
    """Return one response to each prompt.

    blob: the weights. local: of this process. tokens: at most; None: as in training.

    Raises ConfigurationError.
    """
    of = acting.read(specification, local)
    section = language(of.environment)
    tokenizer = load_tokenizer(section.model)
    most = tokens or section.response_tokens
    encoder = Encoder(tokenizer, of.specification.unroll_length + 1)
    rows = [encoder.prompt_ids(prompt) for prompt in prompts]
    policy = of.make_policy(specification.seed).policy
    policy.load(blob)
    backend = make_backend(policy, tokenizer, section.device)
    backend.seed(seed)
    made = backend.generate(rows, most, deterministic=deterministic)
    ids = [made.response(row) for row in range(len(rows))]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    parts = zip(prompts, texts, ids, made.log_prob.sum(1).tolist(), made.ended.tolist(), strict=True)
    return [Answer(*part) for part in parts]
