"""One run behind an API of its own: `penstock gateway NAME`, NAME being a workload that has one.

site            what a workload says of its API, and what it is told of the run
served_text     the client of its server of text, which follows it
json_route      a route that takes JSON alone
run_errors      what the run behind it refuses, as answers
sign_in_routes  how people sign in there
token_door      who may call where it is reached from other machines
site_process    the process
"""
