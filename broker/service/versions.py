"""Versions and traffic for operators: the registry behind ControlService, in threads.

The registry is opened at the first call and kept open. It waits for a disk or a network, so every call runs
in a thread of its own pool; what it refuses ends the call with a status that says whose move it is. Whether a
change takes effect before the answer is lost is not known: look again.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc

from penstock.config.extras import how_to_install
from penstock.registry.registry_errors import RegistryError, Unavailable, UnknownVersion
from penstock.rpc.boundary import Absent, Malformed

if TYPE_CHECKING:
    from penstock.registry.registry import Registry

T = TypeVar("T")

_THREADS: Final = 4

Context = Any
"""grpc.aio.ServicerContext, which the stubs and the generated code type differently."""


class Versions:
    """The registry at `url`, or none where that is empty. policy: what is meant where a call names none."""

    def __init__(self, url: str, policy: str) -> None:
        self.policy = policy
        self._url = url
        self._registry: Registry | None = None
        self._opening = Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="registry")

    async def ask(self, context: Context, work: "Callable[[Registry], T]") -> T:
        """Return what `work` returns; ends the call where the registry refuses, or is not there.

        Raises Malformed and Absent as handlers do.
        """
        if not self._url:
            text = (
                "this broker was given no registry: set registry.url to its URL, "
                "or use `penstock policy` where the run's folder lies"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        code, text = grpc.StatusCode.FAILED_PRECONDITION, ""
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: work(self._opened())
            )
        except UnknownVersion as error:
            raise Absent(str(error)) from error
        except Unavailable as error:
            code, text = grpc.StatusCode.UNAVAILABLE, str(error)
        except RegistryError as error:
            text = str(error)
        except ImportError as error:
            text = f"{error}; beside this broker: {how_to_install('registry')}"
        except ValueError as error:
            raise Malformed(str(error)) from error
        await context.abort(code, text)
        raise AssertionError  # abort has raised

    def close(self) -> None:
        """Give the connections back."""
        self._threads.shutdown(wait=False)
        if self._registry is not None:
            self._registry.close()

    def _opened(self) -> "Registry":
        from penstock.registry.registry import Registry  # noqa: PLC0415 - a broker without one needs no SQLAlchemy

        with self._opening:
            if self._registry is None:
                self._registry = Registry.open(self._url)
            return self._registry
