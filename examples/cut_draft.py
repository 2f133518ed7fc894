"""
A draft that is cut out of its target: the last layers. In place of the layers before them there is a table, which has
for each token the mean of the hidden states that these layers gave.
"""

import copy

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

TEXTS = 200  # of which hidden states are taken
FIRST = 3  # tokens of a text whose hidden states are left out


def last_layers(target: PreTrainedModel, layers: int, kept: list[int]) -> PreTrainedModel:
    """
    Returns a model of the target's class, in float32, with the target's last layers. Its embeddings are the target's,
    until they are replaced by [`mean_states`].

    Args:
        target (`PreTrainedModel`): The target.
        layers (`int`): The number of layers.
        kept (`list[int]`): The target's tokens that the model has, in the order of its own tokens.

    Raises:
        `ValueError`: the target has fewer layers, or layers that do not work without those before them.
    """
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    count, size = config.num_hidden_layers, config.vocab_size
    if not 0 < layers <= count:
        raise ValueError(f"A draft of {layers} layers cannot be cut out of a target of {count}; change `--layers`.")

    # 1. The same model with fewer layers and tokens.
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:  # such as `layer_types`
            setattr(config, name, value[count - layers :])
    config.num_hidden_layers, config.vocab_size, config.tie_word_embeddings = layers, len(kept), False
    config.pad_token_id = None if config.pad_token_id is None else 0  # the caller knows it, as the other special tokens
    config._name_or_path = ""
    kind = type(target).__name__
    try:
        draft = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        whole, part = target.get_decoder(), draft.get_decoder()
        name = next(n for n, m in whole.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count)

        # 2. The weights, of the layers and of all that is around them.
        known, weights = whole.state_dict(), {}
        for key, weight in part.state_dict().items():
            rest, is_layer = key.removeprefix(f"{name}."), key.startswith(f"{name}.")
            place, _, inner = rest.partition(".")
            theirs = known[f"{name}.{int(place) + count - layers}.{inner}" if is_layer else key]
            is_table = theirs.shape[:1] == (size,) and weight.shape[:1] == (len(kept),)
            weights[key] = theirs[kept] if is_table else theirs
        part.load_state_dict(weights)
        head, their_head = draft.get_output_embeddings(), target.get_output_embeddings()
        head.load_state_dict({key: weight[kept] for key, weight in their_head.state_dict().items()})
    except (KeyError, ValueError, RuntimeError, StopIteration, AttributeError) as error:
        raise ValueError(
            f"No draft can be cut out of {kind}: its last {layers} layers do not work alone ({error}). Take a draft "
            "from another family; see docs/choosing_a_draft.md."
        ) from error
    return draft


@torch.no_grad()
def mean_states(
    target: PreTrainedModel, layers: int, kept: list[int], texts: list[torch.LongTensor]
) -> torch.FloatTensor:
    """
    Returns for each of the tokens that are kept the mean of its hidden states before the last layers, as a table of
    embeddings `(tokens, hidden_size)`. A token is seen once after the beginning of a text, and wherever it is in the
    texts but in their first places, where hidden states are of another kind.
    """
    decoder, weight = target.get_decoder(), target.get_input_embeddings().weight
    size, width = weight.shape
    depth = target.config.get_text_config(decoder=True).num_hidden_layers - layers
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[:TEXTS].tolist()
    start = texts[chosen[0]][:FIRST].long()
    parts = [torch.cat([start.expand(len(part), -1), part[:, None]], dim=1) for part in torch.tensor(kept).split(256)]
    sums, seen, scale = torch.zeros(size, width), torch.zeros(size), []
    for ids in parts + [texts[i][None].long() for i in chosen]:
        states = decoder(input_ids=ids.to(weight.device), use_cache=False, output_hidden_states=True).hidden_states
        tokens = ids[:, FIRST:].flatten()
        first, found = (states[place][:, FIRST:].flatten(0, 1).float().cpu() for place in (0, depth))
        own = weight[tokens.to(weight.device)].float().cpu()
        scale.append((first * own).sum() / own.square().sum())  # some models multiply their embeddings
        sums.index_add_(0, tokens, found)
        seen.index_add_(0, tokens, torch.ones(len(tokens)))
    return (sums[kept] / seen[kept][:, None]) / torch.stack(scale).nanmedian()
