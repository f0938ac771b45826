"""The commands that the workload adds to `penstock`.

`reward train`, `reward score`, `reward serve`, `feedback export` and `generate`.

The record names them; each imports what it needs when it runs, so that help is fast.
"""
