"""Captured passes give the logits and tokens of eager ones. A tape takes the place of CUDA graphs."""

import functools

import pytest
import torch
from transformers import GenerationConfig, set_seed

import hf_ssd
from hf_ssd.cache import graphs, passes
from hf_ssd.cache.branches import Branches, extend_with_branches
from hf_ssd.cache.cache_name import CACHE
from hf_ssd.cache.cached_model import CachedModel
from hf_ssd.cache.graphs import CapturedPass, Graphs
from hf_ssd.cache.passes import cached_model
from hf_ssd.cache.ragged import RaggedCache, RaggedLayer
from hf_ssd.drafting.request import SessionRequest
from hf_ssd.drafting.verified_prefix import WORTH_KEEPING, VerifiedPrefix

from ..helpers import comparing
from ..helpers.stand_in_rounds import generate
from ..helpers.suites import quick_first
from ..helpers.tape import Launches, use_tapes
from ..helpers.tiny import FAMILIES, VOCAB, padded_batch, tiny_draft, tiny_model
from .test_synchronizations import most

ROWS, PROMPT, ROUNDS = 5, 9, 16
ENDS = {4: 2, 6: 0, 9: 4}  # rounds in which a row ends


@pytest.fixture
def tapes(monkeypatch):
    return use_tapes(monkeypatch)


@torch.inference_mode()
def call(model, cuda_graphs, rows=ROWS, rounds=ROUNDS, limit=None, padded=False):
    """
    Decodes like the target and the draft: verifications, feeding passes of several sizes and branches, for a text that
    grows, with rows that advance by different amounts and end. Returns the logits of each pass, of the rows that have
    not ended, and the decoder.
    """
    generator, device = torch.Generator().manual_seed(rows), model.device
    valid = (torch.arange(PROMPT) >= torch.arange(rows)[:, None]).to(device) if padded else None
    first = [-row for row in range(rows)] if padded else None
    options = {"valid": valid, "first_positions": first, "column_limit": limit}
    decoder = cached_model(model, RaggedCache(), cuda_graphs, **options)

    def tokens(*shape):
        return torch.randint(2, VOCAB, (rows, *shape), generator=generator).to(device)

    found, lengths, live = [decoder.extend(tokens(PROMPT), [0] * rows)], [PROMPT] * rows, list(range(rows))
    for step in range(rounds):
        if step in ENDS and ENDS[step] in live:
            live.remove(ENDS[step])
            decoder.leave_out([row not in live for row in range(rows)])
        fed = (4, 4, 1, 6, 11)[step % 5]
        found.append(decoder.extend(tokens(fed), lengths)[live])
        lengths = [n + max(1, fed - (row + step) % 3) for row, n in enumerate(lengths)]
        one = decoder.extend(tokens(2), lengths)
        other = decoder.extend(tokens(2), [n + 2 for n in lengths], logits_to_keep=torch.tensor([1], device=device))
        found += [one[live], other[live]]  # which are read after later passes
        forks = torch.tensor([[n - i % 2 for i in range(3 + step % 2)] for n in lengths], device=device)
        branches = Branches(decoder, forks, base=max(lengths) + 4, depth=3)
        found += [branches.grow(tokens(forks.shape[1]))[live] for _ in range(3)]
        # A parallel draft feeds whole branches.
        grown = extend_with_branches(decoder, tokens(2), lengths, forks, tokens(forks.shape[1], 3), max(lengths) + 2)
        found.append(grown[live])
    decoder.close()
    return found, decoder


def same(ours, theirs) -> bool:
    return all(torch.allclose(one, other, atol=1e-4, rtol=1e-4) for one, other in zip(ours, theirs, strict=True))


OF_FAMILIES = [("gemma", True), ("llama", False), *((family, True) for family in FAMILIES if family != "gemma")]


@pytest.mark.slow
@pytest.mark.parametrize("family, padded", OF_FAMILIES)
def test_logits_are_those_of_eager_passes(family, padded, tapes):
    model = tiny_model(family)
    expected, _ = call(model, False, padded=padded)
    found, decoder = call(model, "auto", padded=padded)
    kept = Graphs.of(model)
    assert same(found, expected) and kept.failure is None and not min(one.to_compare for one in kept.passes.values())
    assert [len({key[axis] for key in kept.passes}) for axis in range(3)] == [3, 7, 2]  # rows, tokens and columns
    assert kept.capture.captured == decoder.preparations == len(kept.passes)
    assert kept.capture.replayed == len(found) - 1


