"""The environment of language models, as the core asks for it: tokens are observed and tokens are chosen.

Nothing is stepped: a response is generated whole (`rollout`), and rewarded.
"""

from typing import Any

from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.protocol.spaces import Discrete, Space
from penstock.workloads.language.loading import place_of, unreadable
from penstock.workloads.rlhf.language_section import language


def spaces(section: EnvironmentSection) -> tuple[Space, Space]:
    """Return the spaces of the token at a position and of the token behind it.

    Each has as many choices as the model has outputs.

    Raises ConfigurationError.
    """
    place = language(section).model
    if not place:
        raise ConfigurationError("environment.kwargs.model='': name the folder of the model that is trained")
    from transformers import AutoConfig  # noqa: PLC0415 - the launcher asks for the target alone

    folder = place_of("environment.kwargs.model", place)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise unreadable("environment.kwargs.model", place, "no model", error) from error
    vocabulary = Discrete(int(config.get_text_config().vocab_size))
    return vocabulary, vocabulary


def target(section: EnvironmentSection) -> float | None:
    """Return None: `learner.target_return` says it. Raises ConfigurationError for kwargs that cannot be."""
    language(section)
    return None


def make(section: EnvironmentSection, count: int, seed: int) -> Any:
    """Raises ConfigurationError: there is none to step."""
    del section, count, seed
    raise ConfigurationError(
        "workload='rlhf': responses are generated, there is no environment to step; say `penstock "
        "generate RUN`"
    )
