"""Conversations of people with the served run, and their ratings of its answers.

    begin ─► say … ─► rate ─► end          the text server answers; the registry stores ratings

A thumb is a rating and, while its turn is still open at the text server, the reward of that turn: the learner
gets it with the tokens that earned it, and drops it when they are stale. Conversations are held in memory and
end with the gateway. Ratings and counts are on disk before a call returns.
"""

import asyncio
import hashlib
import logging
import sqlite3
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from penstock.client import AsyncTextClient, InvalidRequest, PolicyError
from penstock.client.asynchronous import AsyncAnswerStream
from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.event_stream import event
from penstock.gateway.frame.requests import ApiError
from penstock.gateway.upstream import (
    RunSettings,
    ServedText,
    Upstream,
    answered,
    no_registry,
    not_yet,
    of_run,
)
from penstock.registry.ratings import RatedConversation, Rating
from penstock.registry.records import RegistryError
from penstock.workloads.chat.http import chat_bodies as bodies
from penstock.workloads.chat.loop_state import disagreement, folder_of, without_members
from penstock.workloads.chat.step_process import judge_address
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.reward.reward_client import RewardClient
from penstock.workloads.language.reward.reward_source import RewardError, Sample

# ---- A SQLite file of all answers: their version, whether the fallback gave them, whether they were blocked.

FILE: Final = "chat.sqlite"
INPUT: Final = "input "
"""Prefix of the rule that blocked a message; such a message has no answer."""
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS answers (
    conversation TEXT NOT NULL, turn INTEGER NOT NULL, version INTEGER NOT NULL, fallback INTEGER NOT NULL,
    blocked TEXT NOT NULL, at_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS asked (
    conversation TEXT NOT NULL, turn INTEGER NOT NULL, PRIMARY KEY (conversation, turn)
);
CREATE TABLE IF NOT EXISTS people (conversation TEXT PRIMARY KEY, person TEXT NOT NULL);
"""
_RATED: Final = """
CREATE TEMP TABLE rated (conversation TEXT PRIMARY KEY, rater TEXT NOT NULL, is_well INTEGER NOT NULL)
"""
_BY_DAY_AND_PERSON: Final = """
WITH talks AS (
    SELECT people.person AS person, MIN(answers.at_s) AS at_s, rated.rater AS rater, rated.is_well AS is_well
    FROM answers
    LEFT JOIN asked ON asked.conversation = answers.conversation AND asked.turn = answers.turn
    LEFT JOIN people ON people.conversation = answers.conversation
    LEFT JOIN rated ON rated.conversation = answers.conversation
    WHERE asked.turn IS NULL AND blocked NOT LIKE 'input %' GROUP BY answers.conversation
)
SELECT * FROM (
    SELECT 'day', date(at_s, 'unixepoch') AS day, COUNT(*), COUNT(is_well), COALESCE(SUM(is_well), 0)
    FROM talks GROUP BY day ORDER BY day DESC LIMIT ?
)
UNION ALL
SELECT * FROM (
    SELECT 'person', MAX(rater) AS name, COUNT(*), COUNT(is_well), SUM(is_well)
    FROM talks GROUP BY person HAVING person IS NOT NULL AND name > ''
    ORDER BY COUNT(*) DESC, name LIMIT ?
)
"""
_COUNTED: Final = """
SELECT version,
    COUNT(DISTINCT answers.conversation) FILTER (WHERE asked.turn IS NULL AND blocked NOT LIKE 'input %'),
    SUM(blocked NOT LIKE 'input %'), SUM(fallback), SUM(blocked != ''), COUNT(asked.turn)
FROM answers
LEFT JOIN asked ON asked.conversation = answers.conversation AND asked.turn = answers.turn
WHERE answers.at_s >= ?
GROUP BY version ORDER BY version DESC
"""
_WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """Counts the answers of a version, in the order of `_COUNTED`. version 0: the model without an adapter.

    conversations: those with an answer whose rating was not requested. blocked: answers, and messages to the
    version, that the guard blocked. asked: answers whose rating was requested.
    """

    version: int
    conversations: int = 0
    answers: int = 0
    fallbacks: int = 0
    blocked: int = 0
    asked: int = 0


@dataclass(frozen=True, slots=True)
class TalkCounts:
    """Counts conversations, rated or not, of a day or of a person, in the order of `_BY_DAY_AND_PERSON`.

    name: the day in UTC, as 2026-11-27, or the rater's name. rated: conversations with a rating. well: with a
    thumb up.
    """

    by: Literal["day", "person"]
    name: str
    conversations: int
    rated: int
    well: int


def hashed(person: str) -> str:
    return hashlib.sha256(person.encode()).hexdigest()


class AnswerBook:
    """Stores all answers in the file; safe for threads. The constructor raises OSError or sqlite3.Error."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = folder / FILE
        with closing(self._open()) as opened:
            opened.executescript(_TABLES)

    def note(
        self,
        conversation: str,
        turn: int,
        version: int,
        *,
        fallback: bool,
        blocked: str = "",
        person: str = "",
        at_s: float | None = None,
    ) -> None:
        """Record an answer.

        blocked: the rule that blocked it; with the prefix `INPUT`, the rule that blocked the message; "":
        none. person: who was answered; "": unknown. at_s: Unix seconds; None: now.
        """
        row = (conversation, turn, version, fallback, blocked, time.time() if at_s is None else at_s)
        with closing(self._open()) as opened, opened:
            opened.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", row)
            if person:
                whose = (conversation, hashed(person))
                opened.execute("INSERT OR IGNORE INTO people VALUES (?, ?)", whose)

    def forget(self, person: str) -> None:
        """Delete all conversations of a person."""
        with closing(self._open()) as opened, opened:
            for table in ("asked", "answers", "people"):
                opened.execute(
                    f"DELETE FROM {table} WHERE conversation IN "  # noqa: S608 - a name of above
                    "(SELECT conversation FROM people WHERE person = ?)",
                    (hashed(person),),
                )

    def note_asked(self, conversation: str, turn: int) -> None:
        with closing(self._open()) as opened, opened:
            opened.execute("INSERT OR IGNORE INTO asked VALUES (?, ?)", (conversation, turn))

    def counts(self, since_s: float = 0.0) -> list[VersionCounts]:
        """Return the counts of each version, newest first. since_s: Unix seconds, of the first answers."""
        with closing(self._open()) as opened:
            return [VersionCounts(*row) for row in opened.execute(_COUNTED, (since_s,))]

    def by_day_and_person(
        self, rated: Iterable[RatedConversation], *, most_days: int, most_people: int
    ) -> list[TalkCounts]:
        """Return counts by day, newest first, then by rater, most conversations first.

        rated: the rated conversations. A conversation counts on the day of its first answer.
        """
        rows = [(one.conversation, one.rater, one.is_well) for one in rated]
        with closing(self._open()) as opened:
            opened.execute(_RATED)
            opened.executemany("INSERT INTO rated VALUES (?, ?, ?)", rows)
            opened.commit()  # other threads can record answers meanwhile
            found = opened.execute(_BY_DAY_AND_PERSON, (most_days, most_people))
            return [TalkCounts(*row) for row in found]

    def blocked(self) -> dict[str, int]:
        """Return how often each rule, or the classifier, blocked a message or an answer."""
        wanted = "SELECT blocked, COUNT(*) FROM answers WHERE blocked != '' GROUP BY blocked ORDER BY blocked"
        with closing(self._open()) as opened:
            return dict(opened.execute(wanted).fetchall())

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=_WAIT_S)


