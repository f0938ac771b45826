"""What is asked: questions with answers, and the legal steps of a thought between them.

example     a question, and the seam `module:function` by which a task of one's own comes in
rings       hops on a ring of symbols: its ceilings without thoughts are known in closed form
"""
