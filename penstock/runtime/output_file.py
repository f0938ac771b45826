"""Files that commands write: whole under their name, or not there at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def output_file(path: Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Yield a file to write, which takes its name when the block ends well; until then what was there stays.

    Of a block that raises nothing is left. What is no regular file, such as a pipe, is written to directly.

    Args:
        path: of the file; its folder must be there.
        mode: "w" for text in UTF-8 or "wb".

    Raises:
        OSError: the place cannot be written; it names `path`.
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


def check_output(path: Path) -> None:
    """Raise OSError that names a place where no file can stand, before the work for it is done.

    It is IsADirectoryError for a folder, FileNotFoundError where the folder around it is absent.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
