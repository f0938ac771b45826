"""A file or folder that cannot be what the command line wants of it, told as a mistake: key, value, remedy.

What opens files raises OSError, wherever it stands; this is the one place that knows which word of the
command line the file came from.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_REMEDIES: Final = {
    errno.ENOENT: "name one that is there",
    errno.ENOTDIR: "a file stands where a folder is wanted; name another place",
    errno.EISDIR: "is a folder; name a file",
    errno.EEXIST: "a file stands where a folder is wanted; name another place",
    errno.EACCES: "give this user the right to it, or name another place",
    errno.EPERM: "give this user the right to it, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOSPC: "make room, or name a place on another disk",
    errno.EDQUOT: "make room, or name a place on another disk",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "a link leads back to itself; name another place",
    errno.ENXIO: "no process is at the other end; name a regular file",
}

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class _Named:
    """A place that a word of the command line names. key: the option, "" for an argument."""

    key: str
    value: str

    @property
    def place(self) -> Path:
        return Path(self.value).absolute()

    @property
    def said(self) -> str:
        return f"{self.key} {self.value}".strip()

    @property
    def is_on_a_full_disk(self) -> bool:
        there = next(folder for folder in (self.place, *self.place.parents) if folder.exists())
        return os.statvfs(there).f_bavail == 0


def file_mistake(error: OSError, words: Sequence[str]) -> str | None:
    """The mistake in words; None for an error that is about no file.

    words: of the command line. A write that finds no room names no file; then the full disk is looked for.
    """
    remedy = _REMEDIES.get(error.errno or 0)
    if error.filename is None and error.errno in _NO_ROOM:
        full = next((f"{one.said}: " for one in _places(words) if one.is_on_a_full_disk), "")
        return f"{full}{error.strerror}; {remedy}"
    if remedy is None or not isinstance(error.filename, str | bytes):
        return None
    file = Path(_text(error.filename)).absolute()
    named = _naming(file, words)
    if named is None:
        return f"{file}: {error.strerror}; {remedy}"
    where = "" if named.place == file else f"{file}: "
    return f"{named.said}: {where}{error.strerror}; {remedy}"


def encoding_mistake(error: UnicodeDecodeError) -> str:
    """A file that was to hold text and does not; it may hold a password, so nothing of it is repeated."""
    return f"a file holds what is not UTF-8 at byte {error.start}; save it as UTF-8"


def word_mistake(words: Sequence[str]) -> str | None:
    """The first word that is no text, where one is wanted; None where all of them are."""
    for named in _places(words):
        try:
            named.value.encode()
        except UnicodeEncodeError:
            return f"{named.key} {named.value!r}: no text; write it in UTF-8".strip()
    return None


def _naming(file: Path, words: Sequence[str]) -> _Named | None:
    """The longest of the places that were said which is the file or holds it."""
    found = [one for one in _places(words) if file == one.place or one.place in file.parents]
    return max(found, key=lambda one: len(one.place.parts), default=None)


def _places(words: Sequence[str]) -> Iterator[_Named]:
    option = ""
    for word in words:
        before, joined, behind = word.partition("=")
        if word.startswith("-") and not joined:
            option = word
            continue
        option, value = (before, behind) if word.startswith("-") else (option, word)
        key, assigned, path = value.partition("=")
        if assigned and option == "--set":
            yield _Named(f"--set {key}", path.strip("\"'"))
        elif value and "\0" not in value:
            yield _Named(option, value)
        option = ""


def _text(name: str | bytes) -> str:
    return name if isinstance(name, str) else name.decode(errors="surrogateescape")
