"""What every section of the configuration has in common, and the kinds of numbers it holds."""

import json
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveReal = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Advanced:
    """Marks a field that hardly any run sets: `--print-config` shows it on request, or where it is set."""


ADVANCED: Final = Advanced()


class Section(BaseModel):
    """A part of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def is_advanced(cls, field: str) -> bool:
        """Whether the field of this name is marked as `ADVANCED`."""
        return ADVANCED in cls.model_fields[field].metadata

    def canonical_json(self) -> str:
        """Keys sorted, no spaces: equal sections have equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
