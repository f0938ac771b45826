"""Conversations of people with the run behind the page, and what they say of its answers.

    begin ─► say … ─► rate ─► end          the text server answers; the registry keeps ratings

A thumb is a rating and, while its turn is still open at the text server, the reward of that turn: so the
learner gets it with the tokens that earned it, and drops it where they are stale. Conversations live in
memory and end with the gateway; ratings and counts are on the disk before a call is answered.
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
from penstock.workloads.chat.loop_state import disagreement, folder_of, told
from penstock.workloads.chat.step_process import judge_address
from penstock.workloads.language.prompt import Message
from penstock.workloads.language.reward.reward_client import RewardClient
from penstock.workloads.language.reward.reward_source import RewardError, Sample

# ---- Which answers there were, in a file of SQLite: of which version, whether by the fallback or blocked.

FILE: Final = "chat.sqlite"
INPUT: Final = "input "
"""Before what blocked a message, which was answered by nothing."""
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
GROUP BY version ORDER BY version DESC
"""
_WAIT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """Counts what came of a version, in the order of `_COUNTED`. version 0: the model without an adapter.

    conversations: with an answer that nobody was asked about. blocked: answers, and messages to it, that did
    not pass the guard. asked: answers that somebody was asked about.
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

    name: of the day, as 2026-11-27 in UTC, or of the person, as they rated. well: rated so.
    """

    by: Literal["day", "person"]
    name: str
    conversations: int
    rated: int
    well: int


def hashed(person: str) -> str:
    return hashlib.sha256(person.encode()).hexdigest()


class AnswerBook:
    """The file; any thread may use it. Making it raises OSError or sqlite3.Error where it cannot be made."""

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
        """Note an answer.

        blocked: by what it was blocked, or behind `INPUT` the message to it; "": it passed. person: who was
        answered; "": not known. at_s: Unix seconds; None: now.
        """
        row = (conversation, turn, version, fallback, blocked, time.time() if at_s is None else at_s)
        with closing(self._open()) as opened, opened:
            opened.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", row)
            if person:
                whose = (conversation, hashed(person))
                opened.execute("INSERT OR IGNORE INTO people VALUES (?, ?)", whose)

    def forget(self, person: str) -> None:
        """Forget all conversations of somebody."""
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

    def counts(self) -> list[VersionCounts]:
        """Return what came of each version, newest first."""
        with closing(self._open()) as opened:
            return [VersionCounts(*row) for row in opened.execute(_COUNTED)]

    def by_day_and_person(
        self, rated: Iterable[RatedConversation], *, most_days: int, most_people: int
    ) -> list[TalkCounts]:
        """Return the conversations by day, newest first, then by person who has rated, most talkative first.

        rated: those that somebody rated. A conversation is of the day on which it was answered first.
        """
        rows = [(one.conversation, one.rater, one.is_well) for one in rated]
        with closing(self._open()) as opened:
            opened.execute(_RATED)
            opened.executemany("INSERT INTO rated VALUES (?, ?, ?)", rows)
            opened.commit()  # so that answers are noted meanwhile
            found = opened.execute(_BY_DAY_AND_PERSON, (most_days, most_people))
            return [TalkCounts(*row) for row in found]

    def blocked(self) -> dict[str, int]:
        """Return how often each rule, or the classifier, has blocked."""
        wanted = "SELECT blocked, COUNT(*) FROM answers WHERE blocked != '' GROUP BY blocked ORDER BY blocked"
        with closing(self._open()) as opened:
            return dict(opened.execute(wanted).fetchall())

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._file, timeout=_WAIT_S)


# ---- Which answers somebody is asked to rate: those of which an ensemble of heads is least sure.

SHARE: Final = 0.2
"""Of the answers."""
LEAST: Final = 20
"""Answers that are looked at before somebody is asked."""
REMEMBERED: Final = 200