@pytest.mark.slow
def test_a_second_call_captures_nothing(tapes):
    model, prepared = tiny_model(), []
    eager = functools.cache(lambda rows, limit: call(model, False, rows, rounds=8, limit=limit)[0])
    for rows, limit in ((5, 300), (5, 300), (5, 200), (7, 300), (5, 300)):
        found, decoder = call(model, "auto", rows, rounds=8, limit=limit)
        assert same(found, eager(rows, limit))
        prepared.append(decoder.preparations > 0)
    assert prepared == [True, False, False, True, False]  # with more rows, the storage has room for them already
    assert Graphs.of(model).storage[0][0].shape[::2] == (8, 1024)


@pytest.mark.slow
def test_storage_that_grows_in_a_call_is_captured_anew(tapes, monkeypatch):
    monkeypatch.setattr(graphs, "COLUMNS_AHEAD", 64)
    model = tiny_model(num_hidden_layers=1)
    found, decoder = call(model, "auto", rounds=45)
    kept = Graphs.of(model)
    assert same(found, call(model, False, rounds=45)[0]) and kept.storage[0][0].shape[2] == 512
    assert len(kept.passes) < decoder.preparations  # those of the smaller storage are gone


def test_of_two_calls_at_a_time_one_runs_eagerly(tapes):
    model, decoders = tiny_model(), []
    for _ in range(2):
        decoders.append(cached_model(model, RaggedCache(), "auto"))
        decoders[-1].extend(torch.full((1, 5), 7), [0])
        decoders[-1].extend(torch.full((1, 2), 7), [5])
    assert [decoder.preparations for decoder in decoders] == [1, 0]
    decoders.clear()  # without closing them
    assert call(model, "auto", rounds=1)[1].preparations


def test_weights_that_move_are_captured_anew(tapes):
    model = tiny_model()
    call(model, "auto", rounds=2)
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(0.5 * model.model.layers[1].mlp.up_proj.weight)
    found, decoder = call(model, "auto", rounds=2)
    assert decoder.preparations and same(found, call(model, False, rounds=2)[0])


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
IMPOSSIBLE = {
    "has hooks": lambda model: model.lm_head.register_forward_hook(lambda *_: None),
    "has adapters": lambda model: model.model.layers[0].mlp.add_module("base_layer", torch.nn.Identity()),
    "is on several devices": lambda model: model.model.layers[0].to("meta"),
    "is in training mode": lambda model: model.train(),
    "has a rotary embedding that depends": lambda model: setattr(model.config, "rope_parameters", DYNAMIC),
}


@pytest.mark.parametrize("reason", IMPOSSIBLE)
def test_a_model_that_cannot_be_captured_runs_eagerly_and_says_so(reason, tapes, monkeypatch):
    said, model = [], tiny_model()
    monkeypatch.setattr(passes.logger, "warning_once", said.append)
    IMPOSSIBLE[reason](model)
    assert type(cached_model(model, RaggedCache(), "auto", view=model)) is CachedModel
    assert len(said) == 1 and f"runs without CUDA graphs: it {reason}" in said[0]
    assert type(cached_model(model, RaggedCache(), False, view=model)) is CachedModel and len(said) == 1


def test_without_a_gpu_only_a_call_that_asks_for_graphs_is_told(monkeypatch):
    said, model = [], tiny_model()
    monkeypatch.setattr(passes.logger, "warning_once", said.append)
    for cuda_graphs, count in (("auto", 0), (False, 0), (True, 1)):
        assert type(cached_model(model, RaggedCache(), cuda_graphs)) is CachedModel
        assert len(said) == count
    assert "it is on cpu" in said[0]


@torch.inference_mode()
def test_a_draft_goes_on_with_an_earlier_text_or_takes_its_place(tapes):
    draft, length = tiny_draft(), WORTH_KEEPING + 6
    text = torch.randint(2, VOCAB, (length + 8,), generator=torch.Generator().manual_seed(0))
    texts, earlier, logits, replays = [text[:length], text, text.flip(0)], {}, {}, [0]
    for cuda_graphs in ("auto", False):
        for number, one in enumerate(texts):  # the second one goes on with the first one, and the third does not
            config, options = hf_ssd.SSDConfig(cuda_graphs=cuda_graphs), GenerationConfig(max_length=200)
            request = SessionRequest(config, options, [one], 0, VOCAB)
            prefix = VerifiedPrefix(draft, request, earlier.get(cuda_graphs))
            prefix.feed(0, wanted=1)
            prefix.grow([[5]], [0])
            logits[cuda_graphs, number] = prefix.feed(0, wanted=1)
            earlier[cuda_graphs] = prefix
            if cuda_graphs == "auto":
                replays.append(Graphs.of(draft).capture.replayed)
    assert all(torch.allclose(logits["auto", n], logits[False, n], atol=1e-4) for n in range(3))
    assert sorted(set(replays)) == replays  # there were some in each call


