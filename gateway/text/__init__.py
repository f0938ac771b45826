"""The shape of OpenAI's chat completions over a server of text: an agent changes its `base_url` alone.

    chat_requests   what a request may hold, and what of it the server is asked
    chat_answers    answers and their parts in that API's form
    chat_errors     errors in that API's form
    agents          whom a model name means, of several servers of text
    chat_routes     /v1/chat/completions, /v1/models, /v1/rewards
    text_process    the process: `penstock gateway text`

Of the rest of the gateway it needs how a run is found and followed (`gateway.sites`), and the frame.
"""
