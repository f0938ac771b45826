"""The algorithms, one object each (`algorithm.Algorithm`), and their mathematics."""
