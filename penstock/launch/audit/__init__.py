"""`penstock audit RUN`: account for every acknowledged fragment of a run, from independent records."""
