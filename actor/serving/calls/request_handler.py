"""Requests without an episode, and the parts that requests with one share.

read ─► choose a version ─► ask, or fall back ─► write the reply
codec      versions            versions             codec
"""

from collections.abc import Callable

from penstock.actor.serving.calls.request_errors import RequestErrors
from penstock.actor.serving.codec.replies import ReplyWriter
from penstock.actor.serving.codec.requests import RequestReader
from penstock.actor.serving.inference.batcher import Batcher
from penstock.actor.serving.inference.forward_pass import Question
from penstock.actor.serving.versions.answering import Answered, Answerer, OnAnswer
from penstock.actor.serving.versions.fallback import Fallback
from penstock.actor.serving.versions.loaded_versions import LoadedVersions
from penstock.actor.serving.versions.shadow import Shadow, ShadowRecord
from penstock.config.settings import ServingSection
from penstock.protocol.spaces import Dict, Space
from penstock.v1 import policy_pb2 as pb


class RequestHandler:
    """Used by one event loop."""

    def __init__(
        self,
        section: ServingSection,
        spaces: tuple[Space, Space, Dict],
        loaded_versions: LoadedVersions,
        batcher: Batcher,
        record: ShadowRecord | None,
        on_unanswered: Callable[[Answered], None],
    ) -> None:
        """spaces: of observations, of actions, and of what the policy remembers. record: see `Shadow`.

        on_unanswered: see `Answerer`.

        Raises ConfigurationError for a declared fallback that is no action of the space.
        """
        observation, action, state = spaces
        self.reader = RequestReader(section, observation, action, state)
        self.writer = ReplyWriter(action, state)
        self.loaded_versions = loaded_versions
        self.request_errors = RequestErrors()
        fallback, self.shadow = Fallback(section, action), Shadow(batcher, record)
        self.answerer = Answerer(
            loaded_versions, batcher, fallback, self.shadow, self.request_errors.failed, on_unanswered
        )

    async def act(self, request: pb.ActRequest, until_s: float) -> Answered:
        """Answer a request without an episode; raises Refused. until_s: by the clock of the event loop."""
        question = self.reader.read(request)
        if request.version:
            choice = await self.loaded_versions.exactly(request.version)
        else:
            choice = self.loaded_versions.choose(request.client_key)
        return await self.answerer.answer(choice, question, until_s)

    async def act_plain(self, question: Question, until_s: float) -> Answered:
        """Answer a plain request's question as `act` does; raises Refused."""
        return await self.answerer.answer(self.loaded_versions.choose(""), question, until_s)

    def ask(
        self, request: pb.ActRequest, until_s: float, on_answer: OnAnswer, is_gone: Callable[[], bool]
    ) -> None:
        """Ask for a request with neither episode nor version, without waiting; raises Refused.

        on_answer, is_gone: see `Answerer.ask`.
        """
        question = self.reader.read(request)
        self.answerer.ask(
            self.loaded_versions.choose(request.client_key), question, until_s, on_answer, is_gone
        )
