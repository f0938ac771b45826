"""Measurements: learning proofs (`make learn`) and speed (`make bench`). They print and record, and assert nothing."""
