"""The users of `deploy/redis/users.acl`: each may do what its process does, and nothing beside it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from redis import asyncio as asyncio_redis

from penstock.broker.log import audit_log, connection, script
from penstock.broker.log.store import Store, StoreUnavailable
from penstock.config.settings import BrokerSection, ConfigurationError
from tests.support.run.small_run import RUN
from tests.support.storage.guarded_redis import USERS, GuardedRedis, clear, play
from tests.support.storage.redis_server import Binary

BROKER_SCRIPTS: Final = frozenset(
    {
        *("greet", "confirm", "open_session", "append", "close_session", "report", "watch"),
        *("status", "control", "command"),
    }
)
SOURCES: Final = {
    "broker": ("store.py", "line.py", "connection.py"),
    "learner": ("learner_log.py",),
    "operator": ("audit_log.py",),
}
BROKER_FOLDER: Final = Path(script.__file__).parent
METHODS: Final = {"acl_getuser": "acl|getuser", "config_get": "config|get", "subscribe": "subscribe"}
UNREACHED: Final = {
    "broker": {"strlen", "xdel", "xrange"},  # only beyond a thousand shadow entries or four thousand reports
    # Calls of sessions ask the first two, in parts that its scripts load; the last only where one is silent.
    "learner": {"exists", "hkeys", "zcard"},
}


def allowed() -> dict[str, set[str]]:
    lines = [line.split() for line in USERS.read_text().splitlines()]
    return {words[1]: {word[1:] for word in words if word.startswith("+")} for words in lines}


def called_by_scripts(names: frozenset[str] | set[str]) -> set[str]:
    """Commands that these scripts can reach: those of their bodies and of the functions that they call."""
    return {command for name in names for command in _reached(script.load(name).source)}


def _reached(source: str) -> set[str]:
    functions = dict(re.findall(r"^local function (\w+)(.*?)^end$", source, re.MULTILINE | re.DOTALL))
    waiting = [re.sub(r"^local function .*?^end$", "", source, flags=re.MULTILINE | re.DOTALL)]
    found: set[str] = set()
    while waiting:
        text = waiting.pop()
        found |= {name.lower() for name in re.findall(r"redis\.call\(\s*'([A-Z]+)'", text)}
        called = [name for name in functions if re.search(rf"\b{name}\(", text)]
        waiting += [functions.pop(name) for name in called]
    return found


def called_by_source(user: str) -> set[str]:
    found: set[str] = set()
    for name in SOURCES[user]:
        text = (BROKER_FOLDER / name).read_text()
        words = re.findall(r'(?:execute_command|ask|pack_command)\(\(?\s*"([A-Z ]+)"', text)
        words += re.findall(r"\*\d\\r\\n\$\d\\r\\n([A-Z]+)", text)
        found |= {word.lower().replace(" ", "|") for word in words}
        found |= {word.lower() for word in re.findall(r'execute_command, "([A-Z]+)"', text)}
        for method in re.findall(r"(?:redis|client|subscription|_redis)\.(\w+)[(,]", text):
            if method in ("xread", "xrange", "info", *METHODS):
                found.add(METHODS.get(method, method))
    return found


def test_each_user_is_allowed_exactly_the_calls_of_its_code() -> None:
    learner_scripts = set(script.names()) - BROKER_SCRIPTS | {"greet"}
    assert allowed()["broker"] == called_by_source("broker") | called_by_scripts(BROKER_SCRIPTS)
    assert allowed()["learner"] == called_by_source("learner") | called_by_scripts(learner_scripts)
    assert allowed()["operator"] == called_by_source("operator") | {"ping"}
    assert allowed()["default"] == {"@all"}


@pytest.fixture
def server(redis_binary: Binary, short_folder: Path) -> Iterator[GuardedRedis]:
    guarded = GuardedRedis(redis_binary, short_folder, run=RUN)
    guarded.start()
    yield guarded
    guarded.kill()


def denied(admin: Any, user: str) -> set[str]:
    """What the server refused this user since the log was emptied, lower case."""
    entries = admin.acl_log(128)
    return {str(entry["object"]).lower() for entry in entries if entry["username"] == user}


async def test_a_whole_run_needs_only_these_users(server: GuardedRedis) -> None:
    admin = server.admin()
    clear(admin)
    await play(server, "broker", "learner")
    held = audit_log.read_log(server.url_of("operator"), password=server.password("operator"))
    assert held is not None
    assert held.run == RUN
    assert admin.acl_log() == []


@pytest.mark.parametrize("user", ["broker", "learner"])
async def test_each_allowed_command_is_needed(server: GuardedRedis, user: str) -> None:
    admin = server.admin()
    for command in sorted(allowed()[user] - UNREACHED[user]):
        clear(admin)
        # Redis 6.2 takes back only whole commands.
        admin.execute_command("ACL", "SETUSER", user, f"-{command.partition('|')[0]}")
        try:
            await play(server, "broker", "learner")
        except (redis.RedisError, StoreUnavailable, ConfigurationError, ValueError):
            pass  # which is what the log of refusals is about to say
        finally:
            admin.execute_command("ACL", "SETUSER", user, f"+{command}")
        assert command.partition("|")[0] in {word.partition("|")[0] for word in denied(admin, user)}, command


FORBIDDEN: Final = {
    "everything is deleted": ("FLUSHALL",),
    "the configuration is changed": ("CONFIG", "SET", "appendonly", "no"),
    "keys are listed": ("KEYS", "*"),
    "keys are walked": ("SCAN", "0"),
    "users are listed": ("ACL", "LIST"),
    "the server is stopped": ("SHUTDOWN", "NOSAVE"),
    "modules are listed": ("MODULE", "LIST"),
    "the server is made a replica": ("REPLICAOF", "127.0.0.1", "1"),
    "its measurements are reset": ("LATENCY", "RESET"),
    "a foreign key is read": ("GET", "other"),
    "a foreign key is written": ("SET", "other", "1"),
    "a foreign channel is heard": ("SUBSCRIBE", "other"),
    "all is watched": ("MONITOR",),
    "memory is dumped to a file": ("SAVE",),
}


def _is_refused(client: Any, words: tuple[str, ...]) -> bool:
    try:
        client.execute_command(*words)
    except redis.exceptions.NoPermissionError:
        return True
    return False


@pytest.mark.parametrize("user", ["broker", "learner", "operator"])
def test_no_other_command_is_allowed(server: GuardedRedis, user: str) -> None:
    client: Any = redis.Redis.from_url(server.url_of(user), password=server.password(user))
    served = [what for what, words in FORBIDDEN.items() if not _is_refused(client, words)]
    assert served == []
    with pytest.raises(redis.exceptions.RedisError):
        client.execute_command("EVAL", "return redis.call('FLUSHALL')", 0)
    client.close()


@pytest.mark.parametrize(
    "command", [("SET", "penstock:state", "1"), ("DEL", "penstock:log"), ("EVAL", "return 1", "0")]
)
def test_an_operator_changes_nothing(server: GuardedRedis, command: tuple[str, ...]) -> None:
    client: Any = redis.Redis.from_url(server.url_of("operator"), password=server.password("operator"))
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)
    client.close()


@pytest.mark.promise("redis-users-own-forgets")
async def test_data_of_the_users_survives_a_restart(server: GuardedRedis) -> None:
    admin = server.admin()
    clear(admin)
    await play(server, "broker", "learner")
    before = contents(admin)
    assert len(before) > 10
    server.restart()
    assert contents(server.admin()) == before
    assert "NOPERM" not in (server.folder / "redis.log").read_text()


@pytest.mark.promise("redis-users-own-forgets")
async def test_a_server_that_would_forget_at_a_restart_is_refused(server: GuardedRedis) -> None:
    admin = server.admin()
    asker: Any = asyncio_redis.Redis.from_url(server.url_of("broker"), password=server.password("broker"))
    version = connection.parse_version((await connection.examine(asker, server.url, BrokerSection())).version)
    admin.execute_command("ACL", "SETUSER", "default", "-@all")
    if version >= connection.REPLAYS_WITH_RIGHTS:
        with pytest.raises(connection.UnsuitableRedis, match="user default off resetpass"):
            await connection.examine(asker, server.url, BrokerSection())
    else:
        await connection.examine(asker, server.url, BrokerSection())
    admin.execute_command("ACL", "SETUSER", "broker", "-acl")
    told = (await connection.examine(asker, server.url, BrokerSection())).warnings
    assert any("rights of Redis's user default are not known" in text for text in told)
    await asker.aclose()


def contents(admin: Any) -> dict[bytes, Any]:
    """Every key and what it holds, in an order that does not depend on the process."""
    reads: dict[bytes, Any] = {
        b"string": admin.get,
        b"hash": admin.hgetall,
        b"list": lambda key: admin.lrange(key, 0, -1),
        b"set": admin.smembers,
        b"zset": lambda key: admin.zrange(key, 0, -1, withscores=True),
        b"stream": admin.xrange,
    }
    return {key: reads[admin.type(key)](key) for key in admin.scan_iter()}


async def test_without_a_password_no_caller_is_served(server: GuardedRedis) -> None:
    for url, password in (
        (f"unix://{server.folder / 'redis.sock'}", None),
        (server.url_of("broker"), server.password("learner")),
        (server.url_of("broker"), ""),
    ):
        store = Store.connect(url, password=password)
        with pytest.raises(
            (redis.exceptions.ResponseError, redis.exceptions.ConnectionError, StoreUnavailable)
        ):
            await store.status()
        await store.aclose()
