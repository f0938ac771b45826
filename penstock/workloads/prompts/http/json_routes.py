"""A short way through routes that take JSON alone, for those that programs call at every step.

The framework reads a body with Python's JSON, looks for what else a function needs, and checks what it
answers. A `DirectRoute` does the one thing that its function asks for: its model reads the bytes, and the
answer, a model already, is written as it is. Errors and the description of the API are the same.
"""

import inspect
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from penstock.gateway.surface import ApiError, Handler, JsonRoute


class DirectRoute(JsonRoute):
    """A route of a function of `body`, a model, and perhaps of `request` and `api`; it returns a model."""

    def inner_handler(self) -> Handler:
        """Return a handler that calls the function, without what the framework does for others."""
        function: Any = self.endpoint
        wanted = set(inspect.signature(function).parameters)
        assert {"body"} <= wanted <= {"request", "api", "body"}, function
        model: type[BaseModel] = get_type_hints(function)["body"]

        async def direct(request: Request) -> Response:
            try:
                body = model.model_validate_json(await request.body())
            except ValidationError as error:
                raise RequestValidationError(_of_body(error)) from error
            except ClientDisconnect as error:
                raise ApiError(400, "the body broke off") from error
            given = {"request": request, "api": request.app.state.api, "body": body}
            answer: BaseModel = await function(**{name: given[name] for name in wanted})
            return Response(answer.model_dump_json(), media_type="application/json")

        return direct


def _of_body(error: ValidationError) -> list[dict[str, Any]]:
    """Return what is wrong as the framework tells it, without what was sent."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [{**one, "loc": ("body", *one["loc"])} for one in found]
