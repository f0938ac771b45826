"""A small host with faults, simulated: its model as tables, its optimum, and the host itself."""
