"""Which caller may call which route: the one table, and the routes that keep to it.

A route that is not in the table is refused when the application is made, and so is a line without its route.
The caller is known, and their role looked up, before anything of the body is read.
"""

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute

from penstock.gateway.accounts.account_errors import Forbidden, Unauthenticated
from penstock.gateway.accounts.principal import Membership, Principal
from penstock.gateway.frame.parts import parts_of
from penstock.gateway.store.tables import Role

PROJECT_HEADER: Final = "Penstock-Project"


class Access(StrEnum):
    """Who may call a route: anybody, who has signed in, or a member of the project in this role or above.

    Of a route without `{project}` in its path, the project is the token's, or the one that the header
    `Penstock-Project` names, or the only one that a person belongs to.
    """

    ANYBODY = "anybody"
    KNOWN = "known"
    VIEWER = "viewer"
    EDITOR = "editor"
    OWNER = "owner"


Table = Mapping[tuple[str, str], Access]

ACCESS: Final[Table] = {
    ("GET", "/"): Access.ANYBODY,
    ("GET", "/link"): Access.ANYBODY,
    ("GET", "/console/{file}"): Access.ANYBODY,
    ("GET", "/api/health"): Access.ANYBODY,
    ("GET", "/api/openapi.json"): Access.ANYBODY,
    ("POST", "/api/auth/token"): Access.ANYBODY,
    ("POST", "/api/auth/sign-up"): Access.ANYBODY,
    ("GET", "/api/auth/oidc"): Access.ANYBODY,
    ("POST", "/api/auth/oidc"): Access.ANYBODY,
    ("GET", "/api/auth/oidc/callback"): Access.ANYBODY,
    ("POST", "/api/auth/oidc/session"): Access.ANYBODY,
    ("POST", "/api/auth/sign-out"): Access.KNOWN,
    ("POST", "/api/auth/password"): Access.KNOWN,
    ("POST", "/api/auth/join"): Access.KNOWN,
    ("GET", "/api/me"): Access.KNOWN,
    ("GET", "/api/projects/{project}"): Access.VIEWER,
    ("GET", "/api/projects/{project}/members"): Access.VIEWER,
    ("PUT", "/api/projects/{project}/members/{user}"): Access.OWNER,
    ("DELETE", "/api/projects/{project}/members/{user}"): Access.OWNER,
    ("POST", "/api/projects/{project}/invitations"): Access.OWNER,
    ("GET", "/api/projects/{project}/tokens"): Access.OWNER,
    ("POST", "/api/projects/{project}/tokens"): Access.OWNER,
    ("DELETE", "/api/projects/{project}/tokens/{token}"): Access.OWNER,
    ("GET", "/api/projects/{project}/audit"): Access.OWNER,
    ("POST", "/api/policies/feedback/{agent_id}"): Access.EDITOR,
    ("GET", "/api/projects/{project}/agents/{agent_id}/feedback"): Access.VIEWER,
    ("POST", "/api/projects/{project}/agents/{agent_id}/feedback"): Access.EDITOR,
    ("POST", "/api/projects/{project}/agents/{agent_id}/pairs"): Access.EDITOR,
    ("GET", "/api/projects/{project}/agents/{agent_id}/late-rewards"): Access.VIEWER,
    ("POST", "/api/projects/{project}/agents/{agent_id}/late-rewards"): Access.EDITOR,
    ("DELETE", "/api/projects/{project}/raters/{rater}"): Access.OWNER,
    ("POST", "/api/projects/{project}/agents/{agent_id}/conversations"): Access.EDITOR,
    ("GET", "/api/projects/{project}/agents/{agent_id}/satisfaction"): Access.VIEWER,
    ("GET", "/api/projects/{project}/agents/{agent_id}/links"): Access.EDITOR,
    ("POST", "/api/projects/{project}/agents/{agent_id}/links"): Access.EDITOR,
    ("DELETE", "/api/projects/{project}/links/{link}"): Access.EDITOR,
    ("GET", "/api/link"): Access.ANYBODY,
    ("GET", "/api/projects/{project}/templates"): Access.VIEWER,
    ("GET", "/api/projects/{project}/jobs"): Access.VIEWER,
    ("POST", "/api/projects/{project}/jobs"): Access.EDITOR,
    ("GET", "/api/projects/{project}/jobs/{job}"): Access.VIEWER,
    ("GET", "/api/projects/{project}/jobs/{job}/log"): Access.VIEWER,
    ("GET", "/api/projects/{project}/jobs/{job}/curve"): Access.VIEWER,
    ("POST", "/api/projects/{project}/estimates"): Access.EDITOR,
    ("GET", "/api/projects/{project}/events"): Access.VIEWER,
    ("POST", "/api/projects/{project}/jobs/{job}/cancel"): Access.EDITOR,
    ("POST", "/api/projects/{project}/jobs/{job}/control/{action}"): Access.EDITOR,
    ("GET", "/api/projects/{project}/jobs/{job}/versions"): Access.VIEWER,
    ("GET", "/api/projects/{project}/jobs/{job}/versions/{version}/weights"): Access.EDITOR,
    ("POST", "/api/projects/{project}/jobs/{job}/promote"): Access.EDITOR,
    ("POST", "/api/projects/{project}/jobs/{job}/rollback"): Access.EDITOR,
    ("PUT", "/api/projects/{project}/jobs/{job}/traffic"): Access.EDITOR,
    ("POST", "/api/link/ratings"): Access.ANYBODY,
    ("DELETE", "/api/me/feedback"): Access.KNOWN,
}
"""Of the gateway's own routes; a workload adds those of its own."""


