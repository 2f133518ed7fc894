"""What a running batch has read is not read again: the texts are those of calls of their own all the same."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer

import hf_ssd
from hf_ssd import devices
from hf_ssd.cache import kept_prefixes
from hf_ssd.cache.kept_prefixes import AUTO, KeptPrefixes
from hf_ssd.config import SSDConfig
from hf_ssd.rounds import AHEAD, IN_TURN, PLAIN

from ..helpers.families import sharp_model, tiny_config
from ..helpers.tiny import VOCAB, tiny_draft, tiny_model
from .test_continuous import (
    MODES,
    OF_FAMILIES,
    OF_HYBRIDS,
    After,
    accepted_counts,
    coupled,
    ended,
    plainly,
    prompts,
    run,
)

LONG = 90  # tokens of a prompt


def more(ids, count, seed):
    """Returns a text with more tokens of the user's after it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([ids, torch.randint(2, VOCAB, (1, count), generator=generator)], dim=1)


def greedy(ids, tokens=16):
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}


def chat(target, drafts, mode, keep="auto", turns=3, between=lambda turn: None):
    """Returns the manager, and the requests of a conversation, whose text each turn continues."""
    config, ids, found = SSDConfig(**MODES[mode]), prompts((LONG,))[0], []
    with hf_ssd.continuous_batching(target, drafts, config, 3, 8, keep_prefixes=keep) as manager:
        for turn in range(turns):
            between(turn)
            found.append(ended(manager, **greedy(ids)))
            expected = plainly(target)(turn, greedy(ids))
            found[-1].is_equal = torch.equal(found[-1].output, expected)
            ids = more(expected, 10, turn)
        found[0].kept = [text.tokens for text in manager.rows.kept.texts]
    return manager, found


def counts(found):
    return accepted_counts([request.stats.records for request in found])


@pytest.mark.parametrize("family, mode", OF_FAMILIES)
def test_a_conversation_that_goes_on_is_not_read_again(family, mode):
    target, draft = hf_ssd.enable(tiny_model(family)), tiny_draft(family)
    drafts = hf_ssd.launch_draft(draft, num_threads=1) if mode == AHEAD else draft
    manager, found = chat(target, drafts, mode)
    _, others = chat(target, drafts, mode, keep=0)
    if mode == AHEAD:
        drafts.close()
    assert all(one.is_equal for one in [*found, *others])
    assert [one.known for one in others] == [0, 0, 0]
    # Of each turn all but the last token, which was not fed.
    assert [one.known for one in found] == [0, *[one.output.shape[1] - 1 for one in found[:2]]]
    assert found[0].kept == [found[-1].output[0, :-1].tolist()]  # a text takes the place of its beginning
    assert {record.mode for one in found for record in one.stats.records} == {mode}
    if mode != PLAIN:
        assert counts(found) == counts(others) and sum(sum(map(sum, of_one)) for of_one in counts(found).values()) > 3
    if mode == IN_TURN:  # the last tokens of a turn were verified after the draft was asked last
        first, second = (one.output.shape[1] for one in found[:2])
        assert first + second - 16 < manager.kept_of_draft.hits < first + second


@pytest.mark.slow
@pytest.mark.parametrize("family, mode", OF_HYBRIDS)
def test_a_hybrid_goes_on_from_its_last_state(family, mode):
    config = tiny_config(family)
    target, draft = hf_ssd.enable(sharp_model(config)), sharp_model(config, noise=0.02)
    manager, found = chat(target, draft, mode, turns=2)
    _, others = chat(target, draft, mode, keep=0, turns=2)
    assert all(one.is_equal for one in [*found, *others]) and counts(found) == counts(others)
    assert found[1].known >= LONG - 1  # the states after the prompt or later tokens
    assert mode == PLAIN or manager.kept_of_draft.hits >= LONG - 1
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[mode]), 3, 8) as manager:
        first = ended(manager, **greedy(prompts((LONG,))[0]))
        other = greedy(more(first.output[:, : LONG - 5], 10, 7))  # whose beginning no state has read alone
        request = ended(manager, **other)
        assert request.known == 0 and torch.equal(request.output, plainly(target)(0, other))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["target", "draft"])
def test_columns_of_another_text_are_noticed(side, target, draft, monkeypatch):
    """A mutant: every text is taken for a continuation of the last one that was kept."""
    wrong, longest = {"target": target, "draft": draft}[side], KeptPrefixes._longest

    def of_another(self, tokens, decoder, live):
        if decoder.model is wrong and self.texts:
            return min(len(tokens), len(self.texts[-1].tokens)), self.texts[-1]
        return longest(self, tokens, decoder, live)

    def both():
        with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN]), 3, 8) as manager:
            return [ended(manager, **greedy(ids, 40)) for ids in prompts((LONG, LONG - 5))]

    right = both()
    monkeypatch.setattr(KeptPrefixes, "_longest", of_another)
    found = both()
    is_equal = [torch.equal(one.output, other.output) for one, other in zip(found, right)]
    assert is_equal == [True, side == "draft"]
    assert [counts([one]) == counts([other]) for one, other in zip(found, right)] == [True, False]


@pytest.mark.slow
def test_rows_of_one_prompt_share_what_one_of_them_has_read(target, draft):
    """Sampled rows join while the first one is decoded, and have the texts of coupled calls of their own."""
    one = {**greedy(prompts((LONG,))[0], 24), "do_sample": True, "temperature": 0.8}
    alone = coupled(target, draft)
    expected = [alone(number, one) for number in range(3)]
    found = run(target, draft, [one] * 3, MODES[IN_TURN], seeds=range(3))
    assert all(torch.equal(request.output, other) for request, other in zip(found, expected))
    assert counts(found) == alone.accepted
    assert [request.known for request in found] == [0, LONG - 1, LONG - 1]


