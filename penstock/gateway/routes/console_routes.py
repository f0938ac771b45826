"""The console, a page that calls the API as any program does, and the OpenAPI document."""

import re
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from penstock.gateway.frame.pages import SHARED, add_files, add_page, files_in
from penstock.gateway.frame.route_access import PROJECT_HEADER, Access, GuardedRoute
from penstock.gateway.routes.account_routes import ApiDocument

console = APIRouter(route_class=GuardedRoute, tags=["console"])

_FILES: Final = files_in(Path(__file__).parent / "static") | SHARED

add_page(console, "/", _FILES["index.html"])
add_page(
    console,
    "/link",
    _FILES["link.html"],
    name="link_page",
    description=(
        "Return the page on which the holder of a link rates; its secret is behind the `#` of the address."
    ),
)
add_files(console, "/console", _FILES)


# ---- The OpenAPI document.

description = APIRouter(route_class=GuardedRoute, tags=["description"])


@description.get("/api/openapi.json", response_model=ApiDocument)
def openapi(request: Request) -> dict[str, Any]:
    """Return the OpenAPI document of this gateway."""
    content = describe(request.app)
    add_links(content["paths"])
    return content


ERRORS: Final = {
    400: "It cannot be done with what there is.",
    401: "No token, or an invalid one.",
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
"""Errors that any call may answer in addition to those that it declares."""
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
    """Return the OpenAPI document of an application, with who may call each route."""
    content = document_of(app)
    components = content["components"]
    components["securitySchemes"] = _SECURITY
    components["responses"] = {str(status): error_answer(text) for status, text in ERRORS.items()}
    for route in app.routes:
        assert isinstance(route, APIRoute)
        for method in route.methods or ():
            operation = content["paths"][route.path_format][method.lower()]
            access = app.state.access[method, route.path]
            _complete(operation, access)
            _name_path(operation, route.path_format)
            if access not in {Access.ANYBODY, Access.KNOWN} and "{project}" not in route.path:
                operation.setdefault("parameters", []).append(_PROJECT)
    return content


def document_of(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application as FastAPI makes it, with the errors of the gateway."""
    content: dict[str, Any] = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = content.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = ERROR_SCHEMA
    return content


def _name_path(operation: dict[str, Any], path: str) -> None:
    """Describe the path parameters that the function of a route does not declare, such as the project."""
    known = operation.setdefault("parameters", [])
    named = {one["name"] for one in known if one["in"] == "path"}
    for name in re.findall(r"{(\w+)}", path):
        if name not in named:
            known.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})


def error_answer(text: str) -> dict[str, Any]:
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


# ---- Links of OpenAPI, which tell generated clients and tests which answers provide an id for which calls.

_OF_PROJECT: Final = "/api/projects/{project}"
_AGENT: Final = f"{_OF_PROJECT}/agents/{{agent_id}}"
_JOB: Final = f"{_OF_PROJECT}/jobs/{{job}}"
_OF_A_JOB: Final = (
    ("get", _JOB),
    ("get", f"{_JOB}/curve"),
    ("get", f"{_JOB}/versions"),
    ("post", f"{_JOB}/cancel"),
    ("post", f"{_JOB}/control/{{action}}"),
    ("post", f"{_JOB}/promote"),
    ("post", f"{_JOB}/rollback"),
    ("put", f"{_JOB}/traffic"),
)
_SOURCES: Final = (
    ("post", f"{_OF_PROJECT}/jobs", "201", "job", "/id", _OF_A_JOB),
    ("get", f"{_OF_PROJECT}/jobs", "200", "job", "/jobs/0/id", _OF_A_JOB),
    (
        *("get", f"{_JOB}/versions", "200", "version", "/versions/0/version"),
        (("get", f"{_JOB}/versions/{{version}}/weights"),),
    ),
    *(
        (method, path, status, name, pointer, (("delete", f"{_OF_PROJECT}/{name}s/{{{name}}}"),))
        for name, path in (("token", f"{_OF_PROJECT}/tokens"), ("link", f"{_AGENT}/links"))
        for method, status, pointer in (("post", "201", "/id"), ("get", "200", f"/{name}s/0/id"))
    ),
)
"""Method, path, status, name of the id in other paths, JSON pointer to it, calls that take it."""


def add_links(paths: dict[str, Any]) -> None:
    """Add the links to the paths of a document, in place; both ends must be in it."""
    for method, path, status, name, pointer, targets in _SOURCES:
        links = paths[path][method]["responses"][status].setdefault("links", {})
        for target_method, target in targets:
            operation = paths[target][target_method]["operationId"]
            parameters = {name: f"$response.body#{pointer}", "project": "$request.path.project"}
            if "{job}" in path:
                parameters["job"] = "$request.path.job"
            links[operation] = {"operationId": operation, "parameters": parameters}
