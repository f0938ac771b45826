"""What every section of the configuration has in common, and the kinds of numbers it holds."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

MOST: Final = 2**53
"""Bound of every whole number: beyond it JSON, which tells them, loses digits."""
MOST_REAL: Final = 1e9
"""Bound of every real number that has none of its own: as seconds 31 years, what clocks and waits take."""

Positive = Annotated[int, Field(gt=0, le=MOST)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Width = Annotated[int, Field(gt=0, le=2**16)]
"""Of a layer: the square of a larger one, its weights, would fill 64 GiB."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveReal = Annotated[float, Field(gt=0.0, le=MOST_REAL)]
NonNegative = Annotated[float, Field(ge=0.0, le=MOST_REAL)]


@dataclass(frozen=True, slots=True)
class Advanced:
    """Marks a field that hardly any run sets: `--print-config` shows it on request, or where it is set."""


ADVANCED: Final = Advanced()


class Section(BaseModel):
    """A part of the configuration: frozen; unknown keys are errors, and so are infinity and NaN.

    So is true or false where a number is wanted, which would else be read as 1 or 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None, "it is a field that is looked at"
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(value, bool) and not any(
            one in (bool, Any, True, False) for one in (kind, *get_args(kind))
        ):
            raise ValueError("is no number; write one")
        return value

    @classmethod
    def is_advanced(cls, field: str) -> bool:
        """Return whether the field of this name is marked as `ADVANCED`."""
        return ADVANCED in cls.model_fields[field].metadata

    def canonical_json(self, exclude: set[str] | None = None) -> str:
        """Return JSON with sorted keys and no spaces, without those of `exclude`.

        Equal sections have equal text.
        """
        return json.dumps(
            self.model_dump(mode="json", exclude=exclude), sort_keys=True, separators=(",", ":")
        )
