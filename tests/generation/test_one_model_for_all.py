"""A model that others use during a call: threads, tasks, a target with the same draft, an interrupt, a processor."""

import contextlib
import functools
import threading

import pytest
import torch

import hf_ssd
from hf_ssd.cache.attention import GROUPED
from hf_ssd.cache.cached_model import view_for_passes
from hf_ssd.generation import target as of_calls
from hf_ssd.generation.target import Features
from hf_ssd.rounds import AHEAD, IN_TURN

from ..helpers import comparing
from ..helpers.heads import expected_features, knows, tiny_head
from ..helpers.tiny import padded_batch, tiny_draft, tiny_llava, tiny_model

SETTINGS = {"lookahead": 3, "asynchronous": False}
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def prompt(number: int) -> torch.LongTensor:
    return torch.arange(3 + number % 5, 9 + number % 5)[None]


@pytest.mark.parametrize("calls", [36, pytest.param(1000, marks=pytest.mark.slow)])
def test_threads_that_share_models_get_the_tokens_of_plain_decoding(calls, assistant):
    """One target in five ways, and another one with the same draft."""
    (target, other), draft, failed, speculated = (hf_ssd.enable(tiny_model()) for _ in range(2)), tiny_draft(), [], []
    expected = [target.generate(prompt(number), **OPTIONS) for number in range(5)]
    in_turn = {"assistant_model": draft, "ssd_config": hf_ssd.SSDConfig(**SETTINGS)}
    kinds = {
        "in turn": in_turn,
        "ahead": {"assistant_model": assistant, "ssd_config": hf_ssd.SSDConfig(lookahead=3)},
        "n-grams": {"ssd_config": hf_ssd.SSDConfig(drafter="ngram", lookahead=3)},
        "batch": in_turn,
        "another target": in_turn,
        "plain": {},
    }

    def call(kind):
        generate = (other if kind == "another target" else target).generate
        for number in range(calls // len(kinds)):
            try:
                rows = prompt(number).repeat(2 if kind == "batch" else 1, 1)
                output = generate(rows, **OPTIONS, **kinds[kind], return_dict_in_generate=True)
                assert all(torch.equal(row[None], expected[number % 5]) for row in output.sequences)
                if kind != "plain":
                    assert output.ssd_stats.draft_failure is None
                    speculated.append(sum(map(sum, output.ssd_stats.column("accepted"))))
            except Exception as error:
                failed.append((kind, number, error))

    threads = [threading.Thread(target=call, args=[kind]) for kind in kinds]
    [thread.start() for thread in threads]
    [thread.join(300) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    assert not failed and len(speculated) == 5 * (calls // 6) and sum(speculated) > calls
    assert target.config._attn_implementation == draft.config._attn_implementation == "sdpa"


def test_nothing_of_target_and_draft_is_written(monkeypatch):
    """So an interrupt leaves models as they were, and another thread sees no value that is meant for our passes."""
    target, draft = hf_ssd.enable(tiny_llava()), tiny_draft()
    target.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    models = [module for model in (target, draft) for module in model.modules() if hasattr(module, "config")]
    configs = [target.config.text_config, *(module.config for module in models)]
    for kind in {type(config) for config in configs}:

        def guarded(self, name, value, write=kind.__setattr__):
            assert not any(self is config for config in configs), f"{name} of the user's config is written"
            write(self, name, value)

        monkeypatch.setattr(kind, "__setattr__", guarded)
    with pytest.raises(AssertionError):
        target.config.use_cache = True
    inputs, parts = {"input_ids": prompt(0)}, [*target.modules(), *draft.modules(), *configs]
    comparing.generate(target, draft, inputs)  # which tries the models
    before = [dict(vars(part)) for part in parts]
    looks = []

    def look(ids, scores):
        looks.append([dict(vars(part)) for part in parts] == before)
        return scores

    assert comparing.generate(target, draft, inputs, logits_processor=[look]).ssd_stats.tokens_per_round > 1
    assert len(looks) > 20 and all(looks)
    assert target.config.text_config._attn_implementation == "sdpa"
    view = view_for_passes(target)  # in which its parts differ
    assert view.model.language_model.config._attn_implementation == GROUPED
    assert view.config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("tokens, is_call", [(1, False), (6, False), (6, True)])
def test_passes_of_a_processor_are_not_taken_for_those_of_the_call(tokens, is_call, rows, asynchronous, monkeypatch):
    """The processor changes nothing, but runs the target on tokens of its own, as contrastive methods and judges do."""
    target, seen, add = hf_ssd.enable(tiny_model()), [], Features.add
    head, inputs, own = tiny_head(target), padded_batch(rows), torch.arange(2, 2 + tokens).repeat(rows, 1)
    plain = target.generate(**inputs, **comparing.GREEDY).sequences
    kept = torch.nn.functional.pad(inputs["attention_mask"], (0, 30), value=1).bool()
    texts = [row[mask] for row, mask in zip(plain, kept)]
    if not asynchronous:
        knows(monkeypatch, [text.tolist() for text in texts])
    run = functools.partial(target.generate, own, max_new_tokens=3) if is_call else functools.partial(target, own)
    monkeypatch.setattr(Features, "add", lambda self, states, k: seen.append(self) or add(self, states, k))
    with hf_ssd.launch_draft(head, num_threads=1) if asynchronous else contextlib.nullcontext(head) as draft:
        processor = [lambda ids, scores: (scores, run())[0]]
        output = comparing.generate(target, draft, inputs, {"on_draft_failure": "raise"}, logits_processor=processor)
    stats = output.ssd_stats
    assert torch.equal(output.sequences, plain) and {*stats.column("mode")} == {AHEAD if asynchronous else IN_TURN}
    assert asynchronous or stats.tokens_per_round > 1.3
    for states, text, length in zip(seen[-1].values, texts, seen[-1].lengths):
        assert length > len(text) - 9
        torch.testing.assert_close(states[:length], expected_features(target, text)[:length], atol=1e-4, rtol=1e-4)


def test_states_that_are_captured_in_all_passes_are_noticed(monkeypatch):
    """The mutant: hooks are those of the user's modules, so passes of a processor are captured too."""
    view = of_calls.view_for_passes
    monkeypatch.setattr(of_calls, "view_for_passes", lambda model, hooked, packed: view(model, (), packed))
    with pytest.raises((AssertionError, hf_ssd.DraftError)):
        test_passes_of_a_processor_are_not_taken_for_those_of_the_call(6, False, 2, False, monkeypatch)
