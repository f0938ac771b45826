"""Recordings: batches that a learner consumed, on disk, to be replayed bit by bit or learned from offline."""
