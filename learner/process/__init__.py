"""The learner as a process: entry, assembly, loop."""
