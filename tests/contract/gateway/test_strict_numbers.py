"""A number in a body is a number: neither true, nor a text of digits, whatever the call."""

from collections.abc import Iterator
from typing import Any, Final

import pytest
from pydantic import BaseModel, ValidationError

import penstock.gateway.application
import penstock.launch.ui.application
import penstock.workloads.chat.http.chat_bodies
import penstock.workloads.goals.http.goals_service
from penstock.gateway.frame.requests import Body
from penstock.gateway.store.tables import Role
from penstock.workloads.language.serving.chat_forms import ChatRequest, Extension, RewardRequest
from penstock.workloads.prompts.http import api_bodies
from penstock.workloads.rlhf.policy_service import TrainingRequest
from tests.support.gateway.small_gateway import SmallGateway

KNOWN_ELSEWHERE: Final = {(TrainingRequest, "maxSteps"), (TrainingRequest, "learningRate")}
"""Programs that know the original service may have sent them as texts."""
LOADED: Final = (
    penstock.gateway.application,
    penstock.launch.ui.application,
    penstock.workloads.chat.http.chat_bodies,
    penstock.workloads.goals.http.goals_service,
)
"""What defines bodies."""


def kinds(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Bodies of that base."""
    for one in base.__subclasses__():
        yield one
        yield from kinds(one)


def numbers() -> Iterator[tuple[type[BaseModel], str]]:
    """Every field of a body that is a number, and its body."""
    prompts = [one for name, one in vars(api_bodies).items() if name.endswith("Request")]
    for body in {
        *kinds(Body), *prompts, ChatRequest, Extension, RewardRequest,
    }:  # fmt: skip
        for name, schema in body.model_json_schema(by_alias=False).get("properties", {}).items():
            said = {one.get("type") for one in (schema, *schema.get("anyOf", ()))}
            if said & {"integer", "number"}:
                yield body, name


def is_refused(body: type[BaseModel], name: str, value: Any) -> bool:
    """Whether a value is, by the name of its field."""
    try:
        body.model_validate({name: value})
    except ValidationError as error:
        return any(one["loc"][0] == name for one in error.errors())
    return False


def test_neither_truth_nor_digits_are_a_number() -> None:
    found = set(numbers())
    assert len(found) >= 30
    assert KNOWN_ELSEWHERE <= found
    assert not {(body.__name__, name) for body, name in found if not is_refused(body, name, True)}
    assert {one for one in found if not is_refused(*one, "1")} == KNOWN_ELSEWHERE


@pytest.mark.parametrize("version", [True, False, "7", [7], 7.5, 0])
def test_a_version_that_is_no_number_is_refused_and_nothing_kept(
    small_gateway: SmallGateway, version: Any
) -> None:
    small_gateway.person("ada", "alpha", Role.OWNER)
    ada, path = small_gateway.bearer("ada"), "/api/policies/feedback/my_agent"
    body = {"prompt": "2 + 2?", "response": "4", "score": 1}
    reply = small_gateway.client.post(path, json=body | {"version": version}, headers=ada)
    assert (reply.status_code, reply.json()["field"]) == (422, "version"), reply.text
    assert small_gateway.registry.ratings() == ()
    whole = small_gateway.client.post(path, json=body | {"version": 7.0}, headers=ada)
    assert whole.status_code == 200, whole.text
    assert small_gateway.registry.ratings()[0].rating.version == 7
