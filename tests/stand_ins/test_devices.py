"""
Every piece of a round on the stand-in GPU, for one row and for several: nothing is on the wrong device, the result is
that of the CPU, and what waits for the device is in a list that may only shrink.
"""

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_ssd.cache import masks
from hf_ssd.cache.branches import Branches
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.ragged import RaggedCache, RaggedLayer
from hf_ssd.drafting.outcome_candidates import OutcomeCandidates
from hf_ssd.drafting.sampling import SpeculationNoise, draw, saguaro
from hf_ssd.drafting.speculation_cache import SpeculationCache
from hf_ssd.drafting.verified_prefix import VerifiedPrefix
from hf_ssd.generation.proposers.base import joined
from hf_ssd.generation.proposers.ngrams import NGramFallback
from hf_ssd.generation.proposers.random_tokens import RandomFallback
from hf_ssd.generation.sequences import Sequences
from hf_ssd.generation.target import prompts_without_padding
from hf_ssd.generation.verification import uniform_numbers, verify_greedy, verify_sampled
from hf_ssd.logits_processing import process_branches, process_positions
from hf_ssd.rounds import FINISHED, padded

from ..helpers.stand_in_gpu import StandInGPU, to_gpu
from ..helpers.stand_in_rounds import generate
from ..helpers.tiny import VOCAB, padded_batch, tiny_model

PROCESSORS = {
    "warpers": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9)],
    "repetition": [RepetitionPenaltyLogitsProcessor(1.3)],
    "ngrams": [NoRepeatNGramLogitsProcessor(2)],
}

WAITS = {  # in hf_ssd; what waits in transformers, its processors for example, is not for this list
    "boolean index | target.py prompts_without_padding": "once a call: the draft gets prompts without padding",
    "__bool__ | cached_model.py __init__": "once a call: whether a prompt is padded",
    "__bool__ | support.py are_close": "once for each model: whether it obeys",
    "copy to host | outcome_candidates.py of": "the cache shape works on the host",
}


class Place:
    """Where a piece runs, and how many rows it has."""

    def __init__(self, device: str, rows: int):
        self.device, self.rows = torch.device(device), rows
        self.generator = torch.Generator().manual_seed(0)

    def model(self, family: str = "llama"):
        return tiny_model(family) if self.device.type == "cpu" else to_gpu(tiny_model(family))

    def tokens(self, *shape: int) -> torch.LongTensor:
        return torch.randint(2, VOCAB, (self.rows, *shape), generator=self.generator).to(self.device)

    def scores(self, *shape: int) -> torch.Tensor:
        return (3 * torch.randn(self.rows, *shape, VOCAB, generator=self.generator)).to(self.device)

    def lengths(self, first: int) -> list[int]:
        return [first + 2 * row for row in range(self.rows)]


def filled(place: Place, family: str = "llama", **options) -> CachedModel:
    decoder = CachedModel(place.model(family), RaggedCache(), **options)
    decoder.extend(place.tokens(12), [0] * place.rows)
    return decoder


def extend(place, family):
    decoder = filled(place, family)
    even = decoder.extend(place.tokens(3), [12] * place.rows)
    return even, decoder.extend(place.tokens(4), place.lengths(5)), decoder.extend(place.tokens(1), place.lengths(9))


def extend_with_padding(place):
    valid = (torch.arange(12) >= torch.arange(place.rows)[:, None] + 1).to(place.device)
    first = [-1 - row for row in range(place.rows)]
    decoder = filled(place, valid=valid, first_positions=first, column_limit=40)
    return decoder.extend(place.tokens(3), place.lengths(9)), decoder.extend(place.tokens(1), [12] * place.rows)


def leave_rows_out(place):
    decoder, finished = filled(place, valid=torch.ones(place.rows, 12, dtype=torch.bool)), [False] * place.rows
    finished[0] = place.rows > 1
    decoder.leave_out(finished)
    logits = decoder.extend(place.tokens(3), place.lengths(9))
    grown = Branches(decoder, place.tokens(4).clamp(max=9), base=12 + 2 * place.rows, depth=2).grow(place.tokens(4))
    decoder.cache.take_back()
    return logits, grown, decoder.extend(place.tokens(2), place.lengths(9))


def grow(place, family):
    branches = Branches(filled(place, family), place.tokens(5).clamp(max=12), base=12, depth=3)
    return [branches.grow(place.tokens(5)) for _ in range(3)]


