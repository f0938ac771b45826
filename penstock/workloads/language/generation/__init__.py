"""The actor's side of language models: prompts → responses → rewards → fragments.

prompt_set          a data set of prompts, those that train and those that are held out
backend             the interface of what generates, and what it returns
cached_generation   the reference backend: a model of transformers with its key-value cache
growing_cache       its keys and values of a layer, for rows that come and go
drawing             tokens drawn from log-probabilities
reward_scorer       rewards for responses, from any source
response_fragments  prompts, responses and rewards as one fragment
"""
