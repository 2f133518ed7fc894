"""
Token trees: a pass verifies siblings beside drafted tokens, each of which sees its ancestors alone.

In greedy decoding and in the coupled rule a token is the target's own choice, which the drafted tokens have no part in.
So a path through the tree may be found in any way, and is then decided like a chain.
"""

import dataclasses

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..cache.support import attention_layout, is_flash_attention
from ..config import SSDConfig
from ..devices import from_host
from ..planning.cost_model import LOOKAHEADS
from ..planning.fixed_plan import nodes_of
from ..rounds import Speculation

logger = logging.get_logger(__name__)

NO_TOKEN = -1  # on a path that is shorter than others


class Tree:
    """The nodes of each row: `tokens` `(batch_size, N)` and their `parents`, -1 for the last verified token."""

    def __init__(self, speculation: Speculation):
        self.lookahead, most = len(speculation.tokens[0]), max(map(len, speculation.siblings))
        rows = zip(speculation.tokens, speculation.siblings)
        # A row with fewer siblings is filled with copies of its first drafted token, which are on no path.
        pairs = [[*own, *[(0, row[0])] * (most - len(own))] for row, own in rows]
        self.tokens = [[*row, *[token for _, token in own]] for row, own in zip(speculation.tokens, pairs)]
        self.parents = [[*range(-1, self.lookahead - 1), *[depth - 1 for depth, _ in own]] for own in pairs]

    def ancestors(self) -> np.ndarray:
        """What each token sees, itself included: `(batch_size, N + 1, N + 1)`, the last verified token first."""
        sees = np.zeros((len(self.parents), len(self.parents[0]) + 1, len(self.parents[0]) + 1), dtype=bool)
        sees[:, 0, 0] = True
        for row, parents in enumerate(self.parents):
            for node, parent in enumerate(parents, 1):
                sees[row, node] = sees[row, parent + 1]
                sees[row, node, node] = True
        return sees

    def paths(self, choices: list[list[int]]) -> list[list[int]]:
        """Returns the nodes of each row's path: children that are the `choices` `(rows, N + 1)`, or else the first."""
        paths: list[list[int]] = []
        for tokens, parents, chosen in zip(self.tokens, self.parents, choices):
            path, last = [], -1
            while children := [node for node, parent in enumerate(parents) if parent == last]:
                last = next((node for node in children if tokens[node] == chosen[last + 1]), children[0])
                path.append(last)
            paths.append(path)
        return paths


def verify_tree(target, rows, speculation: Speculation) -> tuple[torch.LongTensor, torch.Tensor]:
    """Feeds the trees. Returns the tokens of a path of each, and its raw logits, which are decided like a chain."""
    tree, record = Tree(speculation), speculation.record
    sees = tree.ancestors()
    logits = target.verify_tree(tree.tokens, sees)
    paths = tree.paths(rows.choices(logits, sees.sum(-1) - 1))
    record.nodes = len(tree.tokens[0])
    record.turns = [len(path) if path[-1] >= tree.lookahead else 0 for path in paths]
    of_paths = [[*path, *[NO_TOKEN] * (tree.lookahead - len(path))] for path in paths]
    target.follow(of_paths)
    nodes = zip(tree.tokens, of_paths)
    following = rows.propose([[NO_TOKEN if node < 0 else of_row[node] for node in path] for of_row, path in nodes])
    index = from_host([[0, *[node + 1 for node in path]] for path in of_paths], logits.device)
    index = index[:, : following.shape[1]]
    return following, logits[torch.arange(len(index), device=index.device)[:, None], index]


def widest(config: SSDConfig) -> int:
    """Returns the most drafted tokens of a row that a pass verifies."""
    longest = config.lookahead if isinstance(config.lookahead, int) else max(LOOKAHEADS)
    return max(longest, nodes_of(config))


def config_for_trees(config: SSDConfig, model: PreTrainedModel, uses_q: bool, worker) -> SSDConfig:
    """Returns the settings for calls of a target, without trees where they cannot be verified, which is said once."""
    layout, workers = attention_layout(model), 1 if worker is None else len(worker.workers)
    hides_no_token = layout.recurrent or layout.indexed or is_flash_attention(model)
    reasons = {
        'trees need `verification="coupled"`; under "rejection" a path that the target chooses would be a bias': uses_q,
        f"in {type(model).__name__} no mask can hide a token from the tokens after it": hides_no_token,
        f"{workers} draft workers prepare shares of the outcomes of chains": workers > 1,
        "several ranks hold the target": worker is not None and worker.ranks.size > 1,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if not nodes_of(config) or reason is None:
        return config
    logger.warning_once(f"`tree_nodes` is left out, and chains are verified: {reason}.")
    return dataclasses.replace(config, tree_nodes="auto")
