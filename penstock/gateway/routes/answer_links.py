"""What an answer leads to: the calls that take an id out of it, as OpenAPI's links.

A client that is generated from the document, and who tests it, then knows where an id comes from.
"""

from typing import Any, Final

_PROJECT: Final = "/api/projects/{project}"
_AGENT: Final = f"{_PROJECT}/agents/{{agent_id}}"
_JOB: Final = f"{_PROJECT}/jobs/{{job}}"
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
    ("post", f"{_PROJECT}/jobs", "201", "job", "/id", _OF_A_JOB),
    ("get", f"{_PROJECT}/jobs", "200", "job", "/jobs/0/id", _OF_A_JOB),
    (
        *("get", f"{_JOB}/versions", "200", "version", "/versions/0/version"),
        (("get", f"{_JOB}/versions/{{version}}/weights"),),
    ),
    *(
        (method, path, status, name, pointer, (("delete", f"{_PROJECT}/{name}s/{{{name}}}"),))
        for name, path in (("token", f"{_PROJECT}/tokens"), ("link", f"{_AGENT}/links"))
        for method, status, pointer in (("post", "201", "/id"), ("get", "200", f"/{name}s/0/id"))
    ),
)
"""Method, path, status, the name of the id in other paths, its place in the answer, calls that take it."""


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
