"""The state of a run, measured from outside, for the terminal and the browser alike.

Reads and never steers.
"""
