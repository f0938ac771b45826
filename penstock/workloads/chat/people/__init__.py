"""Simulated people who chat and rate.

It draws and computes; nothing in it learns, and it knows no model.
"""
