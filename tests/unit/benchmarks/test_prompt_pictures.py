"""The table of the proof of prompts."""

from pathlib import Path

from benchmarks.prompt_pictures import draw, write_table
from benchmarks.prompts import VARIANTS, Judged


def test_a_score_of_every_variant_has_its_line_and_its_bar(tmp_path: Path) -> None:
    """Best first, and what stands around the table stays."""
    page, picture = tmp_path / "page.md", tmp_path / "scores.png"
    page.write_text("before\n<!-- scores -->\nold\n<!-- end of scores -->\nbehind\n")
    scores = [Judged(name=name, seed=1, score=place / 10, error=0.01) for place, name in enumerate(VARIANTS)]
    write_table(scores, page)
    draw(scores, picture)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "behind")
    told = [line.split(" | ")[1] for line in lines if "recipe" in line]
    assert told == ["0.300", "0.200", "0.100", "0.000"]
    assert picture.stat().st_size > 0
