"""Files that are written atomically: complete under their name, or absent."""

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
    """Yield a file to write, which replaces the one at `path` when the block ends without an error.

    A block that raises leaves nothing. What is not a regular file, such as a pipe, is written to directly.
    mode: "w" for text in UTF-8, or "wb". Raises OSError that names `path`.
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
    """Create a file unless it exists, and return whether it was created; it is on disk on return.

    Of several processes, also on machines that share the folder, one gets True, and each finds the whole
    file. mode: permissions, less those of the umask.
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
    sync_folder(path.parent)  # also for a file that another process has just created
    return is_made


def replace_file(path: Path, data: bytes) -> None:
    """Replace the file at `path` by one with `data`, on disk on return; readers see the old or the new one.

    Creates its folder where it is absent. Of concurrent writers the last one wins. Raises OSError.
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
    """Write the entries of a folder to disk; raises OSError."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check_output(path: Path) -> None:
    """Check, before the work for an output file, that it can be created.

    Raises IsADirectoryError for a folder, FileNotFoundError where its folder is absent.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
