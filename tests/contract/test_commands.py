"""Commands of operators in Redis: noted once, answered once, by the commit that contains them."""

import pytest

from penstock.broker.log.learner_log import LearnerLog
from penstock.broker.log.replies import Answer, CommandRefusal, Commit
from penstock.broker.log.script import KEPT_COMMANDS, MAX_PENDING_COMMANDS
from penstock.broker.log.store import Store
from penstock.protocol.refusal import Refused
from penstock.v1 import control_pb2 as pb
from tests.support.run.store_run import open_run, reconnect
from tests.support.storage.redis_server import RedisServer


def done(number: int, request_id: str) -> Answer:
    """What a commit says."""
    return Answer(number=number, request_id=request_id, detail="done", checkpoint_id=f"c{number}")


def commit(*answers: Answer, number: int = 1) -> Commit:
    """A checkpoint that contains what was done."""
    return Commit(checkpoint_id=f"c{number}", manifest_sha256="0" * 64, position=0, trim=0, answers=answers)


@pytest.mark.promise("command-operator-done-once")
async def test_a_request_id_is_one_command(store: Store, log: LearnerLog) -> None:
    before = log.renew().revision
    first, is_new = await store.command("restore", "good", "id-1", "why")
    again, is_new_again = await store.command("restore", "good", "id-1")
    assert (first, is_new, is_new_again) == (again, True, False)
    assert (first.number, first.answer, first.argument) == (1, None, "good")
    assert log.renew().revision == before + 1
    with pytest.raises(Refused, match=r"invalid.*restore good"):
        await store.command("restore", "other", "id-1")
    second, _ = await store.command("flush", "8", "id-2")
    assert second.number == 2
    assert log.commands() == [first, second]
    assert log.snapshot().command == 2


@pytest.mark.promise("command-operator-done-once")
async def test_a_commit_answers_what_it_contains(store: Store, log: LearnerLog) -> None:
    command, _ = await store.command("restore", "good", "id-1")
    answer = done(command.number, "id-1")
    log.commit(commit(answer))
    log.commit(commit(answer))
    assert (await store.command("restore", "good", "id-1"))[0].answer == answer
    assert log.snapshot().commits == (commit(answer),)
    assert Commit.decode(commit(answer).encode()) == commit(answer)


async def test_a_learner_that_is_fenced_answers_nothing(
    store: Store, log: LearnerLog, redis_url: str
) -> None:
    command, _ = await store.command("restore", "good", "id-1")
    other = open_run(redis_url)
    answer = done(command.number, "id-1")
    with pytest.raises(Refused, match="fenced"):
        log.commit(commit(answer))
    with pytest.raises(Refused, match="fenced"):
        log.answer(answer)
    assert other.commands()[0].answer is None
    other.close()


async def test_a_refusal_is_answered_at_once(store: Store, log: LearnerLog) -> None:
    command, _ = await store.command("restore", "nothing", "id-1")
    refused = Answer(number=1, request_id="id-1", detail="no such name", refusal=CommandRefusal.NAME)
    log.answer(refused)
    assert (await store.command("restore", "nothing", "id-1"))[0].answer == refused
    assert command.number == 1


async def test_commands_that_wait_and_those_that_are_kept_are_bounded(store: Store, log: LearnerLog) -> None:
    for number in range(1, MAX_PENDING_COMMANDS + 1):
        await store.command("checkpoint", "", f"id-{number}")
    with pytest.raises(Refused, match="full: commands"):
        await store.command("checkpoint", "", "one-more")
    for number in range(1, MAX_PENDING_COMMANDS + 1):
        log.answer(done(number, f"id-{number}"))
    for number in range(MAX_PENDING_COMMANDS + 1, KEPT_COMMANDS + 2):
        command, _ = await store.command("checkpoint", "", f"id-{number}")
        log.answer(done(command.number, f"id-{number}"))
    assert [command.number for command in log.commands()] == [*range(2, KEPT_COMMANDS + 2)]
    again, is_new = await store.command("checkpoint", "", "id-1")
    assert (again.number, is_new) == (KEPT_COMMANDS + 2, True)


async def test_a_redis_that_went_back_draws_no_number_twice(
    redis_server: RedisServer, store: Store, log: LearnerLog
) -> None:
    for number in (1, 2):
        await store.command("checkpoint", "", f"id-{number}")
    log.commands()
    redis_server.kill()
    redis_server.forget()
    redis_server.start()
    await reconnect(store)
    log.renew()
    log.reopen(log.snapshot())
    assert log.commands() == []
    command, is_new = await store.command("checkpoint", "", "id-2")
    assert (command.number, is_new) == (3, True)
    log.commit(commit(done(2, "id-2")))
    assert log.commands()[0].answer is None, "a command that Redis lost is not made up by its answer"


async def test_before_a_run_there_is_nothing_to_command(store: Store) -> None:
    with pytest.raises(Refused, match="not_ready"):
        await store.command("checkpoint", "", "id-1")


def test_refusals_have_the_numbers_of_the_protocol() -> None:
    names = {name.removeprefix("COMMAND_REFUSAL_"): number for name, number in pb.CommandRefusal.items()}
    assert {one.name: one.value for one in CommandRefusal} == {k: v for k, v in names.items() if v}
