"""From what clients did to what the learner gets."""
