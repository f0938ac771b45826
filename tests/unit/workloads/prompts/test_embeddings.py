"""The hashing embedding."""

import hashlib

import numpy as np

from penstock.workloads.prompts.embeddings import WIDTH, HashingEmbedder


def test_rows_are_of_unit_length_and_equal_on_every_machine() -> None:
    rows = HashingEmbedder().embed(["Write a poem.", "日本語で書いて 😀", "x" * 20_000])
    assert rows.shape == (3, WIDTH)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-6)
    signs = np.sign(np.where(np.abs(rows[0]) > 1e-4, rows[0], 0)).astype(np.int8).tobytes()
    assert hashlib.sha256(signs).hexdigest()[:16] == "19da86a397d2f678"


def test_texts_that_share_words_lie_nearer() -> None:
    rows = HashingEmbedder().embed(["review this code", "Reviewing the codes", "a poem on rain", ""])
    likeness = rows @ rows.T
    assert likeness[0, 1] > 0.2 > abs(likeness[0, 2])
    assert not rows[3].any()
