"""What is kept of earlier calls, and for how many kinds of them."""

from transformers import GenerationConfig

from hf_ssd import SSDConfig
from hf_ssd.speculation.experience import KINDS_KEPT, Experience


def planner(experience, temperature):
    generation_config = GenerationConfig(do_sample=True, temperature=temperature)
    return experience.of(SSDConfig(), generation_config, rows=1, vocab_size=11, drafts=1)[0]


def test_only_the_latest_kinds_of_calls_are_kept():
    experience = Experience()
    often, once = planner(experience, 0.5), planner(experience, 0.6)
    for kind in range(2 * KINDS_KEPT):
        planner(experience, 1 + kind / 1000)
        assert planner(experience, 0.5) is often
    assert len(experience.known) == KINDS_KEPT and experience.calls == 2 + 4 * KINDS_KEPT
    assert planner(experience, 0.6) is not once
