"""Arguments and results of the text client as frozen dataclasses and typed dictionaries.

Messages have the form that chat APIs share: {"role": …, "content": …}, with `tool_calls` of an assistant and
`tool_call_id` of a tool's answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from penstock.client.values import Arm, Fallback, ServedVersion

Messages = Sequence[Mapping[str, Any]]
"""All messages of a conversation, oldest first."""


class TextOptions(TypedDict, total=False):
    """Options of answers to messages; what is left out is as the policy itself writes."""

    tools: Sequence[Mapping[str, Any]]
    """That may be called: {"type": "function", "function": {…}} each."""
    max_tokens: int
    """Most tokens of an answer; 0: as the run says."""
    temperature: float | None
    """Of the draw; 0: the most likely tokens. Other than 1 it is not learned from."""
    top_p: float | None
    """Draw from the most likely tokens of this share. Other than 1 it is not learned from."""
    seed: int | None
    """Draw with a generator that starts here; it is not learned from."""
    stop: Sequence[str]
    """Texts that end an answer."""
    count: int
    """So many answers, drawn apart."""
    learned: bool
    """False: answer, and learn nothing from it."""
    regenerate: bool
    """Of a conversation: answer the same messages once more."""
    begins_with: str
    """The answer begins with this text; it is not learned from."""
    logit_bias: Mapping[int, float]
    """Added to the logits of token ids; it is not learned from."""
    presence_penalty: float
    frequency_penalty: float
    thought_tokens: int | None
    """Most tokens of the thought before each answer; None: as the run says; 0: no thought."""
    show_thought: bool
    """Tell what was thought, and not only its length and cost."""


class SingleOptions(TextOptions, total=False):
    """Options of answers without a conversation."""

    client_key: str
    """Key of the client: the same key gets the same arm."""
    version: int
    """Exactly this version; 0: the one of the arm."""
    arm: Arm | None
    """Follow this arm; None: the one of the client key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """What was thought before an answer.

    tokens: how many it had, its end among them. milliseconds: that it took. is_cut: the budget ended it.
    text, token_ids: what was thought; "" and () where it is hidden.
    """

    tokens: int
    milliseconds: float
    is_cut: bool
    text: str
    token_ids: tuple[int, ...]

    @property
    def is_shown(self) -> bool:
        """Return whether what was thought is told."""
        return bool(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnswer:
    """An answer.

    message: the assistant's, to be sent back as it is. token_ids: as they were sampled. log_prob: of each,
    under the version at temperature 1. tokens: text of each. finish: "stop", "length", "tool_calls" or
    "content_filter", of which the guard kept a part back with all token ids. thought: before it; None: there
    was none.
    """

    message: dict[str, Any]
    token_ids: tuple[int, ...]
    log_prob: tuple[float, ...]
    tokens: tuple[str, ...]
    finish: str
    thought: Thought | None = None

    @property
    def text(self) -> str:
        """Return what is said."""
        return str(self.message["content"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Answers to messages; fields as in `GenerateReply`.

    fallback: None where the arm's own version answered. unlearned: why it is not learned from, where not.
    """

    answers: tuple[TextAnswer, ...]
    version: int
    arm: Arm | None
    fallback: Fallback | None
    conversation_id: str
    turn: int
    learned: bool
    unlearned: str
    prompt_tokens: int
    request_id: str

    @property
    def text(self) -> str:
        """Return what the first answer says."""
        return self.answers[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """Text that came to an answer while it grows. index: which of the answers, from 0."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationResult:
    """A conversation that is over: the sum of its rewards so far, and its turns."""

    total_return: float
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDescription:
    """Served text; fields as in `DescribeTextReply`."""

    run: str
    policy: str
    versions: tuple[ServedVersion, ...]
    """Oldest first."""
    max_tokens: int
    answer_tokens: int
    max_conversations: int
    reward_window_ms: int
    conversation_timeout_ms: int
    server: str
    learns: bool
    labels: Mapping[str, int]
    """Versions that operators have given a label, by label."""
    thought_tokens: int = 0
    """Most tokens of a thought before an answer; 0: there are no thoughts."""
