"""Where a URL holds a secret."""

import pytest

from penstock.config.configuration_error import ConfigurationError
from penstock.config.url_secrets import secret_in
from penstock.launch.cli.plugin_commands import check_words


@pytest.mark.parametrize(
    "name",
    [
        "password", "api_key", "apiKey", "secretKey", "privatekey", "x-signing-key", "access_token", "jwt",
        "X-Amz-Signature", "key",
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["?", "?a=1&", "?a=1;", "#", "?a=1#b=2&"])
def test_a_secret_of_the_query_or_fragment_is_found_by_its_name(name: str, before: str) -> None:
    found = secret_in(f"http://h/score{before}{name}=s3cret")
    assert found is not None
    assert found.startswith(repr(name))


@pytest.mark.parametrize("query", ["monkey=1", "keyboard=de", "author=ann", "signal=9", "token=", "page=2"])
def test_other_arguments_are_none(query: str) -> None:
    assert secret_in(f"http://h/score?{query}#top") is None


@pytest.mark.parametrize("scheme", ["postgresql", "POSTGRESQL", "postgresql+psycopg2", "http", "s3"])
@pytest.mark.parametrize("before", ["", "--registry=", "--set=registry.url=", "environment.kwargs.reward="])
def test_a_word_of_a_command_line_with_a_secret_is_refused(scheme: str, before: str) -> None:
    with pytest.raises(ConfigurationError, match="holds a secret in its user-info") as caught:
        check_words([f"{before}{scheme}://u:s3cret@h/d"])
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sqlite:///runs/registry.sqlite?password=s3cret", "SQLite asks for none, so leave it out"),
        ("postgresql://h/d?password=s3cret", "registry.password_file=FILE"),
        ("redis://h?password=s3cret", "security.redis_password_file=FILE"),
        ("https://h/score?token=s3cret", "security.http_headers_file=FILE"),
    ],
)
def test_the_remedy_is_that_of_the_scheme(url: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        check_words([url])
    assert "s3cret" not in str(caught.value)