# ---- Requests for ratings: for the answers on which an ensemble of heads disagrees most.

SHARE: Final = 0.2
"""Share of the answers for which a rating is requested."""
LEAST: Final = 20
"""Answers that are compared before the first request."""
REMEMBERED: Final = 200
"""Newest answers with which an answer is compared."""


class RatingRequests:
    """Decides which answers need a rating; for one event loop."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    def is_wanted(self, disagreement: float | None) -> bool:
        """Return whether an answer needs a rating. disagreement: of the ensemble; None: unknown."""
        if disagreement is None:
            return False
        lower = sum(one < disagreement for one in self._recent)
        is_asked = len(self._recent) >= LEAST and lower >= (1.0 - SHARE) * len(self._recent)
        self._recent.append(disagreement)
        return is_asked


# ---- The rating that the newest reward model of the loop expects for an answer, where there is such a model.

log = logging.getLogger(__name__)

DEADLINE_S: Final = 1.0
"""Longest wait of an answer for its expected rating, in seconds."""


class Judge:
    """A client of the served reward model, for one event loop. address: returns its address; "": none."""

    def __init__(self, address: Callable[[], str]) -> None:
        self._address = address
        self._clients: dict[str, RewardClient] = {}
        """At most one: the client of the newest address."""

    async def shares(self, before: Sequence[dict[str, Any]], answer: str) -> dict[str, float]:
        """Return the expected ratings, 0 to 1, by head; empty where no model answers in time."""
        client = self._client(await asyncio.to_thread(self._address))
        if client is None:
            return {}
        prompt = tuple(Message(str(one["role"]), str(one["content"])) for one in before)
        try:
            return await asyncio.to_thread(client.judge, Sample(prompt=prompt, response=answer))
        except RewardError as error:
            log.warning("an answer was not judged", extra={"why": str(error)})
            return {}

    def close(self) -> None:
        while self._clients:
            self._clients.popitem()[1].close()

    def _client(self, address: str) -> RewardClient | None:
        if address not in self._clients:
            self.close()
            if address:
                self._clients[address] = RewardClient(address, deadline_s=DEADLINE_S)
        return self._clients.get(address)


# ---- The limit of messages per person and minute; a message beyond it gets status 429.

MOST_A_MINUTE: Final = 30
MOST_PEOPLE: Final = 4096
"""People whose message times are remembered."""
_WINDOW_S: Final = 60.0


class MessageLimit:
    """Counts messages, for one event loop. most: per person and minute. now: returns monotonic seconds."""

    def __init__(self, most: int = MOST_A_MINUTE, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now = most, now
        self._asked: OrderedDict[str, deque[float]] = OrderedDict()

    def count(self, person: str) -> None:
        """Count a message; raises ApiError 429 beyond the limit."""
        now_s, asked = self._now(), self._asked.setdefault(person, deque())
        self._asked.move_to_end(person)
        while asked and now_s - asked[0] >= _WINDOW_S:
            asked.popleft()
        if len(asked) >= self._most:
            wait_s = asked[0] + _WINDOW_S - now_s
            raise ApiError(429, f"{self._most} messages a minute are answered: wait a while", retry_s=wait_s)
        asked.append(now_s)
        if len(self._asked) > MOST_PEOPLE:
            self._asked.popitem(last=False)


MOST_TALKS: Final = 1024
MOST_OF_ONE: Final = 32
"""Most open conversations of a person."""
BLOCKED: Final = "blocked by "
"""Stands before the name of the blocking rule in the text of a refusal."""
_TOO_LONG: Final = "do not fit"
ACCOUNT: Final = "user"
"""Prefix of the number of a person with an account."""


class ChatApi:
    """Holds conversations for the routes, in one event loop; ConfigurationError without a state folder."""

    def __init__(self, upstream: Upstream, most_talks: int = MOST_TALKS) -> None:
        if upstream.state is None:
            raise ConfigurationError("state: a chat stores counts of its answers; name a folder for them")
        self.upstream, self.most_talks = upstream, most_talks
        self.book = AnswerBook(upstream.state)
        self._talks = OrderedDict[str, bodies.TalkRecord]()
        self._limit, self._rating_requests = MessageLimit(), RatingRequests()
        self._judge = Judge(self._judge_address)
        self._served = ServedText(upstream, moved=self._talks.clear)
        self._run: RunSettings | None = None
        self._ordinals: dict[int, int] = {}

    # ------------------------------------------------------------ the run

    async def client(self) -> AsyncTextClient:
        found = await self._served.client()
        if found is None:
            raise not_yet("its model is still being made, or its server has not come up")
        return found

    async def run(self) -> RunSettings:
        if self._run is None:
            try:
                self._run = await asyncio.to_thread(self.upstream.settings)
            except ConfigurationError as error:
                raise ApiError(409, str(error)) from error
        if self._run is None or not self._run.registry:
            raise no_registry()
        return self._run

    async def keeps_nothing(self) -> bool:
        """Return whether ratings are refused because the run names no registry."""
        found = await asyncio.to_thread(self.upstream.settings)
        return found is not None and not found.registry

    async def policy(self) -> str:
        run = await self.run()
        return run.policy or (await answered((await self.client()).describe())).policy

    async def ordinal(self, version: int) -> int | None:
        """Return the number of a version for people; None: it is not registered."""
        if version not in self._ordinals:
            try:
                self._ordinals = await asyncio.to_thread(bodies.ordinals, *await self.kept())
            except (ApiError, RegistryError):
                return None
        return self._ordinals.get(version)

    async def kept(self) -> tuple[str, str]:
        """Return the URL of the run's registry, and the policy in it."""
        return (await self.run()).registry, await self.policy()

    def _judge_address(self) -> str:
        try:
            run = self._run = self._run or self.upstream.settings()
        except ConfigurationError:
            return ""  # the error is reported when a rating is to be stored
        return "" if run is None or run.folder is None else judge_address(folder_of(run.folder))

    async def close(self) -> None:
        self._judge.close()
        await self._served.close()

    # ------------------------------------------------------------ conversations

    async def begin(self, person: str) -> bodies.TalkRecord:
        """Begin a conversation; a person always gets the same arm. Raises ApiError."""
        client = await self.client()
        started = await answered(client.start_conversation(person[:128], opinions=True))
        talk = bodies.TalkRecord(conversation=started, person=person)
        self._talks[talk.id] = talk
        own = [one for one in self._talks.values() if one.person == person]
        gone = [self._talks.pop(one.id) for one in own[:-MOST_OF_ONE]]  # never those of others
        while len(self._talks) > self.most_talks:
            gone.append(self._talks.popitem(last=False)[1])
        for one in gone:  # the text server holds a limited number of conversations
            try:
                await self.end(one)
            except ApiError as error:
                log.info("a conversation was over already", extra={"why": str(error.detail)})
        return talk

    def find(self, person: str, conversation: str) -> bodies.TalkRecord:
        talk = self._talks.get(conversation)
        if talk is None or talk.person != person:
            raise ApiError(404, "conversation: is unknown here: begin a new one", field="conversation")
        self._talks.move_to_end(conversation)
        return talk

    async def say(
        self, talk: bodies.TalkRecord, text: str | None, *, looks_after: bool = False
    ) -> AsyncIterator[str]:
        """Send a message, and yield the answer as events: `part` …, then `answer` or `refused`.

        text: of the message; None: answer the last one again. looks_after: the caller is an operator, who
        also gets the answer's expected ratings. Raises ApiError before the first event.
        """
        if talk.busy.locked():
            raise ApiError(409, "an answer of this conversation is still coming: wait, or stop it")
        newest = talk.newest
        if text is None and newest is None:
            raise ApiError(
                409, "text: is missing, and no message can be answered again: send a message", field="text"
            )
        self._limit.count(talk.person)
        message = {"role": "user", "content": text or ""}
        before = list(newest.before) if text is None and newest else [*talk.messages, message]
        if text is not None:
            talk.settle()
        async with talk.busy:
            async for one in self._answer(talk, before, again=text is None, looks_after=looks_after):
                yield one

    async def _answer(
        self, talk: bodies.TalkRecord, before: list[dict[str, Any]], *, again: bool, looks_after: bool
    ) -> AsyncIterator[str]:
        while True:
            stream = talk.conversation.stream(before, regenerate=again)
            try:
                async for part in stream:
                    yield event("part", {"text": part.text})
                yield await self._whole(talk, tuple(before), stream, again=again, looks_after=looks_after)
            except InvalidRequest as error:
                detail = str(error) if error.refusal is None else error.refusal.detail
                if _TOO_LONG in detail and len(before) > 2:
                    before = before[2:]
                    continue
                if BLOCKED in detail:
                    by = detail.partition(BLOCKED)[2].partition(";")[0]
                    version = talk.newest.version if talk.newest else 0
                    await self._note(talk, max(talk.turns, default=-1) + 1, version, blocked=f"{INPUT}{by}")
                yield event("refused", {"detail": detail})
            except PolicyError as error:
                yield event("refused", {"detail": str(of_run(error).detail)})
            finally:
                stream.close()
            return

    async def _whole(
        self,
        talk: bodies.TalkRecord,
        before: tuple[dict[str, Any], ...],
        stream: AsyncAnswerStream,
        *,
        again: bool,
        looks_after: bool,
    ) -> str:
        given = stream.result
        assert given is not None
        first = talk.newest if again else None  # after a rating of the first answer, the turn is a new one
        one = given.answers[0]
        shares = await self._judge.shares(before, str(one.message["content"]))
        answer = bodies.AnswerRecord(
            turn=given.turn,
            version=given.version,
            before=before,
            message=one.message,
            learned=given.learned,
            other=first,
        )
        number = talk.add(answer)
        blocked = "output" if one.finish == "content_filter" else ""
        is_fallback = given.fallback is not None
        await self._note(talk, given.turn, given.version, fallback=is_fallback, blocked=blocked)
        answer.asked = first is None and await self._asks(talk, answer, shares)
        return event(
            "answer",
            {
                "text": answer.text,
                "turn": number,
                "version": given.version,
                "ordinal": await self.ordinal(given.version),
                "arm": given.arm.name.lower() if given.arm else None,
                "fallback": is_fallback,
                "blocked": bool(blocked),
                "learned": given.learned,
                "finish": one.finish,
                "again": first is not None,
                "asked": answer.asked,
                "expected": without_members(shares) if looks_after else None,
            },
        )

    async def _asks(
        self, talk: bodies.TalkRecord, answer: bodies.AnswerRecord, shares: Mapping[str, float]
    ) -> bool:
        """Return whether a rating is requested; the turn then counts for no arm, here and at the server."""
        if not self._rating_requests.is_wanted(disagreement(shares)):
            return False
        name = f"asked-{answer.turn}"
        try:
            await talk.conversation.rewards([(answer.turn, 0.0)], request_id=name, asked=True)
        except PolicyError:
            return False  # the conversation or its server has ended
        await asyncio.to_thread(self.book.note_asked, talk.name, answer.turn)
        return True

    async def _note(
        self, talk: bodies.TalkRecord, turn: int, version: int, *, blocked: str, fallback: bool = False
    ) -> None:
        note = partial(self.book.note, fallback=fallback, blocked=blocked, person=talk.person)
        await asyncio.to_thread(note, talk.name, turn, version)

    async def end(self, talk: bodies.TalkRecord) -> None:
        async with talk.busy:
            self._talks.pop(talk.id, None)
            if talk.answers:
                await answered(talk.conversation.end(request_id="end"))
            else:
                await answered(talk.conversation.abandon())

    # ------------------------------------------------------------ ratings

    async def thumb(self, talk: bodies.TalkRecord, body: bodies.Thumb) -> bool:
        """Store a thumb; returns whether it becomes a reward that is trained on. Raises ApiError."""
        answer = _answer_of(talk, body)
        amount = 1.0 if body.up else -1.0
        number = await self._keep(bodies.rating_of(talk, answer, body, key=bodies.THUMB, score=amount))
        if talk.turns[answer.turn] is not answer:
            return False  # it is stored; the turn holds another answer to the same messages
        if number <= answer.rated:
            return answer.learned  # a repeated request, or one that a later request overtook
        answer.rated, more = number, amount - answer.thumb
        if not more:
            return answer.learned
        answer.thumb = amount  # before the call: a concurrent thumb is no second reward
        try:
            late = await talk.conversation.rewards(
                [(answer.turn, more)], request_id=f"thumb-{number}", asked=answer.asked
            )
        except PolicyError:
            answer.thumb -= more
            return False  # it is stored; the turn or its server has ended
        return answer.learned and not late

    async def stars(self, talk: bodies.TalkRecord, body: bodies.Stars) -> None:
        answer = _answer_of(talk, body)
        await self._keep(bodies.rating_of(talk, answer, body, key=body.key, score=float(body.stars)))

    async def prefer(self, talk: bodies.TalkRecord, body: bodies.Prefer) -> str:
        """Store which of two answers is better, continue with it, and return it. Raises ApiError.

        Repeating a choice, also under another id, changes nothing.
        """
        second = _answer_of(talk, body)
        first = second.other
        if first is None:
            raise ApiError(409, "turn: has one answer only: request a second one first", field="turn")
        chosen = second.chosen = second.chosen or body  # before any await: of two requests one chooses
        if chosen.better != body.better:
            detail = f"better={body.better!r}: the {chosen.better} one was chosen before, and that stays"
            raise ApiError(409, detail, field="better")
        better, worse = (first, second) if chosen.better == "first" else (second, first)
        try:
            await self._keep(bodies.rating_of(talk, better, chosen, key="preferred", rejected=worse.text))
        except (ApiError, RegistryError):
            second.chosen = None
            raise
        if talk.newest is second:
            talk.take(better)
        return better.text

    async def correct(self, talk: bodies.TalkRecord, body: bodies.Correction) -> None:
        answer = _answer_of(talk, body)
        if body.text == answer.text:
            raise ApiError(
                422, "text: equals the answer: write the text that it should have been", field="text"
            )
        rejected, response = answer.text, body.text
        await self._keep(
            bodies.rating_of(talk, answer, body, key=bodies.CORRECTED, response=response, rejected=rejected)
        )

    async def export(self, person: str) -> list[dict[str, Any]]:
        return await asyncio.to_thread(bodies.ratings_by, *await self.kept(), person)

    async def forget(self, person: str) -> int:
        """Delete all ratings of a person, of every policy in the run's registry, and return their number."""
        return await asyncio.to_thread(bodies.delete, (await self.run()).registry, person)

    async def _keep(self, rating: Rating) -> int:
        return await asyncio.to_thread(bodies.store, *await self.kept(), rating)


def person_of(caller: str, me: str) -> str:
    """Return the opaque name of a person, which selects their arm and identifies their ratings.

    caller: the authenticated subject; with an account it alone is the name. me: the name that a browser made
    for a person without an account.
    """
    if caller.startswith(f"{ACCOUNT}/"):
        return caller
    return f"{caller}/{me}" if caller else me


def _answer_of(talk: bodies.TalkRecord, body: bodies.OfTurn) -> bodies.AnswerRecord:
    answer = talk.answers.get(body.turn)
    if answer is None:
        raise ApiError(404, f"turn={body.turn}: has no answer", field="turn")
    return answer
