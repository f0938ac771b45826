"""A second version that is asked what a first one has answered: its answers reach no client."""

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np

from actor.serving.inference.batcher import Batcher
from actor.serving.inference.forward_pass import Answer, Loaded, Question
from actor.serving.versions.shadow_record import ShadowRecord
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.wire.refusal import Refused


class Shadow:
    """Used by one event loop."""

    def __init__(self, batcher: Batcher, record: ShadowRecord | None) -> None:
        """record: where the shadow's answers are kept; None: only the agreement is measured."""
        self._batcher, self._record = batcher, record

    def compare(self, shadow: Loaded, arm: Arm, question: Question, answer: Answer) -> None:
        """Ask `shadow` how likely it finds this answer.

        When the server has no time for that, nothing is asked.
        """
        is_recorded = self._record is not None
        question = replace(question, taken=answer.action, distribution=is_recorded, value=False)
        try:
            future = self._batcher.ask(shadow, question)
        except Refused:
            return
        future.add_done_callback(partial(self._note, arm, question, answer, shadow.version))

    def _note(
        self, arm: Arm, question: Question, answer: Answer, shadow: int, done: "asyncio.Future[Answer]"
    ) -> None:
        if done.cancelled():
            return
        error = done.exception()
        agreement = 0.0 if error else float(np.exp(np.minimum(done.result().log_prob, 0.0)).mean())
        metrics.SHADOW_AGREEMENT.observe(agreement)
        if self._record is not None:
            self._record.note(arm, question, answer, shadow, error or done.result())
