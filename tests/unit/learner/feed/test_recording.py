"""A recording gives back what went in, whatever a crash, a full disk or a flipped bit did to it."""

import shutil
from pathlib import Path

import pytest

from penstock.config.settings import ConfigurationError
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.feed.recording import (
    FRAME_BYTES,
    INDEX,
    Frame,
    FrameEntry,
    Kind,
    RecordingWriter,
    Torn,
    frames_file,
    read_frame,
)
from penstock.runtime.exit import Fatal
from tests.support.run.small_run import SCHEMA, specification
from tests.unit.learner.feed.recorded import LARGE, batch, numbered, write

BATCHES = [(2, (1, 2)), (3, ()), (5, (3, 5)), (6, (4,))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four batches, one of them of nothing, in files of two frames or so."""
    path = tmp_path / "recording"
    write(path, [batch(position, sequences) for position, sequences in BATCHES], file_bytes=1)
    return path


def sequences(recording: Recording) -> list[tuple[int, list[int]]]:
    """Position and fragments of every batch, read and checked."""
    return [
        (one.entry.position, [header.sequence for header, _ in recording.load(one.fragments)])
        for one in recording.batches
    ]


EVERYTHING = [(position, list(numbers)) for position, numbers in BATCHES]


def test_what_went_in_comes_out(folder: Path) -> None:
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


def test_a_resumed_learner_cuts_what_it_will_consume_again(folder: Path) -> None:
    writer = RecordingWriter.go_on(folder, 3, LARGE)
    writer.consumed(**batch(4, (3,)))
    writer.close()
    assert sequences(Recording(folder)) == [(2, [1, 2]), (3, []), (4, [3])]
    RecordingWriter.go_on(folder, 0, LARGE).close()
    assert Recording(folder).fragments == ()


def test_a_full_recording_ends_with_a_whole_batch(tmp_path: Path) -> None:
    size = sum(entry.size for entry in _entries(tmp_path / "measure"))
    folder = tmp_path / "recording"
    write(folder, [batch(2, (1, 2)), batch(4, (3, 4)), batch(5, (5,))], max_bytes=size + FRAME_BYTES)
    assert sequences(Recording(folder)) == [(2, [1, 2])]
    writer = RecordingWriter.go_on(folder, 5, LARGE)
    assert writer.is_full
    writer.consumed(**batch(6, (6,)))
    writer.close()
    assert sequences(Recording(folder)) == [(2, [1, 2])]


def _entries(folder: Path) -> list[FrameEntry]:
    write(folder, [batch(2, (1, 2))])
    recording = Recording(folder)
    return [*recording.fragments, *(one.entry for one in recording.batches)]


def test_a_folder_is_recorded_into_once(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds a recording already"):
        RecordingWriter.begin(folder, specification(), "learner", LARGE)


def test_what_is_no_recording_is_refused_in_words(folder: Path, tmp_path: Path) -> None:
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


def test_a_recording_of_other_spaces_is_refused(folder: Path) -> None:
    Recording(folder).check_schema(SCHEMA.schema_id)
    with pytest.raises(ConfigurationError, match="recorded from 'run-a' with observations .*has others"):
        Recording(folder).check_schema("another")


def test_a_length_beyond_any_message_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "one"
    data = bytearray(Frame(Kind.FRAGMENT, b"head", b"body").encode())
    data[9:13] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
    with path.open("rb") as file, pytest.raises(Torn, match="no frame begins with"):
        read_frame(file)
