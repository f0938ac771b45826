"""The exact optimum, beside all 3,125 ways of five mutations."""

from itertools import product

import numpy as np
import pytest

from penstock.workloads.prompts.categories import QualityReward
from penstock.workloads.prompts.features import mutate
from penstock.workloads.prompts.task_parts import PromptSource
from tests.support.prompts.text_graph import text_graph

REWARD = QualityReward()


def test_it_is_the_best_and_the_mean_of_all_ways() -> None:
    random, source = np.random.default_rng(5), PromptSource()
    for _ in range(5):
        graph = text_graph(source.draw(random)[0], REWARD)
        earned = [graph.followed(way) for way in product(range(5), repeat=5)]
        assert len(graph.texts) <= 32
        assert graph.optimum(5) == pytest.approx(max(earned))
        assert graph.expected(5) == pytest.approx(sum(earned) / len(earned))


def test_a_way_through_the_graph_earns_what_the_texts_do() -> None:
    start = text = "Please, write a Python script."
    graph, total = text_graph(start, REWARD), 0.0
    policy = np.zeros((len(graph.texts), 5))
    for action in (4, 2, 1, 3, 0):
        after = mutate(text, action)
        total += REWARD.of(start, text, after)
        policy[graph.texts.index(text), action] = 1.0
        text = after
    assert graph.followed((4, 2, 1, 3, 0)) == pytest.approx(total)
    assert graph.expected(5, policy) == pytest.approx(total)
