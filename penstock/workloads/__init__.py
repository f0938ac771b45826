"""Plug-ins: one folder per kind of work, found by entry point `penstock.workloads`."""
