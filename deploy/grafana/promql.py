"""The three expressions of most panels, by run: rate, mean, quantile."""


def rate(counter: str, by: str = "run", matcher: str = "") -> str:
    """Return the rise of a counter in a second. matcher: more of its labels, as `phase="wait"`."""
    chosen = f"RUN, {matcher}" if matcher else "RUN"
    return f"sum by ({by}) (rate({counter}{{{chosen}}}[WINDOW]))"


def mean(family: str, by: str = "run", matcher: str = "") -> str:
    """Return the mean of what a histogram or summary observed; empty where it observed nothing."""
    return f"{rate(f'{family}_sum', by, matcher)} / ({rate(f'{family}_count', by, matcher)} > 0)"


def quantile(share: float, histogram: str) -> str:
    """Return the value that `share` of the observations do not exceed."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'run, le')})"
