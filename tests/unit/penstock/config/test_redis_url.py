"""The password of a Redis URL."""

import pytest
import redis.connection

from penstock.config.url_secrets import split_password


@pytest.mark.parametrize(
    ("url", "shown", "password"),
    [
        ("redis://:hunter2@host:6379/0", "redis://host:6379/0", "hunter2"),
        ("rediss://user:hun%2Fter@host/?a=1", "rediss://user@host/?a=1", "hun/ter"),
        ("redis://user@host:6379", "redis://user@host:6379", None),
        ("redis://host?password=hunter2&db=1", "redis://host?db=1", "hunter2"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock", None),
        ("unix://:hunter2@/run/redis.sock?db=0", "unix:///run/redis.sock?db=0", "hunter2"),
        ("redis://user:@host", "redis://user@host", None),
        ("redis://:a@b@host", "redis://host", "a@b"),
        ("redis://[::1", "redis://[::1", None),
        ("redis://u:hunter2@[::1", "redis://u@[::1", "hunter2"),
        ("", "", None),
    ],
)
def test_a_redis_url_is_shown_without_its_password(url: str, shown: str, password: str | None) -> None:
    assert split_password(url) == (shown, password)


@pytest.mark.parametrize(
    "url", ["redis://u:p%40x@h:1/2", "redis://h?password=x", "unix://u:p@/run/r.sock?db=3", "rediss://:p@h"]
)
def test_the_two_parts_connect_as_the_whole_did(url: str) -> None:
    shown, password = split_password(url)
    parsed = {**redis.connection.parse_url(shown), "password": password}  # type: ignore[no-untyped-call]
    assert parsed == dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]
