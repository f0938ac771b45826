"""What algorithms of several families use.

advantage    advantages and value targets
loss         losses of policy and value, the clipped ratio among them
schedule     learning rate, clip range and entropy coefficient over a run
learn_once   base of those that learn from a batch once: batch size, budget, staleness
rows         steps of a batch, flat
sequences    the same of a recurrent policy
steps        columns of what losses read
seen_batch   a batch as its policy sees it
containment  updates without the fragments that make them fail
rank_group   the ranks that compute an update together
hardware     ranks, precision, compilation
stored       tensors of a checkpoint by path
"""