# ---------------------------------------------------------------- mutants


READS = {
    "item": lambda keys: keys.sum().item(),
    "mask": lambda keys: keys[keys > 0],
    "from the host": lambda keys: keys[0, 0, 0] * torch.tensor([2.0]),
}


@pytest.mark.parametrize("name", quick_first(READS))
def test_a_pass_that_reads_numbers_runs_eagerly_and_says_so(name, tapes, monkeypatch):
    said, update = [], RaggedLayer.update

    def reading(self, keys, *arguments):
        READS[name](keys)
        return update(self, keys, *arguments)

    monkeypatch.setattr(RaggedLayer, "update", reading)
    monkeypatch.setattr(passes.logger, "warning", said.append)
    model = tiny_model()
    found, decoder = call(model, "auto", rounds=3)
    assert same(found, call(model, False, rounds=3)[0]) and decoder.preparations == 0
    call(model, "auto", rounds=1)
    assert len(said) == 1 and "runs without CUDA graphs: operation not permitted" in said[0]


def a_tensor_that_moves(monkeypatch):
    take_in = Graphs.take_in

    def moving(self, cache, *arguments):
        is_here = take_in(self, cache, *arguments)
        cache.layers[1].keys = cache.layers[1].keys.clone()
        cache.set_window(None)
        return is_here

    monkeypatch.setattr(Graphs, "take_in", moving)


def a_number_that_changes(monkeypatch):
    update = RaggedLayer.update

    def numbered(self, keys, values, *arguments):
        return update(self, keys, (1 + len(numbers) % 3) * values, *arguments)

    def extend(self, tokens, lengths, **options):
        numbers[:] = [1] * lengths[0]
        return original(self, tokens, lengths, **options)

    numbers, original = [], CachedModel.extend
    monkeypatch.setattr(CachedModel, "extend", extend)
    monkeypatch.setattr(RaggedLayer, "update", numbered)


def logits_that_are_read_after_the_next_replay(monkeypatch):
    def own(self, inputs, tokens):
        graphs.fill(self.inputs, inputs)
        self.replay()
        return self.logits[:, :tokens]

    monkeypatch.setattr(CapturedPass, "__call__", own)


def padding_that_real_tokens_see(monkeypatch):
    """It is another token in the column of the last one."""
    fill = graphs.fill

    def other_tokens(static, inputs):
        fill(static, inputs)
        static["input_ids"][:, inputs["input_ids"].shape[1] :] = 3

    monkeypatch.setattr(graphs, "fill", other_tokens)


MUTANTS = [
    (a_tensor_that_moves, False),
    (a_tensor_that_moves, True),
    (logits_that_are_read_after_the_next_replay, False),
    (padding_that_real_tokens_see, False),
    (a_number_that_changes, False),
    (a_number_that_changes, True),
]


@pytest.mark.parametrize("mutate, is_compared", quick_first(MUTANTS, 4))
def test_a_replay_that_differs_is_noticed(mutate, is_compared, tapes, monkeypatch):
    """In the first call, which compares replays with eager passes and goes on with these; otherwise by these tests."""
    mutate(monkeypatch)
    if not is_compared:
        monkeypatch.setattr(passes, "CapturedPass", functools.partial(CapturedPass, to_compare=0))
    model = tiny_model()
    found, expected = call(model, "auto", rounds=6)[0], call(model, False, rounds=6)[0]
    assert same(found, expected) == is_compared
    assert (Graphs.of(model).failure == "a replay gives other logits") == is_compared


# ---------------------------------------------------------------- whole calls


