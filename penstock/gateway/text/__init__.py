"""The shape of OpenAI's chat completions over a server of text: an agent changes its `base_url` alone.

Of the rest of the gateway it needs how a run is found and followed (`penstock.gateway.sites`), and the frame.
"""
