"""Files that are written whole under their name, or are not there at all."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from penstock.config.run_folder import opened_folder


@contextmanager
def output_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a file to write, which takes its name when the block ends well; until then what was there stays.

    Of a block that raises nothing is left. What is no regular file, such as a pipe, is written to directly.
    mode: "w" for text in UTF-8 or "wb". Raises OSError that names `path`.
    """
    check_output(path)
    encoding = None if "b" in mode else "utf-8"
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    is_regular = path.is_file() or not path.exists()
    try:
        with (temporary if is_regular else path).open(mode, encoding=encoding) as file:
            yield file
            file.flush()
            if is_regular:
                os.fsync(file.fileno())
        if is_regular:
            temporary.replace(target)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        if temporary.exists():
            temporary.unlink()


def write_once(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Make a file unless it is there, and return whether it was not; it is on the disk when this returns.

    Of several processes, on whatever machines that share its folder, one gets True; each finds it whole.
    mode: who may read it, of which the umask takes away.
    """
    own = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    opened = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(opened, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(own, path)
        is_made = True
    except FileExistsError:
        is_made = False
    finally:
        own.unlink()
    sync_folder(path.parent)  # also of one that another process has made just now
    return is_made


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file at `path` by one that holds `data` and is on disk; readers see the old or the new one.

    Its folder is made where it is absent. Of several writers at once the last one's data stays, whole. Raises
    OSError when the disk does not take it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp"
    with opened_folder(path) as here:
        try:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=here)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=here), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=here, dst_dir_fd=here)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=here)
        os.fsync(here)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk; raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check_output(path: Path) -> None:
    """Raise OSError that names a place where no file can stand, before the work for it is done.

    It is IsADirectoryError for a folder, FileNotFoundError where the folder around it is absent.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
