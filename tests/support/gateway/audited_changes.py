"""The calls of a gateway that change something and leave a row in the audit: how each is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from penstock.gateway.jobs import job_queue
from penstock.gateway.store.tables import AuditRow
from tests.support.gateway.small_gateway import PASSWORD, SmallGateway

PROJECT: Final = "/api/projects/alpha"
THEMSELVES: Final = "themselves"


@dataclass
class Stand:
    """A gateway of which `ada` owns `alpha`. folder: of what it keeps. headers: of `ada`."""

    gateway: SmallGateway
    folder: Path
    headers: dict[str, str]

    def send(self, method: str, path: str, **said: Any) -> Any:
        """The answer to the owner's call."""
        headers = self.headers | said.pop("headers", {})
        return self.gateway.client.request(method, path, headers=headers, **said)

    def made(self, path: str, body: Any) -> dict[str, Any]:
        """What a call that makes something answers."""
        reply = self.send("POST", path, json=body)
        assert reply.status_code in {200, 201, 202}, reply.text
        return dict(reply.json())

    def person(self, name: str) -> str:
        """How the audit names a person."""
        return f"user/{self.gateway.person(name)}"

    def rated(self, agent: str = "my_agent", count: int = 1) -> None:
        """The owner gives ratings."""
        for number in range(count):
            body = {"prompt": f"question {number}", "response": "yes", "score": number / 20}
            self.made(f"/api/policies/feedback/{agent}", body)

    def job(self) -> str:
        """The path of a job whose run this gateway has."""
        job = self.made(f"{PROJECT}/jobs", {"agent": "runs", "template": "quick"})["id"]
        dispatcher = self.gateway.parts.dispatcher
        assert dispatcher is not None
        place = dispatcher.runner.place
        self.gateway.accounts.run(lambda session, now: job_queue.claim(session, now, place, 1))
        return f"{PROJECT}/jobs/{job}"

    def rows(self) -> list[AuditRow]:
        """The whole audit, oldest first."""
        return self.gateway.accounts.look(
            lambda session: session.query(AuditRow).order_by(AuditRow.number).all()
        )


@dataclass(frozen=True, kw_only=True)
class Change:
    """A call that changes something, and its row.

    said: how it is sent. subject: how that of the row begins. by: who it names; THEMSELVES: its subject.
    beside: actions of rows that tell of something else that the call does. refused: paths, and how they are
    sent, of the same call where it is refused.
    """

    path: str
    action: str
    subject: str
    by: str
    project: str | None = "alpha"
    said: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    refused: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def sign_in(stand: Stand) -> Change:
    """By a password."""
    form = {"grant_type": "password", "username": "ada", "password": PASSWORD}
    path, wrong = "/api/auth/token", {"data": form | {"password": "wrong"}}
    return Change(
        path=path, action="signed in", subject="session/", by=stand.person("ada"), project=None,
        said={"data": form}, refused=((path, wrong),),
    )  # fmt: skip


def sign_out(stand: Stand) -> Change:
    """Of the session that calls."""
    path = "/api/auth/sign-out"
    return Change(
        path=path, action="signed out", subject="session/", by=stand.person("ada"), project=None
    )  # fmt: skip


def sign_up(stand: Stand) -> Change:
    """By an invitation: an account is added beside the membership."""
    secret = stand.made(f"{PROJECT}/invitations", {"role": "viewer"})["invitation"]
    path, body = "/api/auth/sign-up", {"invitation": secret, "name": "cyd", "password": PASSWORD}
    taken, unknown = body | {"name": "bob"}, body | {"invitation": "none"}
    return Change(
        path=path, action="member set", subject="user/", by=THEMSELVES, said={"json": body},
        beside=("user added",), refused=((path, {"json": taken}), (path, {"json": unknown})),
    )  # fmt: skip


def join(stand: Stand) -> Change:
    """By somebody who has an account."""
    secret = stand.made(f"{PROJECT}/invitations", {"role": "viewer"})["invitation"]
    eve, path = stand.person("eve"), "/api/auth/join"
    headers = stand.gateway.bearer("eve")
    unknown = {"json": {"invitation": "none"}, "headers": headers}
    return Change(
        path=path, action="member set", subject=eve, by=eve,
        said={"json": {"invitation": secret}, "headers": headers}, refused=((path, unknown),),
    )  # fmt: skip


def password(stand: Stand) -> Change:
    """One's own."""
    path, body = "/api/auth/password", {"current": PASSWORD, "new": "another horse battery"}
    ada = stand.person("ada")
    return Change(
        path=path, action="password changed", subject=ada, by=ada, project=None, said={"json": body},
        refused=((path, {"json": body | {"current": "wrong"}}),),
    )  # fmt: skip


