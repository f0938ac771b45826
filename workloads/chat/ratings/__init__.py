"""Ratings of people, and what of them can be believed.

rating_rules    how much of one person counts, and what is dropped for which reason
agreement       who says the opposite of what others say
shrunk_mean     what a response is worth by the few who rated it
rating_filter   rows in, rows out: what was dropped, why and whose
"""
