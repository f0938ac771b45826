"""The actors' side: thoughts are generated and rewarded, or only measured.

thought_equipment   what both need of a run
thought_generator   what a rollout worker generates with
thought_evaluation  what an evaluation measures with
"""
