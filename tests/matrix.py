"""
Whole calls as data: pairs of models, settings, options, and which of them go together. `test_matrix.py` makes each call
with a worker and in turn, through the public API alone. A new kind of draft, setting or option is a line here.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from .helpers.families import sharp_model, tiny_config
from .helpers.last_token import LastToken
from .helpers.tiny import FAMILIES, FEW, VOCAB, tiny_draft, tiny_model
from .helpers.vocabularies import DRAFT, TARGET, printable, renamed_draft, resized_draft, tokenizer

AHEAD, IN_TURN = {"ahead"}, {"in_turn"}  # modes


# ---------------------------------------------------------------- pairs


@dataclass(frozen=True)
class Pair:
    draft: Callable | None  # makes it; without one, n-grams of the text are verified
    target: Callable = tiny_model  # makes it
    options: dict = field(default_factory=dict)  # of each call
    vocabulary: int = VOCAB  # prompts have tokens below it
    least: float = 1.1  # tokens per round of greedy calls, at least
    one_pass: bool = False  # whether the draft drafts all tokens in one pass
    launch: dict = field(default_factory=dict)  # how its workers are launched


def offloaded(first: str, last: str):
    """A target whose hooks move the weights of some layers from a disk, as they do between devices."""
    places = {"model.embed_tokens": first, "model.layers.0": first, "model.layers.2": last}
    places |= {"model.layers.1": "cpu" if "disk" in (first, last) else "disk"}
    places |= dict.fromkeys(("model.norm", "model.rotary_emb", "lm_head"), "cpu")
    folder = tempfile.TemporaryDirectory()
    tiny_model().save_pretrained(folder.name)
    options = {"device_map": places, "offload_folder": f"{folder.name}/disk"}
    target = AutoModelForCausalLM.from_pretrained(folder.name, **options)
    target.folder = folder  # which is there as long as it
    assert any(parameter.device.type == "meta" for parameter in target.parameters())
    return target.eval()


BOTH = {"tokenizer": tokenizer(TARGET), "assistant_tokenizer": tokenizer(DRAFT)}
TWO = {"devices": ["cpu", "cpu"]}
MASK = VOCAB - 1  # of drafts that draft in parallel
PAIRS = {
    # so that some tokens are accepted and some are not
    **{name: Pair(lambda name=name: tiny_draft(name, disagreement=0.024 if name == "gemma" else 0.03),
                  lambda name=name: tiny_model(name), least=1.2) for name in FAMILIES},
    "parallel": Pair(lambda: tiny_draft(pard_token=MASK), one_pass=True),
    "parallel, qwen3": Pair(lambda: tiny_draft("qwen3", pard_token=MASK), lambda: tiny_model("qwen3"), one_pass=True),
    "draft padded": Pair(lambda: resized_draft(VOCAB + 7), vocabulary=VOCAB - 7, least=1.05),
    "target padded": Pair(lambda: resized_draft(VOCAB - 7), vocabulary=VOCAB - 7, least=1.05),
    "another tokenizer": Pair(renamed_draft, options=BOTH, vocabulary=VOCAB - 7, least=1.05),
    "another tokenizer, parallel": Pair(lambda: renamed_draft(pard_token=len(DRAFT) - 1), options=BOTH,
                                        vocabulary=VOCAB - 7, least=1.05, one_pass=True),
    "two drafts": Pair(tiny_draft, launch=TWO),
    "two drafts, parallel": Pair(lambda: tiny_draft(pard_token=MASK), one_pass=True, launch=TWO),
    "compiled, parallel": Pair(lambda: tiny_draft(pard_token=MASK), one_pass=True, launch={"compile": True}),
    "hybrid": Pair(lambda: sharp_model(tiny_config("qwen3_next"), 0.004),
                   lambda: sharp_model(tiny_config("qwen3_next"))),
    "disk in the middle": Pair(tiny_draft, lambda: offloaded("cpu", "cpu")),
    "disk at both ends": Pair(tiny_draft, lambda: offloaded("disk", "disk")),
    "no draft": Pair(None, lambda: tiny_model(vocab_size=FEW), vocabulary=FEW),
}  # fmt: skip


# ---------------------------------------------------------------- settings

LOOKAHEADS = {f"lookahead {k}": {"lookahead": k, "budget": 12} for k in (1, 2, 4, 5, 7, 16)}
SHAPES = {shape: {"lookahead": 4, "budget": 16, "fan_out": shape} for shape in ("confidence", "geometric", "uniform")}
FALLBACKS = {
    "n-grams": {"fallback": "ngram"},
    "random": {"fallback": "random"},
    "custom": {"fallback": LastToken()},
    "prompt lookup": {"fallback": PromptLookupCandidateGenerator(max_length=1000)},
}
PLANNED = {  # whose modes are chosen by what a round takes
    "auto": {"lookahead": "auto", "budget": "auto"},
    "auto budget": {"lookahead": 4, "budget": "auto"},
    "auto lookahead": {"lookahead": "auto", "budget": 16},
}
TREES = {
    "trees": {"lookahead": 4, "budget": 16, "tree_nodes": 10},
    "wide trees": {"lookahead": 2, "budget": 16, "tree_nodes": 9},
    "trees of n-grams": {"drafter": "ngram", "lookahead": 5, "tree_nodes": 9},
}
NO_TREES = ("hybrid", "two drafts")  # pairs for which chains are verified, the second if its workers draft
SETTINGS = {
    "single passes": {"lookahead": 0},
    **LOOKAHEADS,
    **SHAPES,
    "a list": {"lookahead": 4, "budget": 16, "fan_out": [6, 3, 0, 2, 5]},
    **{name: {"lookahead": 4, "budget": 16, **settings} for name, settings in FALLBACKS.items()},
    "n-grams alone": {"drafter": "ngram", "lookahead": 5},
    "saguaro 0.5": {"lookahead": 4, "budget": 16, "saguaro_c": 0.5},
    "saguaro 0": {"lookahead": 4, "budget": 16, "saguaro_c": 0.0},
    **PLANNED,
    **TREES,
}


# ---------------------------------------------------------------- options


class EvenTokensOnly(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 1, -torch.inf)


class LateBonus(LogitsProcessor):
    """Depends on the length and on the row."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[range(len(scores)), [(7 * r + input_ids.shape[1]) % scores.shape[1] for r in range(len(scores))]] += 3
        return scores


