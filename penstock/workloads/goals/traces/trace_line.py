"""One line of a log: a decision of a live system and its outcome.

    {"time": 1790000000.5, "episode": "monday", "step": 0, "observation": {"cpu": 0.71, "disk": 0.4},
     "goal": "free some disk", "action": "rotate_logs", "propensity": 0.25,
     "result": {"success": true, "output": "3 files", "execution_time_ms": 41.5}, "metadata": {"host": "a"}}

`propensity` is the probability with which the action was chosen. Leave it out where it is not known: where
the action was the most likely one instead of a drawn one, a fallback, or changed by a gate that does not say
how.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.config.configuration_error import ConfigurationError

MOST_LINE_BYTES: Final = 2**20
MOST_STEPS: Final = 10_000
"""Decisions of one episode."""

_Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e12, le=1e12, strict=True)]
_Name = Annotated[str, Field(min_length=1, max_length=128)]
_Action = Annotated[str, Field(max_length=128, pattern=r"^[^\s\p{Cc}]([^\p{Cc}]*[^\s\p{Cc}])?$")]
"""Without white space around it, and without control characters: two actions that look the same are one."""


class Result(BaseModel):
    """The outcome of an action. `crashed`: what acted broke down as well."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    success: Annotated[bool, Field(strict=True)]
    output: str = ""
    error: str = ""
    execution_time_ms: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)] | None = None
    crashed: Annotated[bool, Field(strict=True)] = False


class Trace(BaseModel):
    """A line of a log, checked. time: Unix, in seconds. step: of its episode, from 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    time: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
    episode: _Name
    step: Annotated[int, Field(ge=0, lt=MOST_STEPS, strict=True)]
    observation: Annotated[dict[_Name, _Number], Field(min_length=1, max_length=4096)]
    goal: Annotated[str, Field(max_length=4096)] = ""
    action: _Action
    propensity: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)] | None = None
    result: Result
    metadata: dict[str, Any] = {}


class BadLine(ValueError):
    """A line that is no trace; the text names field, value and what is allowed."""


def parse(line: bytes) -> Trace:
    if len(line) > MOST_LINE_BYTES:
        raise BadLine(f"{len(line)} bytes: at most {MOST_LINE_BYTES} are read; shorten result.output")
    try:
        return Trace.model_validate(json.loads(line.decode("utf-8-sig"), object_pairs_hook=_once))
    except ValidationError as error:
        raise BadLine("; ".join(_told(one) for one in error.errors()[:3])) from error
    except (ValueError, RecursionError) as error:
        raise BadLine(f"no JSON object: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


def _told(one: Any) -> str:
    field = ".".join(str(part) for part in one["loc"]) or "line"
    if one["type"] == "missing":
        return f"{field}: is missing"
    return f"{field}={str(one['input'])[:80]!r}: {one['msg'].lower()}"


# ---- What an outcome is worth, with weights that a user may change.


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWeights:
    """Rewards of a decision, which add up. fast: of a success within `fast_ms`."""

    success: float = 1.0
    failure: float = -0.5
    crash: float = -1.0
    step: float = -0.01
    fast: float = 0.2
    fast_ms: float = 100.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "RewardWeights":
        """Return weights from settings; raises ConfigurationError that names the key."""
        known = {field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ConfigurationError(f"reward.{name}: unknown; known: {', '.join(sorted(known))}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
                raise ConfigurationError(f"reward.{name}={value!r}: must be a number up to 1e6")
        return cls(**{name: float(value) for name, value in given.items()})

    def reward(self, result: Result) -> float:
        took = result.execution_time_ms
        fast = result.success and took is not None and took < self.fast_ms
        return (
            self.step
            + (self.success if result.success else self.failure)
            + (self.crash if result.crashed else 0.0)
            + (self.fast if fast else 0.0)
        )
