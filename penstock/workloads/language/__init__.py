"""What workloads of language models share: from text and feedback to rewards, policies and generation.

    prompt, tokenizer   a prompt as text or as turns, and its token ids
    tiny_models         a model that is small enough to be built, and trained, in a test
    loading, quiet      how models are read from folders and hubs, and what their libraries print meanwhile
    device              where a model computes, by its name in a configuration
    feedback/           examples of prompt, response and score, or of two responses of which one is better
    reward/             the reward model: training, scores, the service, and other sources of rewards
    heads/              a reward model that says what people will say of several things at once
    policy/             the model that is trained: its adapter, values, and the reference it began with
    generation/         generating responses, having them rewarded, and making fragments of them
    conversation/       conversations of several turns, and columns of fragments made of them
    engine/             single requests answered, many at once, each under the version that it names
    pretraining/        a base: conversations that a model learns before anybody rates it
    guard/              what may be said to a model, and what of it to people
    serving/            answers and conversations of clients, and what is learned from them
    language_model      the learner's side of a language model

No module of this package imports a workload. Importing the package imports nothing heavy;
`pip install 'penstock-rl[rlhf]'` brings what the modules need.
"""
