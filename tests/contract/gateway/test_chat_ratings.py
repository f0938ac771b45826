"""A chat whose model says what a database refuses: people rate its answers on each kind all the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from penstock.gateway.upstream import RunSettings
from penstock.workloads.language.pretraining import tiny_models
from tests.support.chat.chat_stand import chat_app, upstream_of
from tests.support.language.chat_words import chat_tokenizer
from tests.support.language.text_stand import WORDS, teach

ME = "somebody-1"
KEPT = "\N{REPLACEMENT CHARACTER} done"


TOKENIZER = chat_tokenizer(*("\0" if word == "other" else word for word in WORDS))


def saying_nul(folder: Path) -> Path:
    """The folder of a model that says nothing but NUL and `done`."""
    model = tiny_models.build_model(TOKENIZER, seed=0)
    said = "<user> sum <eos> <assistant> \0 done <eos>"
    teach(model, [TOKENIZER(f"{said} {said}", add_special_tokens=False)["input_ids"]], 150)
    tiny_models.save(model, TOKENIZER, folder)
    return folder


def test_what_no_database_holds_is_kept_as_another_character(
    database_url: str, tmp_path: Path, short_folder: Path
) -> None:
    base = saying_nul(tmp_path / "base")
    with upstream_of(base, tmp_path, short_folder / "text.sock", tokenizer=TOKENIZER) as run:
        known = RunSettings(task={}, registry=database_url, folder=tmp_path)
        app = chat_app(replace(run, settings=lambda: known), {}, None)
        with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:

            def post(what: str, **body: Any) -> Any:
                reply = client.post(f"/api/chat/{what}", json={"me": ME, **body})
                assert reply.status_code == 200, reply.text
                return reply

            talk = {"conversation": post("begin").json()["conversation"]}
            for _ in range(2):
                told = post("say", text="sum", **talk).text
            answer = json.loads(told.partition("event: answer\ndata: ")[2].partition("\n")[0])
            assert answer["text"] == "\0 done"
            post("thumb", turn=1, id="the-thumb", up=True, **talk)
            post("correct", turn=1, id="the-words", text="four", **talk)
            thumb, correction = post("mine").json()["ratings"]
            assert "event: answer" in post("say", text="sum", **talk).text
    assert [one["content"] for one in thumb["prompt"]] == ["sum", KEPT, "sum"]
    assert (thumb["response"], correction["response"], correction["rejected"]) == (KEPT, "four", KEPT)
