"""A Redis that the user brings: waited for and examined once, before anything is started or written."""

import asyncio
from functools import partial

from penstock.broker.log import connection
from penstock.broker.service.process import connect_inspector, wait_for_redis
from penstock.config.settings import Settings
from penstock.launch.run.summary import RedisFacts
from penstock.runtime.lifecycle import Lifecycle


def examine(settings: Settings, lifecycle: Lifecycle) -> RedisFacts:
    """Version and durability of the server at `broker.redis`; logs while it waits.

    Raises ConfigurationError when it is unsuitable, Fatal when it does not answer within
    `broker.redis_wait_s`, Interrupted when the lifecycle drains first.
    """
    return asyncio.run(_examine(settings, lifecycle))


async def _examine(settings: Settings, lifecycle: Lifecycle) -> RedisFacts:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_drain() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    lifecycle.on_drain(on_drain)
    section, url = settings.broker, settings.broker.redis
    inspector = connect_inspector(url, settings.security)
    try:
        ask = partial(connection.examine, inspector, url, section)
        facts = await wait_for_redis(ask, url, section.redis_wait_s, stop)
    finally:
        await inspector.aclose()
    return RedisFacts(version=facts.version, durability=facts.durability.label)
