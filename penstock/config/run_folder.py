"""A run's folder: who may read it, the lock of its launcher, and files of it, which may come from anywhere.

What clients have shown and said lies in it: files are 0600 and the folder 0700, whatever the umask. What is
no regular file is not opened: a pipe would be waited for without end. A process may guard folders in which
others write while it reads: no link is followed there, to whatever this process may read, or write.
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
    """Let this process, and those that it starts, make files that only their user can read from now on."""
    os.umask(_PRIVATE)


def make_private(folder: Path) -> None:
    """Make a folder that only its user can read; one of this user's that is there becomes so."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)


@contextmanager
def held_folder(run_dir: Path) -> Iterator[None]:
    """Hold a run's folder, made if absent, in the block: two launchers fence each other's learners."""
    keep_private()
    make_private(run_dir)
    with (run_dir / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"run_dir={run_dir}: another `penstock train` has this run in hand; stop it first"
            ) from None
        yield


# ---- Files of it.

MAX_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of a file that is read whole."""
_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MADE_SO: Final = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EACCES}
"""Of an open: what stands there was put there, and will be there at the next try."""
_guarded: Final = set[Path]()


class NoPlainFile(OSError):
    """Reports what is not opened: `strerror` names it and says why."""

    def __init__(self, number: int, file: Path, why: str) -> None:
        super().__init__(number, f"{file.name}: {why}", str(file))


def guard(folder: Path) -> None:
    """Have no link below a folder be followed by what this module opens, as long as this process lives."""
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
    """Yield a descriptor of the folder that a file lies in, for calls with `dir_fd` and for `os.fsync`.

    A folder put in its place later does not change what is written. Raises NoPlainFile where a link leads
    there below a guarded folder, OSError.
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
    """Raise NoPlainFile where an open in the block finds a link on the way to the file, or no file."""
    try:
        yield
    except NoPlainFile:
        raise
    except OSError as error:
        if error.errno in _MADE_SO:
            why = f"is no file that may be opened here, where links are not followed ({error.strerror})"
            raise NoPlainFile(error.errno, file, why) from error
        raise
