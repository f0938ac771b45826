"""The actor's side of language models: prompts → responses → rewards → fragments.

section     what `environment.kwargs` of a run of language models may hold
prompts     a data set of prompts, those that train and those that are held out
backend     what generates: its interface and what it returns
cached      the reference: a model of transformers with its key-value cache
judge       rewards for responses, from any source
fragment    prompts, responses and rewards as one fragment
crew        what a rollout worker generates with
player      what an evaluation actor measures with
"""
