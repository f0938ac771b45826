"""Kinds of text that a request may hold."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr


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
