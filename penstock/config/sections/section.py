"""What every section of the configuration has in common, and the kinds of numbers it holds."""

import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveReal = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def canonical_json(self) -> str:
        """Keys sorted, no spaces: equal sections have equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
