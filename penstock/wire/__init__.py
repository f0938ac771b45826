"""What is said between processes: ids, limits, spaces, fragments, refusals, channels and servers."""