def test_the_prompt_of_a_system_is_read_once(target, draft):
    system = prompts((LONG,))[0]
    of_users = [greedy(more(system, 12, number)) for number in range(4)]
    expected = [plainly(target)(0, one) for one in of_users]
    found = run(target, draft, of_users, MODES[IN_TURN])
    assert all(torch.equal(request.output, other) for request, other in zip(found, expected))
    assert [request.known >= LONG for request in found] == [False, True, True, True]


@pytest.mark.slow
@settings(max_examples=8)
@given(st.data())
def test_whatever_texts_begin_alike(target, draft, data):
    base = prompts((40,))[0]
    of_requests = [greedy(base, 8)]
    for number in range(data.draw(st.integers(1, 5))):
        source = plainly(target)(0, data.draw(st.sampled_from(of_requests)))
        cut, added, tokens = (data.draw(st.integers(*ends)) for ends in ((1, source.shape[1]), (0, 5), (1, 9)))
        of_requests.append(greedy(more(source[:, :cut], added, number), tokens))
    expected = [plainly(target)(0, one) for one in of_requests]
    settings = MODES[data.draw(st.sampled_from([PLAIN, IN_TURN]))]
    places = {"max_rows": data.draw(st.integers(1, 3)), "prefill_chunk": data.draw(st.integers(1, 12))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_prefixes, "WORTH_KEEPING", 2)
        found = run(target, draft, of_requests, settings, **places)
    assert all(torch.equal(request.output, other) for request, other in zip(found, expected))


# ---------------------------------------------------------------- what is kept


def test_the_text_that_was_used_longest_ago_goes_first(target, draft):
    first, second, third = (greedy(ids) for ids in prompts((LONG,) * 3))
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[PLAIN]), 3, 8) as manager:
        ended(manager, **first)
        size = manager.rows.kept.nbytes
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[PLAIN]), 3, 8, keep_prefixes=2 * size) as manager:
        known = [ended(manager, **one).known > 0 for one in (first, second, first, third, first, second)]
        assert known == [False, False, True, False, True, False] and 0 < manager.rows.kept.nbytes <= 2 * size
    assert not manager.rows.kept.texts and not manager.kept_of_draft.texts


def test_nothing_is_kept_without_free_memory(target, draft, monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 0)
    manager, found = chat(target, draft, IN_TURN)
    assert [one.known for one in found] == [0, 0, 0] and all(one.is_equal for one in found) and not found[0].kept


def test_kept_texts_make_room_for_requests(target, draft, monkeypatch):
    """A request waits for memory only if what is kept does not suffice."""
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[PLAIN]), 3, 8, keep_prefixes=2**30) as manager:
        ended(manager, **greedy(prompts((LONG,))[0]))
        assert manager.rows.kept.give_up(2**40) is False and manager.rows.kept.texts
        assert manager.rows.kept.give_up(1) and not manager.rows.kept.texts


def test_the_text_of_a_cancelled_request_is_kept(target, draft):
    with hf_ssd.continuous_batching(target, draft, SSDConfig(**MODES[IN_TURN]), 3, 8) as manager:
        ids = prompts((LONG,))[0]
        stop = After(lambda: manager.cancel_request("left"), 6)
        manager.add_request(**greedy(ids, 100), request_id="left", streamer=stop)
        output = list(manager.request_id_iter("left"))[-1]
        request = ended(manager, **greedy(ids))
        assert "cancelled" in output.error and request.known == LONG - 1
        assert torch.equal(request.output, plainly(target)(0, greedy(ids)))


# ---------------------------------------------------------------- what makes it stale


def halved(model):
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.5)
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.0)


def without_adapters(model):
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("change", [halved, without_adapters])
def test_columns_of_an_earlier_model_are_forgotten(change, looks, draft, monkeypatch):
    """With a mutant that does not look at the model."""
    adapters = LoraConfig(init_lora_weights=False, lora_alpha=64, target_modules=["q_proj", "v_proj"])
    target = hf_ssd.enable(inject_adapter_in_model(adapters, tiny_model()))
    if not looks:
        monkeypatch.setattr(kept_prefixes, "values_of", lambda tensors: ())
        monkeypatch.setattr(kept_prefixes, "attached_to", lambda model: ())
    _, found = chat(target, draft, IN_TURN, turns=2, between=lambda turn: turn and change(target))
    assert [one.is_equal for one in found] == [True, looks] and (found[1].known == 0) == looks


@pytest.mark.parametrize("mode", [IN_TURN, AHEAD])
def test_a_draft_forgets_columns_of_earlier_weights(mode, target):
    accepted = {}
    for keep in ("auto", 0):
        draft = tiny_draft()
        drafts = hf_ssd.launch_draft(draft, num_threads=1) if mode == AHEAD else draft
        _, found = chat(target, drafts, mode, keep, turns=2, between=lambda turn, draft=draft: turn and halved(draft))
        if mode == AHEAD:
            drafts.close()
        assert all(one.is_equal for one in found)
        accepted[keep] = counts(found)
    assert accepted["auto"] == accepted[0]


@pytest.mark.parametrize("wrong", [-1, 1.5, "much", True])
def test_what_is_no_amount_of_memory_is_refused(wrong, target, draft):
    with pytest.raises(ValueError, match="keep_prefixes"):
        hf_ssd.continuous_batching(target, draft, keep_prefixes=wrong)


def test_auto_is_a_share_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(devices, "free_memory", lambda device: 2**30)
    limits = [KeptPrefixes(most)._limit(torch.device("cpu")) for most in (AUTO, 2**20, 2**40)]
    assert limits == [2**27, 2**20, 2**30]
