"""Runs pytest in forks of a process that has loaded the libraries, which takes most of a short test's time.

Reads a line of JSON for each run: `root` (folder of a tree), `arguments` of pytest, `output` (file) and
`limit_s`. Answers a line: pytest's exit code, or `null` where the run did not end in time and was killed.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

LIBRARIES = ("torch", "grpc.aio", "numpy", "pydantic", "redis.asyncio", "gymnasium", "fastapi", "sqlalchemy")


def run_tests(root: str, arguments: list[str], output: str) -> int:
    """Run pytest in this process in the tree at `root`; returns its exit code."""
    os.setpgid(0, 0)
    os.chdir(root)
    sys.path[0] = root
    os.environ["PYTHONPATH"] = root
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import pytest

    return int(pytest.main(arguments))


def await_end(child: int, limit_s: float) -> int | None:
    """Wait for a child and kill what is left of its process group; None where it did not end in time."""
    until_s, code = time.monotonic() + limit_s, None
    while time.monotonic() < until_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    return code


def main() -> None:
    """Answer runs until standard input ends."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        wanted: dict[str, Any] = json.loads(line)
        if (child := os.fork()) == 0:
            code = 70
            try:
                code = run_tests(wanted["root"], wanted["arguments"], wanted["output"])
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(json.dumps(await_end(child, wanted["limit_s"])), flush=True)


if __name__ == "__main__":
    main()
