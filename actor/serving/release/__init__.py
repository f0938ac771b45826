"""Which versions get traffic, and how a canary is judged.

traffic         follows the registry: which versions are loaded, which arm has which; asks for a verdict
same_network    whether the weights of another run fit
canary_monitor  reports what clients saw; `penstock.registry.traffic` decides
client_returns  what each client earned
answer_windows  how often answers failed or were slow
"""