@pytest.mark.slow
@pytest.mark.parametrize("rows, options", [(1, {}), (3, {"temperature": 0.7, "top_k": 30})], ids=["greedy", "sampled"])
def test_a_call_in_turn_gives_the_same_tokens(rows, options, tapes):
    target, draft = hf_ssd.enable(tiny_model()), tiny_draft()
    outputs = []
    for cuda_graphs in (False, "auto", "auto"):
        set_seed(3)
        of_config = {"lookahead": 3, "cuda_graphs": cuda_graphs}
        more = {"do_sample": bool(options), "max_new_tokens": 50, "eos_token_id": [5, 6, 7], **options}
        outputs.append(comparing.generate(target, draft, padded_batch(rows), of_config, **more))
    eager, *captured = outputs
    for output in captured:
        assert torch.equal(output.sequences, eager.sequences)
        assert output.ssd_stats.column("accepted") == eager.ssd_stats.column("accepted")
        assert torch.allclose(output[CACHE].layers[0].keys, eager[CACHE].layers[0].keys, atol=1e-5)
    compiles = [any(output.ssd_stats.column("compiles")) for output in outputs]
    assert compiles == [False, True, False] and len(tapes.made) == 2  # of target and draft
    assert all(capture.replayed > 2 * capture.captured for capture in tapes.made)


@pytest.mark.slow
@pytest.mark.parametrize("rows, do_sample", [(1, False), (4, True)])
def test_a_call_on_the_stand_in_gives_the_same_tokens_and_waits_no_more_often(rows, do_sample, monkeypatch):
    tapes = use_tapes(monkeypatch, "cuda")
    found = {}
    for cuda_graphs in (False, "auto"):
        launches = Launches()
        with monkeypatch.context() as patches:
            output, gpu = generate(patches, rows, do_sample, calls=4, watch=launches, cuda_graphs=cuda_graphs)
        assert output.ssd_stats.draft_failure is None and output.ssd_stats.hit_rate > 0
        found[cuda_graphs] = output.sequences.cpu(), most(gpu.visits), launches.count / output.ssd_stats.rounds
    (tokens, waits, launched), (tokens_of_graphs, waits_of_graphs, launched_of_graphs) = found.values()
    assert torch.equal(tokens, tokens_of_graphs) and waits == waits_of_graphs
    assert len(tapes.made) == 2 and not any(output.ssd_stats.column("compiles"))
    assert launched_of_graphs < launched * (0.4 if do_sample else 0.3)


# ---------------------------------------------------------------- errors


def broken(of, name: str, calls: int):
    """Lets a method raise an error after some calls."""

    def breaks(monkeypatch):
        method, left = getattr(of, name), [calls]

        def failing(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("CUDA error: an illegal memory access")
            return method(*arguments, **options)

        monkeypatch.setattr(of, name, failing)

    return breaks


ERRORS = {
    "the first storage": broken(Graphs, "take_in", 0),
    "more storage": broken(Graphs, "take_in", 3),
    "a capture": broken(passes, "static_copy", 1),
    "a replay": broken(CapturedPass, "__call__", 6),
    "a comparison": broken(passes, "are_close", 2),
}


def decided(cuda_graphs, target):
    settings, draft = {"lookahead": 3, "cuda_graphs": cuda_graphs}, tiny_draft()
    outputs = [comparing.generate(target, draft, padded_batch(3), settings, max_new_tokens=12) for _ in range(2)]
    return torch.stack([output.sequences for output in outputs])


@pytest.mark.parametrize("place", ERRORS)
def test_an_error_of_a_graph_loses_no_token_and_is_said_once(place, tapes, monkeypatch):
    expected, said = decided(False, hf_ssd.enable(tiny_model())), []
    target = hf_ssd.enable(tiny_model())
    capture_alone(monkeypatch)
    monkeypatch.setattr(passes.logger, "warning", said.append)
    ERRORS[place](monkeypatch)
    assert torch.equal(decided("auto", target), expected)
    assert Graphs.of(target).failure == "CUDA error: an illegal memory access"
    assert [f"{type(target).__name__} runs without CUDA graphs: {Graphs.of(target).failure}"] == said


def capture_alone(monkeypatch):
    """Passes of the draft run eagerly, so that an error is that of the target."""
    eagerly = lambda model, cache, cuda_graphs, **options: cached_model(model, cache, **options)  # noqa: E731
    monkeypatch.setattr("hf_ssd.drafting.verified_prefix.cached_model", eagerly)


def test_without_a_stream_for_captures_passes_run_eagerly(tapes, monkeypatch):
    expected, said = decided(False, hf_ssd.enable(tiny_model())), []
    monkeypatch.setattr(passes.logger, "warning_once", said.append)
    broken(Graphs, "__init__", 0)(monkeypatch)
    assert torch.equal(decided("auto", hf_ssd.enable(tiny_model())), expected)
    assert "illegal memory access" in said[0] and len(set(said)) == 1
