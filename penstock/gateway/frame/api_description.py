"""What the gateway says of its own calls: OpenAPI, from the routes and the table of who may call them."""

import re
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from penstock.gateway.frame.route_access import PROJECT_HEADER, Access

ERRORS: Final = {
    400: "It cannot be done with what there is.",
    401: "No token, or one that does not count any more.",
    403: "The caller's role does not suffice.",
    404: "There is no such thing, or none of the caller's.",
    408: "The body came too slowly.",
    409: "The state does not admit it.",
    413: "The body is too large.",
    421: "The request names another host.",
    422: "A field is wrong.",
    429: "Too many requests; `Retry-After` says when to try again.",
    503: "A database does not answer; `Retry-After` says when to try again.",
}
"""What any call may answer beside what it declares itself."""
ERROR_SCHEMA: Final = {
    "type": "object",
    "required": ["error", "detail", "field"],
    "properties": {
        "error": {"type": "string", "description": "A word for programs."},
        "detail": {"type": "string", "description": "What is wrong, and what to do."},
        "field": {"type": ["string", "null"], "description": "The field of the request, where it is one."},
    },
}
_PROJECT: Final = {
    "name": PROJECT_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "The project that is meant, for a person who belongs to several.",
}
_SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An access token, or an API token."},
    "basic": {"type": "http", "scheme": "basic", "description": "An API token as the password."},
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application whose routes are all in its table of access."""
    content: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = content.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = ERROR_SCHEMA
    components["securitySchemes"] = _SECURITY
    components["responses"] = {str(status): error_answer(text) for status, text in ERRORS.items()}
    for route in app.routes:
        assert isinstance(route, APIRoute)
        for method in route.methods or ():
            operation = content["paths"][route.path_format][method.lower()]
            access = app.state.access[method, route.path]
            _complete(operation, access)
            _describe_answers(operation, route)
            _name_path(operation, route.path_format)
            if access not in {Access.ANYBODY, Access.KNOWN} and "{project}" not in route.path:
                operation.setdefault("parameters", []).append(_PROJECT)
    return content


def _name_path(operation: dict[str, Any], path: str) -> None:
    """Describe the parts of a path that a route leaves to those who look its caller up."""
    known = operation.setdefault("parameters", [])
    named = {one["name"] for one in known if one["in"] == "path"}
    for name in re.findall(r"{(\w+)}", path):
        if name not in named:
            known.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})


def _describe_answers(operation: dict[str, Any], route: APIRoute) -> None:
    """Leave the models of answers alone: FastAPI has laid them over the types that functions return."""
    for status in route.response_fields:
        content = operation["responses"][str(status)]["content"]["application/json"]
        content["schema"] = _of_model(content["schema"])


def _of_model(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what is of the model in a schema: a reference, a choice of them, or a list of them."""
    for word in ("$ref", "anyOf"):
        if word in schema:
            return {word: schema[word]}
    return {"type": "array", "items": _of_model(schema["items"])}


def error_answer(text: str) -> dict[str, Any]:
    """Return how an answer other than success is described."""
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _complete(operation: dict[str, Any], access: Access) -> None:
    answers = operation["responses"]
    for status in ERRORS:
        answers[str(status)] = {"$ref": f"#/components/responses/{status}"}
    if access is Access.ANYBODY:
        return
    operation["security"] = [{name: []} for name in _SECURITY]
    least = "signed in" if access is Access.KNOWN else f"{access} of the project"
    operation["description"] = f"{operation.get('description', '')}\n\nWho may call it: {least}.".strip()
