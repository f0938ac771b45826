"""What a process is configured with: settings in sections, trusted modules, credentials, the workload record."""
