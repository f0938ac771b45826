"""Calls of the learner to Redis: one retry loop around every call, one fence around every write.

While Redis does not answer, a call is repeated (every call is safe to repeat), in the end with `Fatal`. A
script that answers FENCED or CLOSED raises `Refused`.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from redis.exceptions import NoScriptError, RedisError, ResponseError

from penstock.broker.log.connection import is_unavailable, without_password
from penstock.broker.log.envelope import OtherLayout, unpack
from penstock.broker.log.log_memory import LogMemory
from penstock.broker.log.script import load
from penstock.config.settings import ConfigurationError
from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.runtime.exit import Fatal
from penstock.runtime.retry import retry

log = logging.getLogger(__name__)

T = TypeVar("T")

_ANY_INCARNATION: Final = ""
"""A learner's writes are fenced by its epoch, which rises with every incarnation."""
DRAIN_WAIT_S: Final = 5.0
"""Seconds that a call waits for Redis once the process drains."""


class LearnerCalls:
    """Runs scripts on `client`; the epoch comes from `memory` and changes only while `opening` is held."""

    def __init__(
        self, client: Any, url: str, memory: LogMemory, *, wait_s: float, stop: threading.Event
    ) -> None:
        self.client = client
        self.url = without_password(url)
        """As messages may show it."""
        self.opening = threading.Lock()
        self._memory = memory
        self._wait_s = wait_s
        self._stop = stop

    def wait_until_up(self) -> None:
        """Return when Redis answers; raises Fatal after `wait_s`, Interrupted when the process drains.

        Raises ConfigurationError when Redis answers and refuses the credentials.
        """
        self._waited(lambda: self.client.execute_command("PING"), self._stop, self._wait_s)

    def patient(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, repeating it while Redis does not answer.

        Raises Fatal after `wait_s`.
        """
        try:
            return call()
        except RedisError as error:
            if not is_unavailable(error):
                raise
        # Not the process's own stop event: a draining learner still has to commit.
        wait_s = min(DRAIN_WAIT_S, self._wait_s) if self._stop.is_set() else self._wait_s
        return self._waited(call, threading.Event(), wait_s)

    def run(self, name: str, *arguments: Any) -> Any:
        """Return the reply of the script `name`; raises Fatal where the run has another layout."""
        script = load(name)

        def evaluate() -> Any:
            try:
                return self.client.execute_command("EVALSHA", script.sha1, 0, *arguments, _ANY_INCARNATION)
            except NoScriptError:
                return self.client.execute_command("EVAL", script.source, 0, *arguments, _ANY_INCARNATION)

        try:
            return unpack(self.patient(evaluate))[1]
        except OtherLayout as error:
            raise Fatal(str(error)) from error

    def fenced(self, name: str, *arguments: Any) -> Any:
        """Return the reply of a script whose first argument is the epoch.

        Raises Refused(FENCED or NOT_READY).
        """
        while True:
            epoch = self._memory.state.epoch
            reply = self.run(name, epoch, *arguments)
            if reply[0] == b"CLOSED":
                detail = "Redis was restarted: the log waits to be re-opened"
                raise Refused(Refusal(reason=Reason.NOT_READY, detail=detail))
            if reply[0] != b"FENCED":
                return reply
            with self.opening:  # our own re-opening, in another thread, raises the epoch too
                if self._memory.state.epoch == epoch:
                    raise fenced_off()

    def _waited(self, call: Callable[[], T], stop: threading.Event, wait_s: float) -> T:
        def tell(error: Exception, delay_s: float) -> None:
            log.warning("waiting for Redis", extra={"error": str(error), "delay_s": round(delay_s, 2)})

        try:
            return retry(call, retryable=is_unavailable, stop=stop, on_wait=tell, give_up_s=wait_s)
        except RedisError as error:
            if not is_unavailable(error):
                raise ConfigurationError(
                    f"Redis at {self.url}: {error}; check the URL's user and security.redis_password"
                ) from error
            how = "refused writes" if isinstance(error, ResponseError) else "did not answer"
            raise Fatal(f"Redis at {self.url} {how} for {wait_s:g} s: {error}") from error


def fenced_off() -> Refused:
    """Return the refusal for a learner whose lease another learner has taken."""
    return Refused(Refusal(reason=Reason.FENCED, detail="another learner has taken the lease over"))
