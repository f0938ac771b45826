"""The page as an ASGI application: four kinds of JSON, and the files of the page itself.

The page offers only GET. A request under another host's name (a page elsewhere whose name was made to lead
here) or from a page of another origin is refused, and so is a browser that was not let in. Everything the
page loads comes from here, and no page may frame it; the content policy forbids the rest.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib import resources
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from launch.ui.admission import PARAMETER, Admission
from launch.ui.catalogue import Catalogue, UnknownRun
from penstock.config.settings import ConfigurationError

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


def make_app(catalogue: Catalogue, *, any_host: bool = False, admission: Admission | None = None) -> FastAPI:
    """Return the application.

    any_host: allow the page to be reached under other names than loopback's. admission: who is let in; None:
    whoever reaches it.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _guard(app, any_host=any_host, admission=admission)
    _serve_page(app)
    _serve_runs(app, catalogue)
    return app


def _guard(app: FastAPI, *, any_host: bool, admission: Admission | None) -> None:
    @app.middleware("http")
    async def check(request: Request, pass_on: Callable[[Request], Awaitable[Response]]) -> Response:
        reply = _refusal(request, any_host=any_host)
        if reply is None and admission is not None:
            reply = _entrance(request, admission)
        if reply is None:
            reply = await pass_on(request)
        reply.headers.update(HEADERS)
        return reply

    @app.exception_handler(UnknownRun)
    async def unknown_run(_request: Request, error: UnknownRun) -> Response:
        return JSONResponse({"detail": f"no run of this name: {error.args[0]}"}, status_code=404)

    @app.exception_handler(RecursionError)
    async def too_deep(_request: Request, _error: RecursionError) -> Response:
        return JSONResponse(
            {"detail": "a file of this run is nested too deeply to be shown"}, status_code=409
        )

    @app.exception_handler(OSError)
    @app.exception_handler(ConfigurationError)
    async def unreadable(_request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, status_code=409)


def _refusal(request: Request, *, any_host: bool) -> Response | None:
    """Return what a request under another name, or of a page elsewhere, is answered."""
    if not any_host and request.url.hostname not in _LOOPBACK:
        return JSONResponse({"detail": "this page answers on loopback only"}, status_code=421)
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        return JSONResponse({"detail": "pages of another origin may not ask"}, status_code=403)
    return None


def _entrance(request: Request, admission: Admission) -> Response | None:
    """Exchange the secret of the address for the cookie, and refuse a browser that has neither."""
    is_known = admission.admits(request.cookies.get(admission.cookie))
    secret = request.query_params.get(PARAMETER)
    if request.url.path == "/" and secret is not None:
        away = RedirectResponse("/", status_code=303)
        session = admission.exchange(secret)
        if session is not None:
            away.set_cookie(admission.cookie, session, httponly=True, samesite="strict")
        if session is not None or is_known:
            return away
    if is_known:
        return None
    told = "open the address that `penstock ui` printed; it lets in one browser: start it again for another"
    return JSONResponse({"detail": told}, status_code=401)


def _serve_page(app: FastAPI) -> None:
    """Serve the files, which are read once.

    Their names are known, so no path is ever built from a request.
    """
    static = resources.files("launch.ui") / "static"
    for prefix, folder in (("/", static), ("/vendor/", static / "vendor")):
        for file in folder.iterdir():
            suffix = "." + file.name.rpartition(".")[2]
            if suffix in _TYPES:
                path = "/" if file.name == "index.html" else f"{prefix}{file.name}"
                app.get(path)(_file(file.read_bytes(), _TYPES[suffix]))


def _file(content: bytes, media_type: str) -> Callable[[], Response]:
    return lambda: Response(content, media_type=media_type)


def _serve_runs(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        """Return every run, newest first."""
        listed = [asdict(run.facts()) for run in catalogue.runs()]
        return _json({"folder": catalogue.folder, "runs": listed})

    @app.get("/api/runs/{name}")
    def detail(name: str) -> Response:
        """Return one run: its progress, its current activity, its end."""
        return _json(catalogue.find(name).detail())

    @app.get("/api/runs/{name}/curve")
    def curve(name: str) -> Response:
        """Return its curve as columns."""
        return _json(catalogue.find(name).curve())

    @app.get("/api/runs/{name}/versions")
    def versions(name: str) -> Response:
        """Return the versions of its policy that were kept, newest first."""
        return _json(catalogue.find(name).versions())


def _json(content: Any) -> Response:
    return JSONResponse(_telling(content))


def _telling(value: Any) -> Any:
    """Replace what JSON does not have: NaN and infinity, and letters of file names that are no text."""
    if isinstance(value, dict):
        return {_telling(key): _telling(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_telling(item) for item in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value
