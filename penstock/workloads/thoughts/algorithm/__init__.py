"""The learner's side: REINFORCE of thoughts, rewarded by what the answer gains from them.

thought_rows        rows of a batch: question, thought and answer, and the same without the thought
thought_advantage   rewards and advantages, as pure functions
thought_baseline    a network that guesses the reward
thought_adam        the optimiser, with a state that a checkpoint holds
thought_pass        one pass over a batch
thought_coherence   coherence of its thoughts
thought_validation  validations in the course of learning
thought_metrics     figures of an update under their names
thought_reinforce   the algorithm
thought_model       what a run learns with
"""
