"""The environment of language models: its kwargs (prompts, length of responses, rewards), and its spaces."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from penstock.config.sections import Fraction, Positive, PositiveReal
from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.protocol.spaces import Discrete, Space
from penstock.workloads.language.settings import GuardSection, kwargs_settings, place_of, reading


class Language(GuardSection):
    """`environment.kwargs` of a run of language models."""

    task: Literal["", "sentiment", "words", "chat"] = ""
    """A built-in task, which makes what the settings do not name.

    sentiment: model, feedback and prompts. words: a tiny model of the feedback's words. chat: a small model
    that is trained on conversations, and their questions as prompts.
    """
    conversations: str = ""
    """Of the task `chat`: a file of conversations, as `penstock chat pretrain` takes.

    Empty: those of a package.
    """
    base_training: dict[str, bool | int | float] = Field(default_factory=dict)
    """Of the task `chat`: how its model is trained; the keys of `penstock chat pretrain --set`."""
    model: str = ""
    """Folder or hub name of the model that is trained; actors read its tokenizer and vocabulary."""
    prompts: str = ""
    """Rows with a `prompt`: JSON lines, Parquet, a data set's folder or a registry's URL.

    The rows of feedback are accepted too.
    """
    held_out: Fraction = 0.1
    """Share of the prompts that is used for evaluation alone."""
    reward: str = ""
    """Of rewards: a reward model's folder, grpc://HOST:PORT, unix:/path, http(s)://…, module:function."""
    serve_reward: bool = False
    """The launcher serves the reward model of `reward` to all actors, in a separate process."""
    reward_device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where that process scores; auto: on a GPU where there is one."""
    reward_reads: Literal["text", "tokens"] = "text"
    """tokens: the reward model has the policy's tokenizer and reads the sampled tokens."""
    reward_timeout_s: PositiveReal = 30.0
    """A call for rewards without an answer is repeated after so many seconds."""
    standardise: bool = False
    """Rewards are (score − mean) / std, clipped to ± 5.

    The mean and std are those of the saved reward model.
    """
    true_reward: str = ""
    """module:function of the evaluation's reward; empty: the reward itself."""
    response_tokens: Positive = 64
    """Most tokens of a response; a longer one is truncated."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the actors generate; auto: CUDA where there is one."""
    engine: str = "transformers"
    """Inference engine of a text server: transformers, or one of an installed package."""
    guard_penalty: Annotated[float, Field(ge=-100.0, le=0.0)] = 0.0
    """Reward of a blocked answer; 0: it is not trained on."""
    group: Positive = 1
    """Responses to each prompt in a fragment; group-relative advantages need several."""
    feedback: str = ""
    """Feedback on which a reward model is trained first, where `reward` names none."""
    feedback_scale: str = "none"
    """Of its scores: thumbs, stars, percent, LOW:HIGH, or none."""
    reward_training: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """How that reward model is trained: the keys of `penstock rlhf reward train --set`."""


_SAMPLING: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""Sampling parameters, which are accepted with these values alone: the learner's probability ratios are those
of the whole distribution."""


def language(section: EnvironmentSection) -> Language:
    """Return the section's `kwargs`; raises ConfigurationError with a line per mistake."""
    given = {key: value for key, value in section.kwargs.items() if _SAMPLING.get(key, object()) != value}
    return kwargs_settings(Language, given, _remark)


def _remark(key: str) -> str:
    if key not in _SAMPLING:
        return ""
    return (
        "sampling cannot be changed: tokens are drawn at temperature 1 from the whole distribution, which is "
        "the one that is trained; leave it out"
    )


# ---- The environment for the core: observations and actions are tokens.


def spaces(section: EnvironmentSection) -> tuple[Space, Space]:
    """Return the spaces of observations and actions, both the model's vocabulary."""
    place = language(section).model
    if not place:
        raise ConfigurationError("environment.kwargs.model='': name the folder of the model that is trained")
    from transformers import AutoConfig  # noqa: PLC0415 - the launcher asks for the target alone

    folder = place_of("environment.kwargs.model", place)
    with reading("environment.kwargs.model", place, "no model"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    vocabulary = Discrete(int(config.get_text_config().vocab_size))
    return vocabulary, vocabulary


def target(section: EnvironmentSection) -> float | None:
    """Return None: `learner.target_return` is the target. Raises ConfigurationError for wrong kwargs."""
    language(section)
    return None


def make(section: EnvironmentSection, count: int, seed: int) -> Any:
    del section, count, seed
    raise ConfigurationError(
        "workload='rlhf': responses are generated, there is no environment to step; say `penstock rlhf "
        "generate RUN`"
    )


def for_environment(environment_id: str, algorithm: str) -> dict[str, Any]:
    """Return the defaults of a task, as nested settings. algorithm: "ppo" means token-level PPO."""
    del environment_id
    layers: dict[str, Any] = {
        "environment": {"count": 64},
        "actor": {"count": 1, "unroll_length": 128},
        "learner": {"total_steps": 1_000_000, "stop_at_target": False},
        "evaluation": {"episodes": 128, "deterministic": False, "both": True, "base": True},
    }
    return layers | ({"algorithm": {"name": "token_ppo"}} if algorithm == "ppo" else {})
