"""From the log to batches on the device."""
