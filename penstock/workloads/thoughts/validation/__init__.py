"""Whether thoughts are worth anything: measured on questions that were held out, and said in words.

interval      means with bootstrap intervals, correlation
coherence     how well a thought is formed, example by example
probes        thoughts as they are, and disturbed: what becomes of the answers
theatre       the tests, what failed by how much, and the verdict
"""
