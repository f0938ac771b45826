"""Rewards that came after their decision, joined to it by episode and step.

{"episode": "monday", "step": 3, "amount": 0.5}

Lines that a gateway has exported are such lines; their number and time say nothing here.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError
from penstock.registry.records import RegistryError
from penstock.registry.registry import Registry

_PAGE = 1000
_SCHEMES = ("sqlite:", "postgresql:")

Late = Mapping[tuple[str, int], float]
"""Sum of the late rewards, by episode and step."""


class _LateReward(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    episode: Annotated[str, Field(min_length=1, max_length=128)]
    step: Annotated[int, Field(ge=0, strict=True)]
    amount: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False, strict=True)]
    number: int | None = None
    createdAt: str | None = None  # noqa: N815 - as a gateway exports it


def read_late(place: str, policy: str) -> Late:
    """Return the late rewards of a file of JSON lines, or of a policy in the registry at a URL."""
    if place.startswith(_SCHEMES):
        return _summed(_of_registry(place, policy))
    return _summed(_of_file(Path(place)))


def _summed(rewards: Iterable[tuple[str, int, float]]) -> Late:
    total: defaultdict[tuple[str, int], float] = defaultdict(float)
    for episode, step, amount in rewards:
        total[episode, step] += amount
    return dict(total)


def _of_file(path: Path) -> Iterable[tuple[str, int, float]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"--late {path}: cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            try:
                one = _LateReward.model_validate(json.loads(line))
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(str(part) for part in first["loc"])
                raise ConfigurationError(f"{path}: line {number}: {field}: {first['msg']}") from error
            except ValueError as error:
                raise ConfigurationError(f"{path}: line {number}: no JSON: {error}") from error
            yield one.episode, one.step, one.amount


def _of_registry(url: str, policy: str) -> Iterable[tuple[str, int, float]]:
    try:
        with Registry.read(url) as registry:
            after = 0
            while page := registry.feedback(policy, after, _PAGE):
                yield from ((one.episode, one.step, one.amount) for one in page)
                after = page[-1].number
    except (RegistryError, ValueError) as error:
        raise ConfigurationError(f"--late: {error}") from error
