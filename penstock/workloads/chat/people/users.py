"""People who chat: what somebody asks next, and what they think of each answer."""

from dataclasses import dataclass

import numpy as np

from penstock.workloads.chat.people.chat_texts import ASKED, TOPICS, draw_prompt, topic_of
from penstock.workloads.chat.people.population import Person, Population


@dataclass(frozen=True, slots=True)
class ChatUser:
    """Somebody in a conversation. stays: the chance that the next question is of the same topic."""

    person: Person
    people: Population
    stays: float = 0.7

    def begins(self, rng: np.random.Generator) -> str:
        """Return the first message."""
        return draw_prompt(rng)

    def goes_on(self, rng: np.random.Generator, last: str) -> str:
        """Return the message that follows an answer to `last`."""
        topic = topic_of(last)
        if not topic or rng.random() >= self.stays:
            return draw_prompt(rng)
        first, second = rng.choice(len(TOPICS[topic]), 2, replace=False)
        words = TOPICS[topic]
        return f"{ASKED[int(rng.integers(len(ASKED)))]} {words[first]} {words[second]}"
