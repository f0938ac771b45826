"""A file that is written once is whole, and nobody's but the first one's."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.runtime.output_file import write_once


def test_one_of_many_gets_to_write(tmp_path: Path) -> None:
    file = tmp_path / "begun.json"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: write_once(file, b"%d" % number * 999, mode=0o600), range(8)))
    assert sorted(found) == [False] * 7 + [True]
    assert [path.name for path in tmp_path.iterdir()] == ["begun.json"]
    assert file.read_bytes() == b"%d" % found.index(True) * 999
    assert file.stat().st_mode & 0o777 == 0o600
