"""A small host with faults, simulated: its model as tables, and the host itself."""
