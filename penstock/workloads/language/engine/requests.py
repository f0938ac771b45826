"""A request for tokens, and its answer while it grows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

LEAST_TEMPERATURE: Final = 1e-3
"""Below it, a quotient of logits may be no float32."""
LEAST_TOP_P: Final = 1e-6

Finish = Literal["", "eos", "length", "cancelled", "failed"]
"""Why an answer ended; empty: it has not; failed: its version could not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked. ids: of the prompt, at least one. most: tokens of the answer.

    version: whose adapter answers; 0: none, the base model. temperature, top_p: of the draw. seed: of the
    draw; None: of the engine. deterministic: the most likely token each time. bias: added to the logits of
    token ids. presence_penalty, frequency_penalty: taken from the logits of tokens that the answer has, once,
    and as often as it has them. end: the token that ends it; None: the engine's `<eos>`.
    """

    ids: tuple[int, ...]
    most: int
    version: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    deterministic: bool = False
    bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    end: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be answered."""
        if not self.ids or self.most < 1:
            raise ValueError(f"request: {len(self.ids)} ids and most={self.most}; give at least 1 of each")
        if not LEAST_TEMPERATURE <= self.temperature <= 100.0 or not LEAST_TOP_P <= self.top_p <= 1.0:
            raise ValueError(
                f"request: temperature={self.temperature}, top_p={self.top_p}; use a temperature of "
                f"{LEAST_TEMPERATURE:g} to 100 and a top_p of {LEAST_TOP_P:g} to 1, and `deterministic` for "
                "the most likely tokens"
            )

    @property
    def is_sampled(self) -> bool:
        """Return whether its tokens are drawn from the policy itself, and so can be learned from."""
        free = self.temperature == 1.0 and self.top_p == 1.0
        return free and self.seed is None and not self.deterministic and not self.has_other_logits

    @property
    def has_other_logits(self) -> bool:
        """Return whether tokens are drawn by other logits than the policy's."""
        return bool(self.bias) or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(slots=True)
class Growing:
    """An answer. ids: its tokens so far, last the one that ends it where it ended by itself.

    log_prob: of each under the version's whole distribution at temperature 1. The engine's thread writes, and
    calls `on_change` after each token and at the end.
    """

    request: Request
    on_change: Callable[["Growing"], None] = lambda _: None
    ids: list[int] = field(default_factory=list)
    log_prob: list[float] = field(default_factory=list)
    finish: Finish = ""
    error: Exception | None = None
    """Why it failed."""
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Have it end before its next token; from any thread."""
        self.is_cancelled = True
