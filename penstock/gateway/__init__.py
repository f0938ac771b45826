"""HTTP with people behind it: accounts, projects, feedback and jobs, in front of what Penstock learns.

The gateway knows no workload, and neither torch nor Redis. What lies above it is handed in by `launch`.
"""
