"""Ways to learn: one object each (`learner.algorithms.algorithm.Algorithm`), and the mathematics that they are made of."""
