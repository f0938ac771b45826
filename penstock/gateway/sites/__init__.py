"""One run behind an API of its own: `penstock gateway NAME`, NAME being a workload that has one."""
