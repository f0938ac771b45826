"""What a server puts on record of the answers that it gives and of the columns that it sends."""

from pathlib import Path

import pytest

from penstock.actor.link.ack_journal import Run, SampleJournal, digest, read_samples, runs_of, sample_files
from penstock.launch.audit.books import SessionHistory
from tests.support.language.text_stand import TextStand, tool, user


@pytest.mark.promise("token-trained-conversations-sampled")
async def test_an_answer_is_on_record_before_it_leaves_and_a_column_holds_the_same(
    stand: TextStand, tmp_path: Path
) -> None:
    assert stand.experience is not None
    journal = SampleJournal(tmp_path, "text", "server", stand.conversations.episodes.server)
    stand.experience._journal = journal
    (path,) = (place := sample_files([tmp_path]))
    conversation = stand.start()
    first = await stand.say(conversation, user(), count=2)
    (line,) = read_samples(path)
    assert line is not None
    assert line.runs == tuple(Run(1, digest(one.ids)) for one in first.answers)
    assert line.conversation == conversation.rpartition("-")[0]
    await stand.publish(2)
    answer = first.answers[1].message
    second = await stand.say(conversation, user(), answer, tool("3", answer.tool_calls[0]))
    stand.conversations.end(conversation, "", terminated=True, abandoned=False, reward=1.0)
    (fragment,) = stand.fragments()
    runs = [Run(1, digest(first.answers[1].ids)), Run(2, digest(second.answers[0].ids))]
    assert runs_of(fragment) == runs
    sent = list(read_samples(place[0]))[-1]
    assert sent is not None
    assert sent.runs == tuple(runs)
    assert sent.sha256
    stand.conversations.close()


async def test_a_conversation_of_older_weights_may_end_after_one_of_newer(
    stand: TextStand,
) -> None:
    first, history = stand.start("first"), SessionHistory(session=1)
    await stand.say(first, user())
    await stand.publish(2)
    second = stand.start("second")
    await stand.say(second, user())
    for conversation in (second, first):
        stand.conversations.end(conversation, "", terminated=True, abandoned=False, reward=1.0)
    third = stand.start("third")
    await stand.say(third, user())
    stand.conversations.end(third, "", terminated=True, abandoned=False, reward=1.0)
    fragments = stand.fragments()
    assert [one.header.oldest_version for one in fragments] == [2, 1, 2]
    for sequence, one in enumerate(fragments, 1):
        slots = [(slot.slot_id, slot.episode_id, slot.first_step) for slot in one.header.slots]
        weights = [(span.version, span.update) for span in one.header.weights]
        assert list(history.follow(sequence, slots, weights)) == []
