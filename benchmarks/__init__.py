"""Measurements: learning proofs (`make learn`) and speed (`make bench`).

They print and record, and assert nothing.
"""

import os

# As `penstock.launch.cli` does, before numpy is imported: a loop on one thread has no other threads that
# spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
