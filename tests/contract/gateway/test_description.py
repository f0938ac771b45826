"""The OpenAPI document names every call, whom it admits, and the one shape of errors."""

import json
import re

from penstock.gateway.frame.route_access import ACCESS, Access
from tests.support.gateway.small_gateway import SmallGateway


def test_every_route_is_described_with_what_it_may_answer(small_gateway: SmallGateway) -> None:
    document = small_gateway.get("/api/openapi.json", {}).json()
    described = {
        (method.upper(), path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert described.keys() == ACCESS.keys()
    for place, access in ACCESS.items():
        assert ("security" in described[place]) is (access is not Access.ANYBODY), place
        path = {one["name"] for one in described[place]["parameters"] if one["in"] == "path"}
        assert path == set(re.findall(r"{(\w+)}", place[1])), place
        assert {"404", "409", "422", "429", "503"} <= described[place]["responses"].keys(), place
    references = {part.split('"')[1] for part in json.dumps(document).split('"$ref": ')[1:]}
    for reference in references:
        found = document
        for key in reference.removeprefix("#/").split("/"):
            found = found[key]
    assert "HTTPValidationError" not in json.dumps(document)


def test_an_answer_with_an_id_says_which_calls_take_it(small_gateway: SmallGateway) -> None:
    paths = small_gateway.get("/api/openapi.json", {}).json()["paths"]
    places = {one["operationId"]: path for path, operations in paths.items() for one in operations.values()}
    links = [
        link
        for operations in paths.values()
        for operation in operations.values()
        for answer in operation["responses"].values()
        for link in answer.get("links", {}).values()
    ]
    assert len(links) == 21
    for link in links:
        assert link["parameters"].keys() <= set(re.findall(r"{(\w+)}", places[link["operationId"]]))


def test_a_refusal_has_the_shape_that_is_described(small_gateway: SmallGateway) -> None:
    schema = small_gateway.get("/api/openapi.json", {}).json()["components"]["schemas"]["Error"]
    refused = small_gateway.client.post("/api/auth/token", data={"grant_type": "none"}).json()
    assert refused.keys() == schema["properties"].keys() == set(schema["required"])


def test_the_page_and_its_files_are_served_and_nothing_else(small_gateway: SmallGateway) -> None:
    page = small_gateway.get("/", {})
    assert page.headers["content-type"].startswith("text/html")
    for name, kind in (("console.js", "text/javascript"), ("console.css", "text/css")):
        assert name in page.text
        assert small_gateway.get(f"/console/{name}", {}).headers["content-type"].startswith(kind)
    for name in ("nothing", "../console_routes.py", "..%2fconsole_routes.py", "%2e%2e"):
        assert small_gateway.get(f"/console/{name}", {}).status_code == 404
