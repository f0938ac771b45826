"""Ratings of people, and what of them can be believed.

rating_rules    how much of one person counts, and what is dropped for which reason
agreement       who says the opposite of what others say
rating_filter   rows in, rows out: what was dropped, why and whose
"""
