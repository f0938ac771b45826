"""What is asked: questions with answers, and the legal steps of a thought between them.

example      a question, what a task has, and questions drawn to train on or to test
rings        hops on a ring of symbols: its ceilings without thoughts are known in closed form
text         the next words of real text
task_check   what a task of one's own must hold to
task_choice  the task by its name: `rings`, `text`, or `module:function` of one's own
"""
