"""The protocol between processes: ids, limits, spaces, fragments and refusals, as values and as bytes."""