class Asking:
    """For one event loop."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=REMEMBERED)

    def asks(self, disagreement: float | None) -> bool:
        """Return whether to ask about an answer; None: nothing is known of it."""
        if disagreement is None:
            return False
        lower = sum(one < disagreement for one in self._recent)
        is_asked = len(self._recent) >= LEAST and lower >= (1.0 - SHARE) * len(self._recent)
        self._recent.append(disagreement)
        return is_asked


# ---- What the newest reward model of the loop expects people to say of an answer, where there is one.

log = logging.getLogger(__name__)

DEADLINE_S: Final = 1.0
"""So long an answer waits for what is expected of it."""


class Judge:
    """Used by one event loop. address: returns where the model answers; "" where it does not."""

    def __init__(self, address: Callable[[], str]) -> None:
        self._address = address
        self._clients: dict[str, RewardClient] = {}
        """The one of the newest address."""

    async def shares(self, before: Sequence[dict[str, Any]], answer: str) -> dict[str, float]:
        """Return what is expected, 0 to 1 by head; nothing where no model answers in time."""
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


# ---- How many messages of one person are answered in a minute; beyond it the answer is 429.

MOST_A_MINUTE: Final = 30
MOST_PEOPLE: Final = 4096
"""Of whom is remembered when they asked."""
_WINDOW_S: Final = 60.0


class MessageLimit:
    """For one event loop. now: seconds, monotonic."""

    def __init__(self, most: int = MOST_A_MINUTE, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now = most, now
        self._asked: OrderedDict[str, deque[float]] = OrderedDict()

    def count(self, person: str) -> None:
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
"""Conversations of a person that are remembered at once."""
BLOCKED: Final = "blocked by "
"""In the text of a refusal, before the name of what has blocked."""
_TOO_LONG: Final = "do not fit"
ACCOUNT: Final = "user"
"""Before the number of somebody who has an account."""


class ChatApi:
    """What the routes work with; used by one event loop. Raises ConfigurationError without a state folder."""

    def __init__(self, upstream: Upstream, most_talks: int = MOST_TALKS) -> None:
        if upstream.state is None:
            raise ConfigurationError("state: a chat counts what each version answered; name a folder for it")
        self.upstream, self.most_talks = upstream, most_talks
        self.book = AnswerBook(upstream.state)
        self._talks = OrderedDict[str, bodies.TalkRecord]()
        self._asked, self._asking, self._judge = MessageLimit(), Asking(), Judge(self._judge_address)
        self._served = ServedText(upstream, moved=self._talks.clear)
        self._run: RunSettings | None = None

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
        """Return whether what people say of its answers is refused: its registry was not named."""
        found = await asyncio.to_thread(self.upstream.settings)
        return found is not None and not found.registry

    async def policy(self) -> str:
        run = await self.run()
        return run.policy or (await answered((await self.client()).describe())).policy

    async def kept(self) -> tuple[str, str]:
        """Return the URL of the run's registry, and the policy in it."""
        return (await self.run()).registry, await self.policy()

    def _judge_address(self) -> str:
        try:
            run = self._run = self._run or self.upstream.settings()
        except ConfigurationError:
            return ""  # which is told where something is to be kept
        return "" if run is None or run.folder is None else judge_address(folder_of(run.folder))

    async def close(self) -> None:
        self._judge.close()
        await self._served.close()

    # ------------------------------------------------------------ conversations

    async def begin(self, person: str) -> bodies.TalkRecord:
        """Begin a conversation; the same person gets the same arm. Raises ApiError."""
        client = await self.client()
        started = await answered(client.start_conversation(person[:128], opinions=True))
        talk = bodies.TalkRecord(conversation=started, person=person)
        self._talks[talk.id] = talk
        own = [one for one in self._talks.values() if one.person == person]
        gone = [self._talks.pop(one.id) for one in own[:-MOST_OF_ONE]]  # nobody pushes out what others say
        while len(self._talks) > self.most_talks:
            gone.append(self._talks.popitem(last=False)[1])
        for one in gone:  # the text server has room for so many, of all people
            try:
                await self.end(one)
            except ApiError as error:
                log.info("a conversation was over already", extra={"why": str(error.detail)})
        return talk

    def find(self, person: str, conversation: str) -> bodies.TalkRecord:
        talk = self._talks.get(conversation)
        if talk is None or talk.person != person:
            raise ApiError(404, "conversation: is not remembered here: begin a new one", field="conversation")
        self._talks.move_to_end(conversation)
        return talk

    async def say(
        self, talk: bodies.TalkRecord, text: str | None, *, looks_after: bool = False
    ) -> AsyncIterator[str]:
        """Say something, and yield the answer as events: `part` …, then `answer` or `refused`.

        text: None: answer the last message once more. looks_after: tell what is expected of the answer, too.
        Raises ApiError before the first event.
        """
        if talk.busy.locked():
            raise ApiError(409, "an answer of this conversation is still coming: wait, or stop it")
        newest = talk.newest
        if text is None and newest is None:
            raise ApiError(409, "text: nothing was answered yet: say something", field="text")
        self._asked.count(talk.person)
        said = {"role": "user", "content": text or ""}
        before = list(newest.before) if text is None and newest else [*talk.messages, said]
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
        first = talk.newest if again else None  # its turn is another one where it was rated before
        one = given.answers[0]
        shares = await self._judge.shares(before, str(one.message["content"]))
        answer = bodies.Answered(
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
                "arm": given.arm.name.lower() if given.arm else None,
                "fallback": is_fallback,
                "blocked": bool(blocked),
                "learned": given.learned,
                "finish": one.finish,
                "again": first is not None,
                "asked": answer.asked,
                "expected": told(shares) if looks_after else None,
            },
        )

    async def _asks(
        self, talk: bodies.TalkRecord, answer: bodies.Answered, shares: Mapping[str, float]
    ) -> bool:
        """Return whether to ask about an answer; its turn counts for no arm then, here and at the server."""
        if not self._asking.asks(disagreement(shares)):
            return False
        name = f"asked-{answer.turn}"
        try:
            await talk.conversation.rewards([(answer.turn, 0.0)], request_id=name, asked=True)
        except PolicyError:
            return False  # the conversation is over, or its server has gone
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

    # ------------------------------------------------------------ what people say

    async def thumb(self, talk: bodies.TalkRecord, body: bodies.Thumb) -> bool:
        """Keep a thumb; returns whether the turn may be learned from with it. Raises ApiError."""
        answer = _answer_of(talk, body)
        amount = 1.0 if body.up else -1.0
        number = await self._keep(bodies.rating_of(talk, answer, body, key=bodies.THUMB, score=amount))
        if talk.turns[answer.turn] is not answer:
            return False  # the rating is kept; the turn is another answer to the same messages
        if number <= answer.rated:
            return answer.learned  # a request that came before, or later than the one after it
        answer.rated, more = number, amount - answer.thumb
        if not more:
            return answer.learned
        answer.thumb = amount  # before the call, so that a thumb that comes meanwhile is no second reward
        try:
            late = await talk.conversation.rewards(
                [(answer.turn, more)], request_id=f"thumb-{number}", asked=answer.asked
            )
        except PolicyError:
            answer.thumb -= more
            return False  # the rating is kept; the turn is over, or its server has gone
        return answer.learned and not late

    async def stars(self, talk: bodies.TalkRecord, body: bodies.Stars) -> None:
        answer = _answer_of(talk, body)
        await self._keep(bodies.rating_of(talk, answer, body, key=body.key, score=float(body.stars)))

    async def prefer(self, talk: bodies.TalkRecord, body: bodies.Prefer) -> str:
        """Keep which of two answers is better, go on with it, and return it. Raises ApiError.

        The same choice once more changes nothing, also under another id.
        """
        second = _answer_of(talk, body)
        first = second.other
        if first is None:
            raise ApiError(409, "turn: there is one answer: ask for another one first", field="turn")
        chosen = second.chosen = second.chosen or body  # at once, so that of two requests one chooses
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
            raise ApiError(422, "text: is what was answered: write what it should have been", field="text")
        rejected, response = answer.text, body.text
        await self._keep(
            bodies.rating_of(talk, answer, body, key=bodies.CORRECTED, response=response, rejected=rejected)
        )

    async def export(self, person: str) -> list[dict[str, Any]]:
        return await asyncio.to_thread(bodies.ratings_by, *await self.kept(), person)

    async def forget(self, person: str) -> int:
        """Delete everything that somebody has said of answers; returns how many ratings it was.

        What they said of other policies in the same registry goes, too.
        """
        return await asyncio.to_thread(bodies.delete, (await self.run()).registry, person)

    async def _keep(self, rating: Rating) -> int:
        return await asyncio.to_thread(bodies.store, *await self.kept(), rating)


def person_of(caller: str, me: str) -> str:
    """Return the opaque name of who talks: the same one gets the same arm, and ratings are kept under it.

    A person who signed in is one, whatever their browsers say; who has no account is what theirs says.
    """
    if caller.startswith(f"{ACCOUNT}/"):
        return caller
    return f"{caller}/{me}" if caller else me


def _answer_of(talk: bodies.TalkRecord, body: bodies.OfTurn) -> bodies.Answered:
    answer = talk.answers.get(body.turn)
    if answer is None:
        raise ApiError(404, f"turn={body.turn}: has no answer", field="turn")
    return answer
