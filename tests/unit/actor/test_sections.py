"""What of the actor's section a process decides, whatever a specification says."""

from pathlib import Path

from penstock.actor.specification import overlay
from penstock.config.settings import ActorSection


def test_the_run_cannot_make_an_actor_write_somewhere() -> None:
    told = ActorSection(ack_journal=Path("/somewhere"))
    assert overlay(told, ActorSection()).ack_journal is None
    assert overlay(told, ActorSection(ack_journal=Path("/mine"))).ack_journal == Path("/mine")
