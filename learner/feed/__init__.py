"""From the log, or a recording, to batches on the device."""
