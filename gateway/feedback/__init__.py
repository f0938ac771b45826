"""What callers say of an agent's responses, and the forms in which it comes and goes.

opinion_bodies    what a request may say of responses
feedback_rows     ratings and late rewards as rows, and JSON lines of them
parquet_tables    such rows as a file in the format Parquet
parquet_reader    the process that reads such a file
"""
