"""The engine that answers single requests: many at once, each under the version that it names.

engine_choice      the engine by its name, the seam that others stand behind
engine_tolerance   how far it is from a plain pass, measured at its start
requests           what is asked, and the answer while it grows
loaded_adapters    one base model and the adapters of several versions
loaded_networks    several versions of a model whose weights are all trained
running_batch      the rows of one version that are being continued; rows join and leave it
continuous_engine  waiting requests, the batches of all versions, log-probabilities of sampled ids

Training generates whole batches under one version instead: `penstock.workloads.language.generation`.
"""
