import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import CloneSection, ConfigurationError, PolicySection, PPOSection
from penstock.learner.algorithms.algorithm import Imitator
from penstock.learner.algorithms.clone import Clone
from penstock.learner.algorithms.ppo import PPO
from penstock.learner.batch import Batch
from penstock.learner.feed.log_feed import LogBatch
from penstock.learner.feed.recorded_feed import FeedEnded, RecordedFeed, Recording
from penstock.learner.feed.recording import (
    FRAME_BYTES,
    INDEX,
    Frame,
    Kind,
    RecordingWriter,
    Torn,
    frames_file,
    read_frame,
)
from penstock.policy.policy import build
from penstock.protocol.fragment import Fragment
from penstock.protocol.spaces import Discrete
from penstock.runtime.exit import Fatal
from tests.support.run.small_run import CHARGE, OBSERVATION, SCHEMA, SLOTS, STEPS, fragment, specification

LARGE = 2**40


def numbered(sequence: int) -> Fragment:
    """Of eight valid steps whose reward is the sequence number."""
    shape = (STEPS, SLOTS)
    reward, valid = np.full(shape, sequence, np.float32), np.ones(shape, bool)
    return fragment(1, sequence, reward=reward, valid=valid)


def batch(position: int, sequences: Iterable[int], **over: object) -> dict[str, Any]:
    """Fragments of those sequences, consumed up to `position`."""
    fragments = [numbered(sequence) for sequence in sequences]
    given: dict[str, Any] = {"position": position, "update": position // 2, "of_round": None, "dropped": {}}
    return {"fragments": fragments, **given, **over}


def write(
    folder: Path, batches: Iterable[dict[str, Any]], *, max_bytes: int = LARGE, file_bytes: int = LARGE
) -> None:
    RecordingWriter.begin(folder, specification(), "learner", max_bytes).close()
    writer = RecordingWriter(folder, [], max_bytes, file_bytes)
    for one in batches:
        writer.consumed(**one)
    writer.close()


def feed(folder: Path, algorithm: Any, *, taken: int = 0, seed: int = 0) -> RecordedFeed:
    return RecordedFeed(
        Recording(folder), algorithm, seed=seed, device=torch.device("cpu"), prefetch=2, taken=taken,
        stop=threading.Event(),
    )  # fmt: skip


def everything(of: RecordedFeed) -> list[LogBatch]:
    """All deliveries, as the loop takes them."""
    thread = threading.Thread(target=of.run, daemon=True)
    thread.start()
    found = []
    while True:
        try:
            log_batch = of.take(0.05)
        except FeedEnded:
            break
        if log_batch is not None:
            found.append(log_batch)
    thread.join(10.0)
    return found


def numbers(batch_: Batch | None) -> list[int]:
    assert batch_ is not None
    return [int(reward) for reward in batch_.reward[0, ::2]]


def policy() -> Any:
    return build(OBSERVATION, Discrete(2), PolicySection(hidden_sizes=(4,)), 0)


def ppo(**section: Any) -> PPO:
    return PPO(policy(), PPOSection(batch_steps=2 * CHARGE, **section), seed=0)


def clone(**section: Any) -> Clone:
    return Clone(policy(), CloneSection(batch_steps=2 * CHARGE, **section), seed=0)


@pytest.fixture
def learnt(tmp_path: Path) -> Path:
    """Of a learner: batches of one to three fragments, and one of nothing."""
    batches: Sequence[tuple[int, Sequence[int]]] = [(3, (2, 1, 3)), (4, ()), (5, (5,)), (7, (6, 7))]
    write(tmp_path / "a", [batch(last, of, of_round=index) for index, (last, of) in enumerate(batches)])
    return tmp_path / "a"


@pytest.fixture
def played(tmp_path: Path) -> Path:
    """Of a policy: 21 fragments in no batch."""
    writer = RecordingWriter.begin(tmp_path / "b", specification(), "policy", LARGE)
    for sequence in range(1, 22):
        writer.fragment(numbered(sequence))
    writer.close()
    return tmp_path / "b"


def test_a_learners_batches_are_read_as_they_were_consumed(learnt: Path) -> None:
    found = everything(feed(learnt, ppo()))
    assert [numbers(one.batch) for one in found] == [[2, 1, 3], [5], [6, 7]]
    assert [one.reward for one in found] == [6.0 * CHARGE, 5.0 * CHARGE, 13.0 * CHARGE]
    assert [one.steps for one in found] == [3 * CHARGE, CHARGE, 2 * CHARGE]
    assert all((one.last, one.trained, one.dropped, one.size) == (0, (), {}, 0) for one in found)
    assert [one.round for one in found] == [None] * 3
    lock_step = everything(feed(learnt, ppo(staleness=0)))
    assert [one.round for one in lock_step] == [0, 2, 3]


def test_fragments_without_batches_are_grouped_by_the_algorithm(played: Path) -> None:
    found = everything(feed(played, ppo()))
    assert [numbers(one.batch) for one in found] == [[n, n + 1] for n in range(1, 20, 2)] + [[21]]


def test_an_imitator_reads_every_fragment_in_every_pass_and_never_what_it_validates_on(played: Path) -> None:
    def read(seed: int) -> tuple[list[int], set[int]]:
        algorithm = clone(passes=3, validation=0.2)
        assert isinstance(algorithm, Imitator)
        of = feed(played, algorithm, seed=seed)
        of.hold_out()
        order = [number for one in everything(of) for number in numbers(one.batch)]
        return order, set(numbers(algorithm._held_out))

    order, held = read(0)
    assert len(held) == 4
    assert Counter(order) == dict.fromkeys(set(range(1, 22)) - held, 3)
    assert len({tuple(order[start : start + 17]) for start in (0, 17, 34)}) == 3
    assert read(0)[0] == order != read(1)[0]


@pytest.mark.parametrize("taken", [1, 4])
def test_a_resumed_learner_continues_behind_what_it_has_taken(played: Path, taken: int) -> None:
    of = feed(played, clone(passes=2, validation=0.0))
    of.hold_out()
    whole = [numbers(one.batch) for one in everything(of)]
    assert sorted(number for part in whole for number in part) == sorted([*range(1, 22)] * 2)
    rest = everything(feed(played, clone(passes=2, validation=0.0), taken=taken))
    assert [numbers(one.batch) for one in rest] == whole[taken:]
    assert rest[-1].recorded == len(whole)


BATCHES = [(2, (1, 2)), (3, ()), (5, (3, 5)), (6, (4,))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four batches, one of them of nothing, in files of two frames or so."""
    path = tmp_path / "recording"
    write(path, [batch(position, sequences) for position, sequences in BATCHES], file_bytes=1)
    return path


def sequences(recording: Recording) -> list[tuple[int, list[int]]]:
    return [
        (one.entry.position, [header.sequence for header, _ in recording.load(one.fragments)])
        for one in recording.batches
    ]


EVERYTHING = [(position, list(numbers)) for position, numbers in BATCHES]


def test_recorded_fragments_are_read_unchanged(folder: Path) -> None:
    recording = Recording(folder)
    assert sequences(recording) == EVERYTHING
    assert recording.specification.encode() == specification().encode()
    for entry, number in zip(recording.fragments, (1, 2, 3, 5, 4), strict=True):
        path = frames_file(folder, entry.file)
        with path.open("rb") as file:
            file.seek(entry.offset)
            frame = read_frame(file)
        assert frame is not None
        assert frame.body == numbered(number).payload
    assert len(list(folder.glob("*.frames"))) == 4


def test_a_lost_index_is_found_again(folder: Path) -> None:
    whole = (folder / INDEX).read_text()
    for text in ("", whole[: len(whole) // 2], whole[: len(whole) // 2] + '{"kind'):
        (folder / INDEX).write_text(text)
        assert sequences(Recording(folder)) == EVERYTHING


@pytest.mark.promise("recording-read-whole-frames")
def test_a_torn_last_record_is_recognised_wherever_it_was_torn(folder: Path, tmp_path: Path) -> None:
    last = Recording(folder).batches[-1]
    start = last.fragments[0].offset
    file = frames_file(folder, last.entry.file)
    data = file.read_bytes()
    for length in range(start, len(data), 7):
        torn = tmp_path / f"torn-{length}"
        shutil.copytree(folder, torn)
        frames_file(torn, last.entry.file).write_bytes(data[:length])
        found = Recording(torn)
        assert sequences(found) == EVERYTHING[:-1]
        assert len(found.fragments) == 4 + (length >= last.fragments[0].end)
        writer = RecordingWriter.go_on(torn, 5, LARGE)
        writer.consumed(**batch(6, (4,)))
        writer.close()
        assert sequences(Recording(torn)) == EVERYTHING
        shutil.rmtree(torn)


@pytest.mark.promise("recording-read-whole-frames")
@pytest.mark.parametrize("at", [0, 5, 20, 400, -1])
def test_a_changed_byte_is_found_and_named(folder: Path, at: int) -> None:
    recording = Recording(folder)
    entry = recording.fragments[1]
    path = frames_file(folder, entry.file)
    data = bytearray(path.read_bytes())
    data[entry.offset + (at if at >= 0 else entry.size - 1)] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(Fatal, match=rf"{path.name}: the fragment at {entry.offset} cannot be used"):
        recording.load(recording.fragments)


def test_a_resumed_learner_cuts_entries_it_will_consume_again(folder: Path) -> None:
    writer = RecordingWriter.go_on(folder, 3, LARGE)
    writer.consumed(**batch(4, (3,)))
    writer.close()
    assert sequences(Recording(folder)) == [(2, [1, 2]), (3, []), (4, [3])]
    RecordingWriter.go_on(folder, 0, LARGE).close()
    assert Recording(folder).fragments == ()


def test_a_full_recording_ends_with_a_whole_batch(tmp_path: Path) -> None:
    write(tmp_path / "measure", [batch(2, (1, 2))])
    measured, folder = Recording(tmp_path / "measure"), tmp_path / "recording"
    size = sum(one.size for one in (*measured.fragments, *(one.entry for one in measured.batches)))
    write(folder, [batch(2, (1, 2)), batch(4, (3, 4)), batch(5, (5,))], max_bytes=size + FRAME_BYTES)
    assert sequences(Recording(folder)) == [(2, [1, 2])]
    writer = RecordingWriter.go_on(folder, 5, LARGE)
    assert writer.is_full
    writer.consumed(**batch(6, (6,)))
    writer.close()
    assert sequences(Recording(folder)) == [(2, [1, 2])]


def test_a_folder_with_a_recording_or_without_one_is_refused_clearly(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds a recording already"):
        RecordingWriter.begin(folder, specification(), "learner", LARGE)
    with pytest.raises(ConfigurationError, match=r"holds no recording\.json"):
        Recording(tmp_path)
    description = folder / "recording.json"
    text = description.read_text()
    description.write_text(text[: len(text) // 2])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Recording(folder)
    description.write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(ConfigurationError, match="format 9, not 1"):
        Recording(folder)


def test_a_recording_with_different_spaces_is_refused(folder: Path) -> None:
    Recording(folder).check_schema(SCHEMA.schema_id)
    with pytest.raises(ConfigurationError, match="recorded from 'run-a' with observations .*has others"):
        Recording(folder).check_schema("another")


def test_a_length_above_the_message_limit_is_reported_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "one"
    data = bytearray(Frame(Kind.FRAGMENT, b"head", b"body").encode())
    data[9:13] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
    with path.open("rb") as file, pytest.raises(Torn, match="no frame begins with"):
        read_frame(file)
