"""A run's folder: who may read it, the lock of its launcher, and files of it, which may come from anywhere.

It holds data of clients: files are 0600 and the folder 0700, whatever the umask. Only regular files are
opened, since a pipe could block without end. A process may guard folders in which others write while it
reads: links are not followed there, as they could lead to any file of this process.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Final

from penstock.config.configuration_error import ConfigurationError

CONFIG_FILE: Final = "config.toml"
LOCK_FILE: Final = "launcher.lock"
_PRIVATE: Final = 0o077


def keep_private() -> None:
    """Let this process and its children create files that only their user can read."""
    os.umask(_PRIVATE)


def make_private(folder: Path) -> None:
    """Create a folder that only its user can read, or restrict an existing one of this user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)


@contextmanager
def held_folder(run_dir: Path) -> Iterator[None]:
    """Lock a run's folder in the block: two launchers would fence each other's learners."""
    keep_private()
    make_private(run_dir)
    with (run_dir / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"run_dir={run_dir}: another `penstock train` is using this run; stop it first"
            ) from None
        yield


# ---- Files of a run's folder.

MAX_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of a file that is read whole."""
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MADE_SO: Final = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EACCES}
"""Errors of `open` that a repetition does not resolve: another kind of file lies there."""
_guarded: Final = set[Path]()


class NoPlainFile(OSError):
    """A file is not opened; `strerror` has its name and the reason."""

    def __init__(self, number: int, file: Path, why: str) -> None:
        super().__init__(number, f"{file.name}: {why}", str(file))


def guard(folder: Path) -> None:
    """Let the functions of this module follow no link below a folder, for the life of the process."""
    _guarded.update((folder.absolute(), folder.resolve()))


def is_guarded(file: Path) -> bool:
    return _guard_of(file) is not None


def opener(file: str, flags: int) -> int:
    """Open a regular file: the `opener` of Python's `open`, also to write; raises NoPlainFile, OSError."""
    path, wanted = Path(file), flags | os.O_NONBLOCK | os.O_CLOEXEC
    folder = _guard_of(path)
    number = os.open(path, wanted, 0o666) if folder is None else _open_below(folder, path, wanted)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise NoPlainFile(errno.EINVAL, path, "is no regular file")
    return number


def open_regular(file: Path) -> BufferedReader:
    """Open a file for reading; raises NoPlainFile for what is no regular file, OSError."""
    return open(file, "rb", opener=opener)


def read_whole(file: Path) -> bytes:
    """Return what a file holds; raises as `open_regular`, and NoPlainFile for more than `MAX_BYTES`."""
    with open_regular(file) as opened:
        content = opened.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise NoPlainFile(errno.EFBIG, file, f"holds more than {MAX_BYTES} bytes")
    return content


def _guard_of(file: Path) -> Path | None:
    place = file.absolute()
    return next((folder for folder in _guarded if place.is_relative_to(folder)), None)


def _open_below(folder: Path, file: Path, flags: int) -> int:
    with _naming_links(file), _opened_below(folder, file) as here:
        return os.open(file.name, flags | os.O_NOFOLLOW, 0o666, dir_fd=here)


@contextmanager
def opened_folder(file: Path) -> Iterator[int]:
    """Yield a descriptor of a file's folder, for calls with `dir_fd` and for `os.fsync`.

    A later replacement of the folder does not redirect writes. Raises NoPlainFile for a link below a guarded
    folder, OSError.
    """
    folder = _guard_of(file) or file.absolute().parent
    with _naming_links(file), _opened_below(folder, file) as here:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
    try:
        yield readable
    finally:
        os.close(readable)


@contextmanager
def _opened_below(folder: Path, file: Path) -> Iterator[int]:
    *between, name = file.absolute().relative_to(folder).parts
    if os.pardir in (*between, name):
        raise NoPlainFile(errno.EINVAL, file, "leads out of its folder")
    here = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for one in between:
            inside = os.open(one, _FOLDER, dir_fd=here)
            os.close(here)
            here = inside
        yield here
    finally:
        os.close(here)


@contextmanager
def _naming_links(file: Path) -> Iterator[None]:
    """Raise NoPlainFile where an open in the block meets a link, or something else than a file."""
    try:
        yield
    except NoPlainFile:
        raise
    except OSError as error:
        if error.errno in _MADE_SO:
            why = f"is no file that may be opened here, where links are not followed ({error.strerror})"
            raise NoPlainFile(error.errno, file, why) from error
        raise
