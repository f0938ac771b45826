"""`penstock audit RUN`: where every acknowledged fragment of a run went, from records that were kept independently."""
