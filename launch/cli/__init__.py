"""The `penstock` command line."""