def caches(place):
    model, ids = place.model(), place.tokens(9)
    theirs = DynamicCache(config=model.config)
    model(input_ids=ids, **{CACHE: theirs})
    cache = RaggedCache.from_cache(theirs)
    CachedModel(model, cache).extend(place.tokens(3), place.lengths(5))
    return [layer.keys for layer in cache.copy_to(theirs, 8).layers]


def windows(place):
    positions = torch.arange(place.rows * 3, device=place.device).view(place.rows, 3)
    allowed = masks.visible_up_to(positions, 20, torch.ones(place.rows, 1, 4, dtype=torch.bool, device=place.device))
    return masks.additive(masks.within_window(allowed, positions, positions.new_zeros(20), 5), torch.float32)


def look_up(place):
    cache = SpeculationCache([[0, 1, 2, 3]] * place.rows, [[4, 5, 6, 7]] * place.rows)
    for _ in range(2):
        cache.append([[[8]] * 4] * place.rows, place.scores(4).softmax(-1)[:, :, None], [[[9]] * 4] * place.rows)
    return cache.distributions(cache.lookup([1] * place.rows, [5] * place.rows), 2)


def verify(place):
    scores, drafted, q = place.scores(4), place.tokens(3), place.scores(3).softmax(-1)
    outcomes = list(verify_greedy(scores, scores[:, :-1].argmax(-1)))
    for probabilities, tokens in ((q, drafted), (None, drafted), (None, drafted[:, :0])):
        torch.manual_seed(0)
        outcomes += verify_sampled(scores[:, : tokens.shape[1] + 1], probabilities, tokens, uniform_numbers(tokens))
    return outcomes


def fork(place):
    scores, fan_outs = place.scores(4), [[3, 0, 1, 2 + row] for row in range(place.rows)]
    scores, logits = scores.masked_fill(scores < -4, -torch.inf), scores
    candidates = OutcomeCandidates.of(scores, logits, place.tokens(3), [False] * place.rows, 8)
    return *map(torch.tensor, candidates.outcomes(fan_outs, fewest=2)), torch.tensor(candidates.probabilities)


def prefix(place):
    prompts = [tokens[: 5 + 2 * row] for row, tokens in enumerate(place.tokens(5 + 2 * place.rows))]
    prefix = VerifiedPrefix(place.model(), prompts, 60)
    prefix.feed(0, wanted=1)
    prefix.write(place.tokens(3))
    logits = prefix.feed(3, wanted=4)
    prefix.grow([FINISHED if row == 1 else 2 for row in range(place.rows)], [5] * place.rows)
    return logits, prefix.ids, prefix.feed(0, wanted=2)


def fall_back(place):
    ids, lengths, rows = place.tokens(30) % 4, place.lengths(15), list(range(place.rows))[-2:]
    tokens, q, results = [[5, 6, 7] for _ in range(place.rows)], place.scores(3).softmax(-1), []
    drafted = [0 if row in rows else 3 for row in range(place.rows)]
    for fallback in (NGramFallback(), RandomFallback(VOCAB, seed=1)):
        proposal = fallback.propose(ids.cpu(), lengths, rows, 3)
        for row, of_row in zip(rows, padded(proposal.tokens, 3)):
            tokens[row] = of_row
        results += [torch.tensor(tokens), joined(tokens, VOCAB, place.device, drafted, q, rows, proposal)]
    return results


def draw_tokens(place):
    noise, q = SpeculationNoise(1, VOCAB, place.device), saguaro(place.scores(2).softmax(-1), 4, 0.5)
    drawn = noise.gather(range(place.rows), [[n, n + 1] for n in place.lengths(3)], depth=2)
    noise.forget_before(place.lengths(4))
    assert draw(q, drawn).shape == (place.rows, 2)  # a GPU draws other numbers
    return q, draw(q, torch.ones_like(q))


def process(place, name):
    processors = PROCESSORS.get(name) or [MinLengthLogitsProcessor(8, torch.tensor([5], device=place.device))]
    processors = LogitsProcessorList(processors)
    ids, lengths = place.tokens(20) % 9, place.lengths(6)
    positions = process_positions(processors, place.scores(3), ids, lengths, list(range(len(lengths))))
    return positions, process_branches(processors, place.scores(), ids, torch.tensor(lengths))


