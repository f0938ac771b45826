"""Publication of weights, and registration of the versions to keep.

weight_offers      what the loop offers after each update
publisher          encodes and publishes, in a thread of its own
publish_interval   when weights may be published again
kept_versions      versions that are kept: on disk, in Redis, in the registry
version_candidate  which they are
registry_sync      Redis follows what operators decide
final_policy       the policy that a run ends with
"""
