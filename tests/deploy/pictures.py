"""python -m tests.deploy.pictures [--seconds N].

The pictures of docs/dashboards.md, from a run in which much happens.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from deploy.grafana.draw import View, save
from tests.deploy.prometheus_server import ROOT, watching
from tests.deploy.watched_run import running

OUT: Final = ROOT / "docs" / "images"


def main() -> None:
    """A run with clients; versions on trial after a while; an actor and the broker killed later."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0)
    seconds = float(parser.parse_args().seconds)
    pause = threading.Event()
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as name:
        folder = Path(name)
        with running(folder / "run") as run, watching(folder / "prometheus", run.targets) as prometheus:
            prometheus.until(lambda: bool(prometheus.query("penstock_updates_total > 0")), "an update")
            began_s = time.time()
            pause.wait(seconds * 0.3)
            prometheus.until(lambda: len(run.versions()) > 1, "two versions")
            run.try_versions()
            run.err()
            pause.wait(seconds * 0.3)
            run.kill("actor-0")
            pause.wait(seconds * 0.2)
            run.kill("broker")
            pause.wait(seconds * 0.2)
            view = View(prometheus=prometheus, began_s=began_s, ended_s=time.time(), scrape_s=1.0)
            for path in save(view, OUT):
                print(path)


if __name__ == "__main__":
    main()