def member(stand: Stand, action: str, said: Mapping[str, Any]) -> Change:
    """Another one; the last owner stays."""
    paths = [
        f"{PROJECT}/members/{one}"
        for one in (stand.gateway.people["bob"], stand.gateway.people["ada"], "nothing")
    ]
    return Change(
        path=paths[0], action=action, subject=stand.person("bob"), by=stand.person("ada"), said=said,
        refused=tuple((path, said) for path in paths[1:]),
    )  # fmt: skip


def owned(stand: Stand, path: str, action: str, subject: str, body: Any, *wrong: Any) -> Change:
    """What the owner sends as JSON. wrong: bodies that are refused."""
    return Change(
        path=path, action=action, subject=subject, by=stand.person("ada"), said={"json": body},
        refused=tuple((path, {"json": one}) for one in wrong),
    )  # fmt: skip


def taken_away(stand: Stand, kind: str, action: str, made: str, body: Any) -> Change:
    """A token or a link of the project. made: path at which one is made."""
    id_ = stand.made(f"{PROJECT}/{made}", body)["id"]
    return Change(
        path=f"{PROJECT}/{kind}s/{id_}", action=action, subject=f"{kind}/{id_}", by=stand.person("ada"),
        refused=((f"{PROJECT}/{kind}s/nothing", {}),),
    )  # fmt: skip


def lines(request: str, score: float) -> Mapping[str, Any]:
    """A rating as a line."""
    text = f'{{"prompt": "a", "response": "b", "score": {score}, "request": "{request}"}}'
    return {"content": text, "headers": {"Content-Type": "application/x-ndjson"}}


def import_lines(stand: Stand) -> Change:
    """A line that is none is refused, and so is a key that came with another rating."""
    path = f"{PROJECT}/agents/my_agent/feedback"
    assert stand.send("POST", path, **lines("r-1", 0.5)).status_code == 201
    return Change(
        path=path, action="feedback import", subject="my_agent", by=stand.person("ada"),
        said=lines("r-2", 0.5), refused=((path, lines("r-1", 0.9)), (path, {"content": "none"})),
    )  # fmt: skip


def forget_rater(stand: Stand) -> Change:
    """One who has rated."""
    stand.rated()
    rater = stand.gateway.registry.ratings("alpha/my_agent")[0].rating.rater
    path = f"{PROJECT}/raters/{rater}"
    return Change(path=path, action="ratings deleted", subject=f"rater/{rater}", by=stand.person("ada"))


def forget_me(stand: Stand) -> Change:
    """In the one project that the caller belongs to."""
    stand.rated()
    path, by = "/api/me/feedback", stand.person("ada")
    return Change(path=path, action="ratings deleted", subject="rater/", by=by)


def links(stand: Stand) -> Change:
    """A new one."""
    item, path = {"prompt": "a", "response": "b"}, f"{PROJECT}/agents/my_agent/links"
    return owned(stand, path, "feedback link added", "link/", {"items": [item]}, {"items": []})


def submit(stand: Stand) -> Change:
    """A job, of a template that there is."""
    path, body = f"{PROJECT}/jobs", {"agent": "my_agent", "template": "quick"}
    wrong = body | {"template": "none"}, body | {"numbers": {"maxSteps": 0}}
    return owned(stand, path, "job queued", "job/", body, *wrong)


def cancel(stand: Stand) -> Change:
    """A job that waits."""
    job = stand.made(f"{PROJECT}/jobs", {"agent": "my_agent", "template": "quick"})["id"]
    path, nothing = (f"{PROJECT}/jobs/{one}/cancel" for one in (job, "nothing"))
    return Change(
        path=path, action="job cancelled", subject=f"job/{job}", by=stand.person("ada"),
        refused=((nothing, {}),),
    )  # fmt: skip


def steered(stand: Stand, path: str, action: str, body: Any, *wrong: Any) -> Change:
    """A run, and its versions; one that has not begun is not steered, and what is none neither."""
    job = stand.job()
    waits = stand.made(f"{PROJECT}/jobs", {"agent": "waits", "template": "quick"})["id"]
    others = [f"{PROJECT}/jobs/{one}/{path}" for one in (waits, "nothing")]
    change = owned(stand, f"{job}/{path}", action, f"job/{job.rpartition('/')[2]}", body, *wrong)
    return replace(change, refused=(*change.refused, *((one, {"json": body}) for one in others)))