def process_prefixes(place):
    processors = LogitsProcessorList([PrefixConstrainedLogitsProcessor(lambda row, prefix: [3, 4, 5], 1)])
    ids = place.tokens(20) % 2 + 3
    return process_positions(processors, place.scores(3), ids, place.lengths(6), list(range(place.rows)))


def sequences(place):
    rows = Sequences(place.tokens(6), StoppingCriteriaList([MaxLengthCriteria(30)]), 0)
    for accepted in (range(place.rows), [1] * place.rows, [-1] + [2] * (place.rows - 1)):
        rows.propose([[6, 7, 8, 9, 5]] * place.rows)
        rows.stop_where_plain_generation_would(rows.accept(list(accepted), [4] * place.rows), lambda _: None)
    return rows.ids, rows.last


def prompts(place):
    valid = torch.arange(6, device=place.device) >= torch.arange(place.rows, device=place.device)[:, None]
    return prompts_without_padding(place.tokens(6), valid.long())


PIECES = {
    **{f"extend {family}": (extend, family) for family in ("llama", "mistral", "gemma")},
    **{f"grow {family}": (grow, family) for family in ("llama", "gemma")},
    **{f"process {name}": (process, name) for name in (*PROCESSORS, "shortest")},
    **{
        piece.__name__: (piece,)
        for piece in (
            extend_with_padding, leave_rows_out, caches, windows, look_up, verify, fork, prefix, fall_back, draw_tokens,
            process_prefixes, sequences, prompts,
        )
    },
}  # fmt: skip


@torch.inference_mode()
def run(name: str, rows: int) -> set[str]:
    """Runs a piece on the CPU and on the stand-in, compares, and returns what of hf_ssd waited for the device."""
    piece, *arguments = PIECES[name]
    expected, gpu = piece(Place("cpu", rows), *arguments), StandInGPU()
    with gpu:
        result = piece(Place("cuda", rows), *arguments)
    result, expected = ([one] if isinstance(one, torch.Tensor) else list(one) for one in (result, expected))
    torch.testing.assert_close([one.as_subclass(torch.Tensor) for one in result], expected, rtol=0, atol=0)
    return {f"{wait.what} | {wait.where[8:]}" for wait in gpu.waits if wait.where.startswith("hf_ssd: ")}


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", PIECES)
def test_every_piece_is_on_one_device(name, rows):
    found = run(name, rows)
    assert found <= WAITS.keys(), "another wait: mend it, or give its reason in the list"


def test_nothing_is_in_the_list_that_no_longer_waits():
    assert set.union(*(run(name, rows=4) for name in PIECES)) == WAITS.keys()


@pytest.mark.parametrize("options", [
    {"family": "gemma", "fallback": "ngram"},
    {"fallback": "random", "repetition_penalty": 1.2, "min_new_tokens": 12},
    {"asynchronous": False, "no_repeat_ngram_size": 2},
    {"do_sample": True, "fallback": "ngram", "saguaro_c": 0.5, "no_repeat_ngram_size": 2},
], ids=str)  # fmt: skip
def test_whole_calls_with_other_settings(options, monkeypatch):
    family = options.get("family", "llama")
    output, _ = generate(monkeypatch, 4, **{"do_sample": False, **options})
    assert output.ssd_stats.draft_failure is None and sum(map(sum, output.ssd_stats.column("accepted"))) > 0
    if not options.get("do_sample"):
        settings = {k: v for k, v in options.items() if k in ("repetition_penalty", "min_new_tokens")}
        settings |= {k: v for k, v in options.items() if k == "no_repeat_ngram_size"}
        plain = tiny_model(family).generate(**padded_batch(4), do_sample=False, max_new_tokens=40, **settings)
        assert torch.equal(output.sequences.cpu(), plain)


def test_an_index_on_the_host_is_noticed(monkeypatch):
    """The mutant."""

    def move_rows(self, places, rows):
        for storage in (self.keys, self.values):
            storage[places] = storage[rows]

    monkeypatch.setattr(RaggedLayer, "move_rows", move_rows)
    with pytest.raises(AssertionError, match="another wait"):
        test_every_piece_is_on_one_device("leave_rows_out", rows=4)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_tensor_that_is_made_on_the_host_is_noticed(rows, monkeypatch):
    """The mutant: `device=` is missing."""
    monkeypatch.setattr(masks, "visible_up_to", lambda last, width, valid=None: torch.arange(width) <= last[:, :, None])
    with pytest.raises(RuntimeError, match="same device"):
        test_every_piece_is_on_one_device("extend llama", rows)
