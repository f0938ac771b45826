"""Proposing goals to a live system. Torch-free: it asks a policy server.

injection_rules      when a goal may be carried out: quiet hours, daily limit, interval
gate                 which of the drawn goals are carried out, and how likely that is
success_probability  how likely a goal of this certainty succeeds, fitted on what became of the last ones
drift                whether goals succeed less often than they did
durable_lines        files of JSON lines that survive a kill at any moment
injection_records    the lines of both files
injection_journal    the folder of an injector, as it is found and added to
asked_policy         the policy server: what it proposes, and what it is told
injector             one interval after the other
auto_switch          whether goals are carried out, changed while an injector goes on
pulse                what an injector says of itself while it lives
injector_view        an injector as the page shows it
explanation          why nothing was injected, from the folder alone
"""
