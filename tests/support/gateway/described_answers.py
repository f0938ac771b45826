"""Holds what an application answers against what its OpenAPI document says, at every call of a test."""

import re
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.testclient import TestClient
from jsonschema import Draft202012Validator, FormatChecker

from penstock.gateway.routes.console_routes import describe

_JSON: Final = "application/json"
_documents = dict[frozenset[str], dict[str, Any]]()


def hold_to_document(client: TestClient, app: FastAPI) -> None:
    """Have a test fail at an answer of a client's that tells of success and is not as described."""

    def hold(reply: Any) -> None:
        if not reply.is_success:
            return
        document, method = _document(app), reply.request.method.lower()
        path = _path_of(document, method, reply.request.url.path)
        described = document["paths"][path][method]["responses"]
        assert str(reply.status_code) in described, f"{path} answers {reply.status_code}"
        kind = reply.headers.get("content-type", "").partition(";")[0]
        content = described[str(reply.status_code)].get("content", {})
        assert kind in content or reply.status_code == HTTPStatus.NO_CONTENT, f"{path} answers {kind}"
        if kind == _JSON and content:
            reply.read()
            whole = content[kind]["schema"] | {"components": document["components"]}
            Draft202012Validator(whole, format_checker=FormatChecker()).validate(reply.json())

    client.event_hooks = {"response": [hold]}


def _document(app: FastAPI) -> dict[str, Any]:
    key = frozenset(f"{method} {path}" for method, path in app.state.access)
    if key not in _documents:
        _documents[key] = describe(app)
    return _documents[key]


def _path_of(document: dict[str, Any], method: str, called: str) -> str:
    fitting = [
        path
        for path, operations in document["paths"].items()
        if method in operations and re.fullmatch(re.sub(r"{\w+}", "[^/]*", path), called)
    ]
    found: str = min(fitting, key=lambda path: path.count("{"))
    return found
