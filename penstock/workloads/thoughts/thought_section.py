"""`environment.kwargs` of a run of thoughts: which task, how long thoughts are, what training begins with."""

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from penstock.config.sections.section import Fraction, Positive, Section
from penstock.config.settings import ConfigurationError, EnvironmentSection


class Thoughts(Section):
    """What a run of thoughts asks of its actors."""

    task: str = "rings"
    """rings, rings:N:HOPS, or module:function of a task of one's own."""
    model: str = ""
    """Folder of the model that training begins with; empty: it is made first, by the warm start."""
    start: Literal["empty", "noise", "random"] = "empty"
    """Thoughts of the warm start, a choice.

    empty: mostly none, the rest with wrong steps. noise: all have wrong steps. random: symbols drawn at
    random, so that no chain is ever shown.
    """
    empty_share: Fraction = 0.7
    """Share of the warm start's thoughts that are empty."""
    wrong_steps: Fraction = 0.3
    """Share of the steps of the others that are wrong."""
    start_updates: Positive = 2500
    """Most updates of the warm start until steps are right; without that the run is refused."""
    corrupted_updates: Positive = 300
    """Updates of the warm start on corrupted thoughts, behind the others."""
    hidden: Annotated[int, Field(gt=0, le=4096, multiple_of=8)] = 64
    """Width of that model; a multiple of 8."""
    layers: Annotated[int, Field(gt=0, le=64)] = 2
    """Its layers."""
    thought_tokens: Positive = 8
    """Most tokens of a thought, the mark that ends it among them."""
    group: Positive = 4
    """Thoughts on each question in a fragment."""
    guard: bool = False
    """Whether a server checks what it is asked, and what it shows and answers, by built-in rules."""
    guard_rules: str = ""
    """File of further rules, as `penstock chat guard check --rules` takes."""
    guard_classifier: str = ""
    """File of `penstock chat guard train`: it checks what the server is asked."""


def thoughts_section(section: EnvironmentSection) -> Thoughts:
    """Return the section's `kwargs`; raises ConfigurationError with a line per mistake."""
    try:
        return Thoughts.model_validate(section.kwargs)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(dict(one)) for one in error.errors())) from error


def _explain(error: dict[str, object]) -> str:
    place = error["loc"]
    key = ".".join(map(str, place)) if isinstance(place, tuple) else str(place)
    if error["type"] == "extra_forbidden":
        return f"environment.kwargs.{key}: unknown key; use one of {', '.join(Thoughts.model_fields)}"
    return f"environment.kwargs.{key}={error['input']!r}: {error['msg']}"