def roll_back(stand: Stand) -> Change:
    """Of a version that was promoted."""
    change = steered(stand, "rollback", "roll back", REASON | {"version": 9}, REASON | {"version": 7})
    stand.made(change.path.replace("rollback", "promote"), REASON | {"version": 9})
    return change


def injector(stand: Stand, path: str, action: str, body: Any, *wrong: Any) -> Change:
    """Of the project."""
    place, nothing = (f"{PROJECT}/injectors/{one}/{path}" for one in ("host", "nothing"))
    change = owned(stand, place, action, "injector/host", body, *wrong)
    return replace(change, refused=(*change.refused, (nothing, {"json": body})))


def train(stand: Stand) -> Change:
    """From enough ratings, by a reward model that there is."""
    stand.rated(count=10)
    path, waits = "/api/policies/train_policy/my_agent", {"headers": {"Prefer": "wait=0"}}
    change = owned(stand, path, "job queued", "job/", {"maxSteps": 2}, {"rewardModel": "v9"})
    few = path.replace("my_agent", "unrated")
    return replace(change, said={**change.said, **waits}, refused=(*change.refused, (few, {"json": {}})))


REASON: Final = {"reason": "a test"}
PATHS: Final = "/api/projects/{project}"
AGENTS: Final = f"{PATHS}/agents/{{agent_id}}"
JOBS: Final = f"{PATHS}/jobs/{{job}}"
INJECTOR: Final = f"{PATHS}/injectors/{{injector}}"
TALKS: Final = {"version": 1, "conversations": ["talk-1"]}
TOKEN: Final = {"name": "ci", "role": "editor"}
LINK: Final = {"items": [{"prompt": "a", "response": "b"}]}
CHANGES: Final[Mapping[str, Callable[[Stand], Change]]] = {
    "POST /api/auth/token": sign_in,
    "POST /api/auth/sign-out": sign_out,
    "POST /api/auth/sign-up": sign_up,
    "POST /api/auth/join": join,
    "POST /api/auth/password": password,
    f"PUT {PATHS}/members/{{user}}": lambda s: member(s, "member set", {"json": {"role": "viewer"}}),
    f"DELETE {PATHS}/members/{{user}}": lambda s: member(s, "member removed", {}),
    f"POST {PATHS}/invitations": lambda s: owned(
        s, f"{PROJECT}/invitations", "invited", "", {"role": "editor"}, {"role": "none"}
    ),
    f"POST {PATHS}/tokens": lambda s: owned(
        s, f"{PROJECT}/tokens", "token added", "token/", TOKEN, TOKEN | {"role": "owner"}
    ),
    f"DELETE {PATHS}/tokens/{{token}}": lambda s: taken_away(s, "token", "token revoked", "tokens", TOKEN),
    f"POST {AGENTS}/feedback": import_lines,
    f"DELETE {PATHS}/raters/{{rater}}": forget_rater,
    "DELETE /api/me/feedback": forget_me,
    f"POST {AGENTS}/conversations": lambda s: owned(
        s, f"{PROJECT}/agents/my_agent/conversations", "conversations told", "my_agent", TALKS,
        TALKS | {"version": 0},
    ),
    f"POST {AGENTS}/links": links,
    f"DELETE {PATHS}/links/{{link}}": lambda s: taken_away(
        s, "link", "feedback link revoked", "agents/my_agent/links", LINK
    ),
    f"POST {PATHS}/jobs": submit,
    f"POST {JOBS}/cancel": cancel,
    f"POST {JOBS}/control/{{action}}": lambda s: steered(
        s, "control/checkpoint", "run: checkpoint", {"name": "before"}, {"name": "refused"}, {"name": "/"}
    ),
    f"POST {JOBS}/promote": lambda s: steered(
        s, "promote", "promote", REASON | {"version": 9}, REASON | {"version": 7}, {"version": 9}
    ),
    f"POST {JOBS}/rollback": roll_back,
    f"PUT {JOBS}/traffic": lambda s: steered(
        s, "traffic", "traffic", REASON | {"latestShare": 0.5}, REASON | {"shadow": 77}
    ),
    "POST /api/policies/train_policy/{agent_id}": train,
    f"PUT {INJECTOR}/auto": lambda s: injector(
        s, "auto", "injector switched", {"on": True}, {"on": "perhaps"}
    ),
    f"POST {INJECTOR}/vetoes": lambda s: injector(
        s, "vetoes", "goal vetoed", {"goalId": "waits"}, {"goalId": "done"}, {"goalId": "none"}
    ),
}  # fmt: skip
"""How each call that leaves a row is made."""
