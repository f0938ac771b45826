"""Rewards that come after the decision that they are for: taken in, and given out to who evaluates by them.

They lie in the registry under the policy `PROJECT/AGENT`, beside those that came to a server of the policy
too late for training. No training uses them; `penstock traces evaluate --late` does.
"""

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from penstock.gateway.accounts.principal import Membership
from penstock.gateway.feedback.feedback_rows import AgentId, Key, Short, as_lines, late_row
from penstock.gateway.frame.parts import parts_of
from penstock.gateway.frame.requests import NUMERIC, Body, Number, Text, answers, example
from penstock.gateway.frame.route_access import GuardedRoute, member_of
from penstock.gateway.routes.feedback_routes import MAX_EXPORTED, After, JsonLines, Limit, Stored, rater_of
from penstock.registry.feedback import MAX_EPISODE_ID_LENGTH

router = APIRouter(route_class=GuardedRoute, tags=["feedback"])

MAX_REWARDS: Final = 1000

Member = Annotated[Membership, Depends(member_of)]


class LateReward(Body):
    """A reward for one step of an episode, counted from 0; several of a step add up.

    request: a key under which it is stored once, however often it comes.
    """

    episode: Annotated[Text, Field(min_length=1, max_length=MAX_EPISODE_ID_LENGTH)]
    step: Annotated[int, Field(ge=0, lt=2**53), NUMERIC]
    amount: Annotated[Number, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
    request: Key | None = None


class LateRewards(Body):
    """Rewards that come together. rater: the user whom the caller speaks for."""

    model_config = example(rewards=[{"episode": "episode-1", "step": 4, "amount": 1.0}])

    rewards: Annotated[list[LateReward], Field(min_length=1, max_length=MAX_REWARDS)]
    rater: Short = ""


@router.post(
    "/api/projects/{project}/agents/{agent_id}/late-rewards", status_code=201, responses=answers(Stored, 201)
)
def take_late(request: Request, member: Member, agent_id: AgentId, body: LateRewards) -> dict[str, int]:
    """Store late rewards, all or none.

    The oldest of a rater give way beyond 250,000; beyond a million in all, of the project that has most.
    """
    parts = parts_of(request)
    parts.registry.add_feedback(
        f"{member.project}/{agent_id}",
        [(one.episode, one.step, one.amount) for one in body.rewards],
        caller=rater_of(parts, member, body.rater),
        request_keys=[one.request for one in body.rewards],
    )
    return {"stored": len(body.rewards)}


@router.get("/api/projects/{project}/agents/{agent_id}/late-rewards", response_class=JsonLines)
def late_rewards(
    request: Request,
    member: Member,
    agent_id: AgentId,
    after: After = 0,
    limit: Limit = MAX_EXPORTED,
) -> Response:
    """Return late rewards behind number `after`, oldest first; ask on with the last `number`.

    Those that came to a server of the policy are among them. An answer without a row is the end.
    """
    found = parts_of(request).registry.feedback(f"{member.project}/{agent_id}", after, limit)
    return JsonLines(as_lines(late_row(one) for one in found))
