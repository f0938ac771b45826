"""The commands that the workload adds to `penstock`: each imports what it needs when it runs."""
