"""What a process is configured with.

Settings in sections, trusted modules, credentials, the workload record.
"""
