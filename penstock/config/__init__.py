"""What a process is configured with.

These are settings in sections, trusted modules, credentials and the workload record.
"""
