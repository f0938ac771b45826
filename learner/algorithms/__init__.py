"""The algorithms, one object each (`learner.algorithms.algorithm.Algorithm`), and their mathematics."""
