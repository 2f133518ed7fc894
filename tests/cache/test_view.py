"""What our passes change is seen in a view of the model alone. Whole calls are in `test_hooks_and_adapters.py`."""

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from hf_ssd.cache.attention import GROUPED
from hf_ssd.cache.cached_model import CachedModel, view_for_passes
from hf_ssd.cache.ragged import RaggedCache

from ..helpers.tiny import SIZES, tiny_model

TOKENS = torch.tensor([[5, 7, 11, 13]])


def test_no_config_of_the_model_is_written_and_its_other_parts_keep_their_functions(monkeypatch):
    """So nothing is to be restored, and another thread never sees a value that is meant for our passes."""
    eyes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**eyes, image_size=28, patch_size=14)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=LlamaConfig(**SIZES), vision_config=vision)).eval()
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    configs |= {id(model.config.text_config): model.config.text_config}
    for kind in {type(config) for config in configs.values()}:
        write = kind.__setattr__

        def guarded(self, name, value, write=write):
            assert id(self) not in configs, f"{name} of the user's config is written"
            write(self, name, value)

        monkeypatch.setattr(kind, "__setattr__", guarded)
    with pytest.raises(AssertionError):
        model.config.use_cache = True
    decoder = CachedModel(model, RaggedCache())
    with torch.no_grad():
        decoder.extend(TOKENS, [0])
        decoder.extend(TOKENS, [4])
        with decoder.view._optimize_model_for_decode():
            decoder.extend(TOKENS, [8])
    assert decoder.has_grouped_heads and model.config.text_config._attn_implementation == "sdpa"
    assert decoder.view.model.language_model.config._attn_implementation == GROUPED
    assert decoder.view.config.vision_config._attn_implementation == "eager"


@torch.no_grad()
def test_a_part_that_is_compiled_by_itself_stays_compiled():
    model, calls = tiny_model(), []

    def backend(graph, inputs):
        return lambda *arguments: calls.append(1) or graph.forward(*arguments)

    model.model.layers[1].mlp.compile(backend=backend)
    view = view_for_passes(model)
    expected, before = model(TOKENS).logits, len(calls)
    torch.testing.assert_close(view(TOKENS).logits, expected)
    assert len(calls) == before + 1
