"""From the log to batches on the device.

source          `Feed`, what the loop takes batches from
log_feed        the feed of a learner with actors: reads, drops what is stale, makes batches
pending         entries that are read and not decided
payloads        their bytes, fetched and checked
fragment_check  what their numbers must be
log_batch       a batch, with what became of every entry
upload          the way to a GPU
recorded_event  what operators did in between, in a recording
"""
