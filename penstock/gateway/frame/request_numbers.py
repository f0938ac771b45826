"""Kinds of numbers that a request may hold: neither true nor a text of digits is one."""

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError


def number_alone(value: Any) -> Any:
    """Return a value, unless it is a text or a truth value; raises PydanticCustomError."""
    if isinstance(value, bool | str | bytes):
        raise PydanticCustomError("no_number", "must be a number: neither true or false, nor in quotes")
    return value


NUMERIC: Final = BeforeValidator(number_alone)
"""Of an integer: `7.0` is taken, which a table with gaps writes, and 7.5 is not."""
Number = Annotated[float, Field(strict=True)]
