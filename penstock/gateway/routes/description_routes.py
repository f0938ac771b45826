"""The description of all calls, for programs and for people who write them."""

from typing import Any

from fastapi import APIRouter, Request

from penstock.gateway.frame.requests import answers
from penstock.gateway.frame.route_access import GuardedRoute, describe
from penstock.gateway.routes.account_routes import ApiDocument
from penstock.gateway.routes.answer_links import add_links

router = APIRouter(route_class=GuardedRoute, tags=["description"])


@router.get("/api/openapi.json", responses=answers(ApiDocument))
def openapi(request: Request) -> dict[str, Any]:
    """Return the OpenAPI document of this gateway."""
    content = describe(request.app)
    add_links(content["paths"])
    return content
