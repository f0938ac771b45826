"""Conversations of people with the run behind the page, and what they say of its answers.

    begin ─► say … ─► rate ─► end          the text server answers; the registry keeps ratings

A thumb is a rating and, while its turn is still open at the text server, the reward of that turn: so the
learner gets it with the tokens that earned it, and drops it where they are stale. Conversations live in
memory and end with the gateway; ratings and counts are on the disk before a call is answered.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.client import AsyncTextClient, InvalidRequest, PolicyError
from penstock.client.text_async import AsyncAnswerStream
from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.surface import (
    ApiError,
    RunSettings,
    ServedText,
    Upstream,
    answered,
    event,
    not_yet,
    of_run,
)
from penstock.registry.ratings import Rating
from penstock.registry.registry_errors import RegistryError
from penstock.workloads.chat.http import kept_ratings
from penstock.workloads.chat.http.answer_book import INPUT, AnswerBook
from penstock.workloads.chat.http.asking import Asking
from penstock.workloads.chat.http.chat_bodies import Correction, OfTurn, Prefer, Stars, Thumb
from penstock.workloads.chat.http.judged import Judge
from penstock.workloads.chat.http.kept_ratings import CORRECTED, THUMB, rating_of
from penstock.workloads.chat.http.message_limit import MessageLimit
from penstock.workloads.chat.http.talk_record import Answered, TalkRecord
from penstock.workloads.chat.loop.ensemble import disagreement, told
from penstock.workloads.chat.loop.loop_state import folder_of
from penstock.workloads.chat.loop.served_judge import judge_address

log = logging.getLogger(__name__)

MOST_TALKS: Final = 1024
MOST_OF_ONE: Final = 32
"""Conversations of a person that are remembered at once."""
BLOCKED: Final = "blocked by "
"""In the text of a refusal, before the name of what has blocked."""
_TOO_LONG: Final = "do not fit"
ACCOUNT: Final = "user"
"""Before the number of somebody who has an account."""


@dataclass(slots=True, eq=False)
class ChatApi:
    """What the routes work with; used by one event loop. Raises ConfigurationError without a state folder."""

    upstream: Upstream
    most_talks: int = MOST_TALKS
    book: AnswerBook = field(init=False)
    _talks: "OrderedDict[str, TalkRecord]" = field(default_factory=OrderedDict)
    _asked: MessageLimit = field(default_factory=MessageLimit)
    _asking: Asking = field(default_factory=Asking)
    _judge: Judge = field(init=False)
    _served: ServedText = field(init=False)
    _run: RunSettings | None = None

    def __post_init__(self) -> None:
        if self.upstream.state is None:
            raise ConfigurationError("state: a chat counts what each version answered; name a folder for it")
        self.book = AnswerBook(self.upstream.state)
        self._judge = Judge(self._judge_address)
        self._served = ServedText(self.upstream, moved=self._talks.clear)

    # ------------------------------------------------------------ the run

    async def client(self) -> AsyncTextClient:
        """Return the client of the text server; raises ApiError 503 where there is none yet."""
        found = await self._served.client()
        if found is None:
            raise not_yet("its model is still being made, or its server has not come up")
        return found

    async def run(self) -> RunSettings:
        """Return what the run was begun with; raises ApiError where its registry is not known."""
        if self._run is None:
            try:
                self._run = await asyncio.to_thread(self.upstream.settings)
            except ConfigurationError as error:
                raise ApiError(409, str(error)) from error
        if self._run is None or not self._run.registry:
            raise ApiError(
                409,
                "the run's registry, which keeps what people say, is not known: serve the run by --run, or "
                "name its registry.url with --set",
            )
        return self._run

    async def keeps_nothing(self) -> bool:
        """Return whether what people say of its answers is refused: its registry was not named."""
        found = await asyncio.to_thread(self.upstream.settings)
        return found is not None and not found.registry

    async def policy(self) -> str:
        """Return the name under which versions and ratings are kept; raises ApiError."""
        run = await self.run()
        return run.policy or (await answered((await self.client()).describe())).policy

    async def kept(self) -> tuple[str, str]:
        """Return the URL of the run's registry, and the policy in it; raises ApiError for unknown ones."""
        return (await self.run()).registry, await self.policy()

    def _judge_address(self) -> str:
        try:
            run = self._run = self._run or self.upstream.settings()
        except ConfigurationError:
            return ""  # which is told where something is to be kept
        return "" if run is None or run.folder is None else judge_address(folder_of(run.folder))

    async def close(self) -> None:
        """Close the connections; the text server gives open conversations up after a while."""
        self._judge.close()
        await self._served.close()

    # ------------------------------------------------------------ conversations

    async def begin(self, person: str) -> TalkRecord:
        """Begin a conversation; the same person gets the same arm. Raises ApiError."""
        client = await self.client()
        started = await answered(client.start_conversation(person[:128], opinions=True))
        talk = TalkRecord(conversation=started, person=person)
        self._talks[talk.id] = talk
        own = [one for one in self._talks.values() if one.person == person]
        gone = [self._talks.pop(one.id) for one in own[:-MOST_OF_ONE]]  # nobody pushes out what others say
        while len(self._talks) > self.most_talks:
            gone.append(self._talks.popitem(last=False)[1])
        for one in gone:
            await self._let_go(one)
        return talk

    def find(self, person: str, conversation: str) -> TalkRecord:
        """Return a conversation of somebody; raises ApiError 404 for one that is not theirs, or forgotten."""
        talk = self._talks.get(conversation)
        if talk is None or talk.person != person:
            raise ApiError(404, "conversation: is not remembered here: begin a new one", field="conversation")
        self._talks.move_to_end(conversation)
        return talk

    async def say(
        self, talk: TalkRecord, text: str | None, *, looks_after: bool = False
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
        before = list(newest.before) if text is None and newest else [*talk.messages, _user(text or "")]
        if text is not None:
            talk.settle()
        async with talk.busy:
            async for one in self._answer(talk, before, again=text is None, looks_after=looks_after):
                yield one

    async def _answer(
        self, talk: TalkRecord, before: list[dict[str, Any]], *, again: bool, looks_after: bool
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
                    await self._note_blocked(talk, by)
                yield event("refused", {"detail": detail})
            except PolicyError as error:
                yield event("refused", {"detail": str(of_run(error).detail)})
            finally:
                stream.close()
            return

    async def _whole(
        self,
        talk: TalkRecord,
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
        answer = Answered(
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
        await asyncio.to_thread(
            self.book.note,
            talk.name,
            given.turn,
            given.version,
            fallback=is_fallback,
            blocked=blocked,
            person=talk.person,
        )
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

    async def _asks(self, talk: TalkRecord, answer: Answered, shares: Mapping[str, float]) -> bool:
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

    async def _note_blocked(self, talk: TalkRecord, by: str) -> None:
        newest = talk.newest
        version = newest.version if newest else 0
        turn = max(talk.turns, default=-1) + 1
        await asyncio.to_thread(
            self.book.note,
            talk.name,
            turn,
            version,
            fallback=False,
            blocked=f"{INPUT}{by}",
            person=talk.person,
        )

    async def _let_go(self, talk: TalkRecord) -> None:
        """End a conversation that is forgotten here: the text server has room for so many, of all people."""
        try:
            await self.end(talk)
        except ApiError as error:
            log.info("a conversation was over already", extra={"why": str(error.detail)})

    async def end(self, talk: TalkRecord) -> None:
        """End a conversation: its turns go to the learner with their rewards. Raises ApiError."""
        async with talk.busy:
            self._talks.pop(talk.id, None)
            if talk.answers:
                await answered(talk.conversation.end(request_id="end"))
            else:
                await answered(talk.conversation.abandon())

    # ------------------------------------------------------------ what people say

    async def thumb(self, talk: TalkRecord, body: Thumb) -> bool:
        """Keep a thumb; returns whether the turn may be learned from with it. Raises ApiError."""
        answer = _answer_of(talk, body)
        amount = 1.0 if body.up else -1.0
        number = await self._keep(rating_of(talk, answer, body, key=THUMB, score=amount))
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

    async def stars(self, talk: TalkRecord, body: Stars) -> None:
        """Keep what somebody thinks of one side of an answer; raises ApiError."""
        answer = _answer_of(talk, body)
        await self._keep(rating_of(talk, answer, body, key=body.key, score=float(body.stars)))

    async def prefer(self, talk: TalkRecord, body: Prefer) -> str:
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
            await self._keep(rating_of(talk, better, chosen, key="preferred", rejected=worse.text))
        except (ApiError, RegistryError):
            second.chosen = None
            raise
        if talk.newest is second:
            talk.take(better)
        return better.text

    async def correct(self, talk: TalkRecord, body: Correction) -> None:
        """Keep what an answer should have been: better than what it was. Raises ApiError."""
        answer = _answer_of(talk, body)
        if body.text == answer.text:
            raise ApiError(422, "text: is what was answered: write what it should have been", field="text")
        await self._keep(
            rating_of(talk, answer, body, key=CORRECTED, response=body.text, rejected=answer.text)
        )

    async def export(self, person: str) -> list[dict[str, Any]]:
        """Return everything that somebody has said of answers, oldest first."""
        return await asyncio.to_thread(kept_ratings.ratings_by, *await self.kept(), person)

    async def forget(self, person: str) -> int:
        """Delete everything that somebody has said of answers; returns how many ratings it was.

        What they said of other policies in the same registry goes, too.
        """
        return await asyncio.to_thread(kept_ratings.delete, (await self.run()).registry, person)

    async def _keep(self, rating: Rating) -> int:
        return await asyncio.to_thread(kept_ratings.store, *await self.kept(), rating)


def person_of(caller: str, me: str) -> str:
    """Return the opaque name of who talks: the same one gets the same arm, and ratings are kept under it.

    A person who signed in is one, whatever their browsers say; who has no account is what theirs says.
    """
    if caller.startswith(f"{ACCOUNT}/"):
        return caller
    return f"{caller}/{me}" if caller else me


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer_of(talk: TalkRecord, body: OfTurn) -> Answered:
    answer = talk.answers.get(body.turn)
    if answer is None:
        raise ApiError(404, f"turn={body.turn}: has no answer", field="turn")
    return answer
