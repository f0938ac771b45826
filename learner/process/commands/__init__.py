"""Commands of operators that the learner answers: checkpoint by name, restore, flush."""
