"""The application over one run, and what the gateway is told of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from penstock.gateway.frame.api_errors import add_handlers as add_error_handlers
from penstock.gateway.frame.envelope import bare_app
from penstock.gateway.routes.console_routes import page_router
from penstock.gateway.routes.description_routes import ERROR_SCHEMA, error_answer
from penstock.gateway.sites.site import Site, Upstream
from penstock.workloads.prompts.http.prompt_routes import router
from penstock.workloads.prompts.http.prompts_api import PromptsApi

_OF_CONSOLE: Final = frozenset({"console.css", "elements.js", "icon.svg"})

_ERRORS: Final[dict[int | str, str]] = {
    400: "The body cannot be read.",
    401: "No token of the project, where the API is reached from other machines.",
    403: "A page of another origin, or a token whose role does not suffice.",
    404: "There is no such checkpoint.",
    408: "The body came too slowly.",
    409: "The run refuses it; `detail` says why.",
    413: "The body is too large.",
    415: "The body is said to be no JSON.",
    421: "The request names another host.",
    422: "A field is wrong.",
    429: "Too many requests, or too many steps wait for an update; `Retry-After` says when to try again.",
    502: "The run does not understand the gateway, or a source of rewards or embeddings gives none.",
    503: "The run is not ready; `Retry-After` says when to try again.",
    504: "The run did not answer in time; what was asked for still goes on.",
}
_PACKAGE: Final = Path(__file__).resolve().parents[3]


def make_app(upstream: Upstream, make_api: Callable[[Upstream], PromptsApi] = PromptsApi) -> FastAPI:
    """Return the application over one run."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        api = app.state.api = make_api(upstream)
        working = asyncio.create_task(api.keep_house(), name="prompts")
        yield
        working.cancel()
        await asyncio.wait([working])
        await api.close()

    app = bare_app("Penstock prompts", life, openapi_url="/openapi.json")
    app.include_router(router, responses={status: error_answer(text) for status, text in _ERRORS.items()})
    static = Path(__file__).parent / "static"
    app.include_router(page_router("/prompts", static, "index.html", _OF_CONSOLE))
    add_error_handlers(app)
    app.openapi = lambda: _described(app)  # type: ignore[method-assign]
    return app


def _described(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the one shape of errors."""
    if app.openapi_schema is None:
        content = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = content["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["Error"] = ERROR_SCHEMA
        app.openapi_schema = content
    return app.openapi_schema


def site() -> Site:
    """Return what the workload answers with under an address of its own."""
    return Site(
        recipe=_PACKAGE / "recipes" / "prompts.toml",
        settings=(),
        make_app=make_app,
        open_paths=("/health", "/openapi.json", "/prompts"),
        page="/prompts",
        viewer_paths=frozenset(
            {"/health", "/stats", "/select_action", "/get_distribution", "/embed", "/mutate", "/optimize"}
        ),
    )
