"""How answers are described: models for the OpenAPI document, with every field that an answer has.

A route names its model in `responses`, so that the document has it and the answer is sent as it was made:
nothing of it is checked or changed on its way. Contract tests and generated calls hold the two together.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """What an answer holds; a field that a model does not name is in none."""

    model_config = ConfigDict(extra="forbid")


def answers(model: Any, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return what a route says of its answer, for `responses`."""
    return {status: {"model": model}}
