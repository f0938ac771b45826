"""Ways to learn: one object each (`learner.algorithm.Algorithm`), and the mathematics that they are made of."""
