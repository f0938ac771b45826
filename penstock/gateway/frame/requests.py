"""Parts of requests and answers: strict numbers, texts, and the bodies that are sent."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr
from pydantic_core import PydanticCustomError

# ---- Kinds of numbers that a request may hold: neither true nor a text of digits is one.


def number_alone(value: Any) -> Any:
    """Return a value, unless it is a text or a truth value; raises PydanticCustomError."""
    if isinstance(value, bool | str | bytes):
        raise PydanticCustomError("no_number", "must be a number: neither true or false, nor in quotes")
    return value


NUMERIC: Final = BeforeValidator(number_alone)
"""Of an integer: `7.0` is taken, which a table with gaps writes, and 7.5 is not."""
Number = Annotated[float, Field(strict=True)]


def storable(text: str) -> str:
    """Return a text that every database can store; raises ValueError for NUL and half a surrogate pair."""
    if "\0" in text:
        raise ValueError("must not contain the character NUL")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be valid Unicode text, without half a surrogate pair") from error
    return text


Text = Annotated[str, AfterValidator(storable)]
Line = Annotated[Text, Field(min_length=1, max_length=64)]
Secret = Annotated[SecretStr, Field(max_length=4096)]


class Body(BaseModel):
    """The body of a request; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


def example(**said: Any) -> ConfigDict:
    """Return the configuration of a body that has an example in the document; contract tests send each."""
    return ConfigDict(json_schema_extra={"examples": [said]})


# ---- How answers are described: models for the OpenAPI document, with every field that an answer has.


class Answer(BaseModel):
    """What an answer holds; a field that a model does not name is in none. It is made of rows, too."""

    model_config = ConfigDict(extra="forbid", from_attributes=True)


def answers(model: Any, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return what a route says of its answer, for `responses`."""
    return {status: {"model": model}}