def by_score(ids, scores):
    """Stops a row by the scores of its tokens."""
    return (scores[-1].amax(-1) > scores[0].amax(-1)) & (len(scores) > 3)


NOTHING = {"nothing": {}}
SHORT = {  # with few rounds or none
    "no time": {"max_time": 0.0},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "fewer tokens than a round": {"max_new_tokens": 4},
}
# An unknown processor keeps all rows at one length: they go on as far as all accept, which these seldom do.
REJECTED = [("custom processors", 4)]
GREEDY = {
    "repetition penalty": {"repetition_penalty": 1.5},
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [6, 7], [40]]},
    "suppressed tokens": {"suppress_tokens": list(range(0, 96, 3))},
    "sequence bias": {"sequence_bias": [[[9], 4.0], [[10, 11], 8.0]]},
    "sequence bias as a dict": {"sequence_bias": {(9,): 4.0, (10, 11): 8.0}},
    "custom processors": {"logits_processor": LogitsProcessorList([EvenTokensOnly(), LateBonus()])},
    "prefix function": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(row, VOCAB, 2))},
    "a long prompt": {"prompt": 300},  # longer than the first allocation
    "stop strings of a config": {
        "generation_config": GenerationConfig(stop_strings=list("aeiou"), pad_token_id=0),
        "tokenizer": printable(),
    },
    "penalty on the prompt": {"encoder_repetition_penalty": 1.3},
    "no bigrams of the prompt": {"encoder_no_repeat_ngram_size": 2},
    "max_length": {"max_new_tokens": None, "max_length": 23},
    "forced eos": {"forced_eos_token_id": 50, "eos_token_id": 50},
    "length penalty": {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 50},
    # numbers of any kind
    "numbers of numpy": {"max_new_tokens": np.int64(16), "eos_token_id": np.int64(50), "temperature": np.float64(1)},
    "eos as a tensor": {"eos_token_id": torch.tensor([50, 51])},
    "eos as a tensor of no dimension": {"eos_token_id": torch.tensor(50)},
    "eos as an array": {"eos_token_id": np.array([50, 51])},
    "nested numbers": {"bad_words_ids": [[np.int64(4)], [5, np.int64(6)]], "suppress_tokens": np.array([7, 8])},
}
RETURNED = {  # by a processor
    "double": lambda ids, scores: scores.double() + 1e-9 * torch.arange(VOCAB),
    "half": lambda ids, scores: scores.half(),
    "bfloat16": lambda ids, scores: scores.bfloat16(),
    "in turns": lambda ids, scores: scores.double() if ids.shape[1] % 2 else scores.half(),
    "integers": lambda ids, scores: (1000 * scores).long(),
    "with a gradient": torch.enable_grad()(lambda ids, scores: scores * torch.ones(1, requires_grad=True)),
}
CALLBACKS = {  # whatever plain generation takes of a user's functions
    **{name: {"logits_processor": LogitsProcessorList([of])} for name, of in RETURNED.items()},
    "a list": {"logits_processor": [RETURNED["double"]]},
    "then a warper": {"logits_processor": [RETURNED["double"]], "renormalize_logits": True},
    "a tuple": {"prefix_allowed_tokens_fn": lambda row, ids: (3, 4, 7, 23, 41)},
    "a range": {"prefix_allowed_tokens_fn": lambda row, ids: range(3, 60)},
    "an array": {"prefix_allowed_tokens_fn": lambda row, ids: np.arange(3, 60)},
    "a tensor": {"prefix_allowed_tokens_fn": lambda row, ids: torch.arange(3, 60)},
    "stops by a bool": {"stopping_criteria": [lambda ids, scores: ids.shape[1] >= 17]},
    "stops by a number": {"stopping_criteria": [lambda ids, scores: (ids[:, -1] == 41).long()]},
    "stops by one of all": {"stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] >= 17])]},
    "stops by scores": {"stopping_criteria": [by_score]},
}
SAMPLED = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical_p": {"typical_p": 0.8, "top_k": 0},
    "penalty": {"repetition_penalty": 1.3, "top_k": 0, "no_repeat_ngram_size": 3},
    "everything": {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
    "eos": {"eos_token_id": [5, 6, 7, 8], "top_k": 0, "min_new_tokens": 3},
    "several sequences": {"num_return_sequences": 3, "top_k": 0},
}
OPTIONS = {**NOTHING, **SHORT, **GREEDY, **CALLBACKS, **SAMPLED}


# ---------------------------------------------------------------- cells: pair, setting, option, rows


def cells(pairs, settings, options, rows) -> list[tuple]:
    return [(a, b, c, d) for a in pairs for b in settings for c in options for d in rows]


OTHERS = [name for name in FAMILIES if name != "llama"]
FOREIGN = ["draft padded", "target padded", "another tokenizer", "another tokenizer, parallel"]
GREEDY_CELLS = [
    *cells(["llama"], ["lookahead 1", "lookahead 4"], NOTHING, (1, 4)),
    *cells(["llama"], ["lookahead 2", "lookahead 7"], NOTHING, (4,)),
    *cells(OTHERS, ["lookahead 1", "lookahead 7"], NOTHING, (4,)),
    *cells(OTHERS, ["lookahead 4"], NOTHING, (1,)),
    *cells(["parallel"], ["lookahead 1", "lookahead 5"], NOTHING, (1, 4)),
    *cells(["parallel"], ["lookahead 2", "lookahead 16"], NOTHING, (4,)),
    *cells(["parallel, qwen3"], ["lookahead 5"], NOTHING, (1, 4)),
    *cells(FOREIGN, ["lookahead 4", "n-grams"], NOTHING, (1, 4)),
    *cells(["llama"], [*SHAPES, "a list", *FALLBACKS], NOTHING, (1, 4)),
    *cells(["llama"], ["auto", "auto budget"], NOTHING, (4,)),
    *cells(["llama"], ["auto lookahead"], NOTHING, (1,)),
    *cells(["llama"], ["lookahead 4"], [*SHORT, *GREEDY], (1, 4)),
    *cells(["llama"], ["lookahead 4"], CALLBACKS, (1, 3)),
    *cells(["hybrid"], ["lookahead 4", "n-grams"], NOTHING, (4,)),
    *cells(["no draft"], ["n-grams alone"], ["nothing", "repetition penalty", "custom processors"], (1, 4)),
    *cells(["llama", "gemma", "parallel", "another tokenizer", *NO_TREES], ["trees"], NOTHING, (4,)),
    *cells(["llama"], ["wide trees"], NOTHING, (1,)),
    *cells(["no draft"], ["trees of n-grams"], NOTHING, (1, 4)),
    *cells(["llama"], ["trees"], ["two tokens", "repetition penalty", "custom processors", "prefix function"], (4,)),
    *cells(["llama"], ["trees"], ["max_length", "stop strings of a config", "stops by scores"], (3,)),
]
SAMPLED_CELLS = [
    *cells(["llama"], ["lookahead 4"], SAMPLED, (1, 4)),
    *cells(["parallel", "parallel, qwen3"], ["lookahead 4"], ["temperature", "penalty", "everything", "eos"], (4,)),
    *cells(["parallel"], ["lookahead 4"], ["temperature"], (1,)),
    *cells(FOREIGN, ["lookahead 4"], ["temperature"], (1, 4)),
    *cells(["llama"], ["saguaro 0.5", "saguaro 0", "uniform", "auto budget"], ["top_k"], (4,)),
    *cells(["hybrid"], ["lookahead 4"], ["temperature"], (4,)),
    *cells(["no draft"], ["n-grams alone"], ["top_k"], (4,)),
]
COUPLED_CELLS = [
    *cells(["llama"], ["lookahead 4"], [*NOTHING, *SAMPLED, "custom processors", "sequence bias"], (4,)),
    *cells(["llama"], [*SHAPES, "a list", *FALLBACKS, *PLANNED], ["temperature"], (1,)),
    *cells(["parallel", "two drafts", "hybrid"], ["lookahead 4"], ["everything"], (4,)),
    *cells(FOREIGN, ["lookahead 4", "n-grams"], ["temperature"], (4,)),
    *cells(["no draft"], ["n-grams alone"], ["top_k"], (4,)),
    *cells(["llama"], ["trees"], ["penalty", "eos", "several sequences", "custom processors"], (4,)),
    *cells(["gemma", "parallel", "another tokenizer"], ["wide trees"], ["everything"], (4,)),
    *cells(["no draft"], ["trees of n-grams"], ["top_k"], (4,)),
]
# Cells, and then pairs, settings and options, of the slow suite: others in the quick one are like them.
SLOW_CELLS = cells(["llama"], ["lookahead 4"], ["temperature", "top_k", "top_p", "min_p"], (4,))  # as in "everything"
SLOW_CELLS += cells(FOREIGN[:3], ["n-grams"], ["temperature"], (4,)) + cells(OTHERS, ["lookahead 1"], NOTHING, (4,))
SLOW = [
    "two drafts, parallel", "compiled, parallel", "disk in the middle", "lookahead 2", "saguaro 0.5",
    "sequence bias as a dict", "eos as a tensor", "eos as an array", "double", "half", "bfloat16", "a tuple", "a range",
    "stops by one of all",
]  # fmt: skip
OTHER_PAIRS = ["disk in the middle", "disk at both ends", "two drafts", "two drafts, parallel", "compiled, parallel"]
GREEDY_CELLS += cells(OTHER_PAIRS, ["lookahead 4"], NOTHING, (4,))
SAMPLED_CELLS += cells(OTHER_PAIRS, ["lookahead 4"], ["temperature"], (4,))
