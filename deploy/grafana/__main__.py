"""Write every dashboard, or with --check list the files that differ from what this would write."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana import fleet, flow, people, serving, training

FOLDER: Final = Path(__file__).parent


def documents() -> Mapping[Path, str]:
    """Return path and text of every dashboard."""
    boards = {module.BOARD: module.board() for module in (training, flow, serving, fleet, people)}
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {FOLDER / f"{name}.json": encoder.encode(board.build()) + "\n" for name, board in boards.items()}


def main() -> int:
    """Return 0 when the files were written, or need no writing."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    check = parser.parse_args().check
    different = [path for path, text in documents().items() if not path.exists() or path.read_text() != text]
    for path in different:
        if not check:
            path.write_text(documents()[path])
        print(f"{'differs' if check else 'written'}: {path}")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
