"""The application over one run, and what the gateway is told of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from fastapi import FastAPI

from gateway.surface import Site, Upstream, add_error_handlers
from penstock import __version__
from workloads.prompts.http.api import PromptsApi
from workloads.prompts.http.prompt_routes import router

_REPOSITORY: Final = Path(__file__).resolve().parents[3]


def make_app(upstream: Upstream, make_api: Callable[[Upstream], PromptsApi] = PromptsApi) -> FastAPI:
    """Return the application over one run."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        api = app.state.api = make_api(upstream)
        working = asyncio.create_task(api.work(), name="prompts")
        yield
        working.cancel()
        await asyncio.wait([working])
        await api.close()

    app = FastAPI(
        title="Penstock prompts",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        lifespan=life,
    )
    app.include_router(router)
    add_error_handlers(app)
    return app


def site() -> Site:
    """Return what the workload answers with under an address of its own."""
    return Site(
        recipe=_REPOSITORY / "recipes" / "prompts.toml",
        settings=(),
        make_app=make_app,
        open_paths=("/health", "/prompts", "/openapi.json"),
        viewer_paths=frozenset(
            {"/health", "/stats", "/select_action", "/get_distribution", "/embed", "/mutate", "/optimize"}
        ),
    )