class GuardedRoute(APIRoute):
    """A route whose caller is checked before its body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler behind the check."""
        handle, path = super().get_route_handler(), self.path_format

        async def guarded(request: Request) -> Response:
            await _admit(request, path)
            return await handle(request)

        return guarded


def add_routes(app: FastAPI, routers: Sequence[APIRouter], table: Table) -> None:
    """Add the routes of the routers, and their lines of the table.

    Raises ValueError unless the table has every route of the routers, and no other.
    """
    routes = [route for router in routers for route in router.routes]
    loose = [str(getattr(route, "path", route)) for route in routes if not isinstance(route, GuardedRoute)]
    if loose:
        raise ValueError(f"routes {loose}: they are no GuardedRoute, so that no rule says who may call them")
    found = {(method, route.path) for route in guarded(routes) for method in route.methods or ()}
    if found != table.keys():
        missing, spare = sorted(found - table.keys()), sorted(table.keys() - found)
        raise ValueError(f"the table of access lacks {missing} and has {spare} without a route")
    app.router.routes.extend(routes)
    app.state.access.update(table)


def guarded(routes: Sequence[BaseRoute]) -> list[GuardedRoute]:
    """Return those routes whose caller is checked."""
    return [route for route in routes if isinstance(route, GuardedRoute)]


async def _admit(request: Request, path: str) -> None:
    """Find out who calls and whether they may; raises an AccountError."""
    access = request.app.state.access[request.method, path]
    parts = parts_of(request)
    if access is Access.ANYBODY:
        return
    header = request.headers.get("authorization")
    if header is None:
        raise Unauthenticated("send a token: `Authorization: Bearer TOKEN`, or Basic with it as password")
    principal = await run_in_threadpool(parts.accounts.authenticate, header)
    request.state.principal = principal
    parts.limits.admit(principal.subject)
    if access is Access.KNOWN:
        return
    member = await run_in_threadpool(_member, request, principal)
    if not member.role.includes(Role(access)):
        raise Forbidden(f"your role in this project is {member.role}, this needs {access}")
    request.state.member = member


def _member(request: Request, principal: Principal) -> Membership:
    """Return what the caller is in the project that the request is about."""
    accounts = parts_of(request).accounts
    named = request.path_params.get("project") or request.headers.get(PROJECT_HEADER) or principal.project
    if named is not None:
        return accounts.membership(principal, str(named))
    belongs = accounts.projects_of(principal)
    if len(belongs) != 1:
        raise Forbidden(f"you belong to {len(belongs)} projects: name one in the header {PROJECT_HEADER}")
    return belongs[0]


def principal_of(request: Request) -> Principal:
    """Return who calls; of a route whose access is at least KNOWN."""
    found: Principal = request.state.principal
    return found


def member_of(request: Request) -> Membership:
    """Return what the caller is in the project; of a route whose access names a role."""
    found: Membership = request.state.member
    return found


# ---- What the gateway says of its own calls

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
