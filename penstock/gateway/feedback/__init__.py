"""What callers say of an agent's responses, and the forms in which it comes and goes.

opinion_bodies    what a request may say of responses
feedback_rows     ratings and late rewards as rows, and JSON lines of them
"""
