"""Make a pair of any size whose draft agrees with its target as often as asked, without a download.

    python examples/layered_pair.py --size 287m/39m --agreement 0.9 --output folder

The target is a random Llama, or of the shape of Qwen3-Next (`--size 221m/42m`: three layers of the gated delta rule to
one with attention), and the draft is its first layers with the same embeddings, final norm and head. The
deeper layers write to the residual stream only `epsilon` times as loudly as the first ones, so they change the next
token only sometimes: `epsilon` is found by bisection. The text means nothing, but the compute and the acceptance rate
are real, which is what a measurement of speed needs. Unlike in a trained pair, each token is accepted independently of
the one before it.
"""

import argparse
import dataclasses
import math
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3NextConfig

# Times the initialization at which queries and keys have variance 1. Sharper attention depends more on the context,
# which keeps greedy text out of loops: distinct tokens among 128 greedy ones rose from 75 to 99 (size "tiny").
ATTENTION_GAIN = 1.5
# The standard deviation of the logits, in units of the point sqrt(2 ln vocab_size) above which one of that many normal
# logits dominates the others. At 2 the most likely token has probability 0.68 on average, whatever the vocabulary.
SHARPNESS = 2.0
BISECTION_RANGE = (1e-3, 4.0)  # acceptance rates from that of rounding alone to below 0.1 ("tiny" to "287m/39m")
BISECTION_STEPS = 10  # epsilon to within 0.8%
TOLERANCE = 0.005


@dataclasses.dataclass(frozen=True)
class Size:
    """
    The shape of a pair.

    Args:
        hidden, layers, intermediate, heads, kv_heads, vocab (`int`): Those of the target.
        draft_layers (`int`): How many of the target's layers, from the first, make the draft.
        hybrid (`bool`): Whether three of four layers keep a recurrent state, as in Qwen3-Next; the second does not.
    """

    hidden: int
    layers: int
    draft_layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int = 8192
    hybrid: bool = False

    def __post_init__(self):
        if not 1 <= self.draft_layers < self.layers:
            raise ValueError(f"draft_layers is {self.draft_layers}: use 1 to {self.layers - 1}")

    def config(self, layers: int) -> LlamaConfig | Qwen3NextConfig:
        """Returns the config of a model with `layers` layers. It has no end-of-text token, so runs have full length."""
        kind, others = LlamaConfig, {}
        if self.hybrid:
            head, kind = self.hidden // self.heads, Qwen3NextConfig
            others = {"head_dim": head, "linear_key_head_dim": head, "linear_value_head_dim": head}
            others |= {"linear_num_key_heads": self.heads // 2, "linear_num_value_heads": self.heads}
            others |= {"mlp_only_layers": list(range(layers))}
            others["layer_types"] = ["full_attention" if i % 4 == 1 else "linear_attention" for i in range(layers)]
        return kind(
            hidden_size=self.hidden,
            num_hidden_layers=layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=8192,
            # With tied embeddings the likeliest next token would be the last one again.
            tie_word_embeddings=False,
            initializer_range=self.hidden**-0.5,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            **others,
        )


SIZES = {
    "287m/39m": Size(hidden=1024, layers=24, draft_layers=2, intermediate=2816, heads=16, kv_heads=4),
    "101m/25m": Size(hidden=768, layers=14, draft_layers=2, intermediate=2048, heads=12, kv_heads=4),
    "221m/42m": Size(hidden=1024, layers=16, draft_layers=2, intermediate=2816, heads=16, kv_heads=4, hybrid=True),
    "493m/119m": Size(hidden=1536, layers=10, draft_layers=2, intermediate=8960, heads=12, kv_heads=2),
    # For GPUs: about 1B/0.1B and 8B/0.5B. A draft of two layers needs a small vocabulary to be that small.
    "1089m/120m": Size(hidden=1536, layers=30, draft_layers=2, intermediate=6144, heads=12, kv_heads=4, vocab=16384),
    "7852m/520m": Size(hidden=4096, layers=40, draft_layers=2, intermediate=12288, heads=32, kv_heads=8, vocab=16384),
    "tiny": Size(hidden=64, layers=6, draft_layers=2, intermediate=176, heads=4, kv_heads=2, vocab=512),
}


@torch.no_grad()
def new_target(size: Size, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Returns a random model of which every layer matters as much as the next. Draws from torch's default generator."""
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(size.config(size.layers), dtype=dtype).eval()
    # `initializer_range` keeps the variance of what a matrix multiplies if its input has size `hidden`. The rest:
    target.get_input_embeddings().weight.mul_(size.hidden**0.5)
    target.lm_head.weight.mul_(SHARPNESS * math.sqrt(2 * math.log(size.vocab)))
    for layer in target.model.layers:
        if hasattr(layer, "self_attn"):
            attention = layer.self_attn
            for matrix in (attention.q_norm, attention.k_norm) if size.hybrid else (attention.q_proj, attention.k_proj):
                matrix.weight.add_(1.0 * size.hybrid).mul_(ATTENTION_GAIN).sub_(1.0 * size.hybrid)  # norms hold w - 1
        layer.mlp.down_proj.weight.mul_((size.hidden / size.intermediate) ** 0.5)
    return target


def first_layers(target: PreTrainedModel, size: Size) -> PreTrainedModel:
    """Returns the draft: a copy of the target without its deeper layers."""
    with torch.device(target.device):
        draft = AutoModelForCausalLM.from_config(size.config(size.draft_layers), dtype=target.dtype).eval()
    known = target.state_dict()
    draft.load_state_dict({name: known[name] for name in draft.state_dict()})
    return draft


class DeeperLayers:
    """The layers of a target from [`new_target`] that the draft lacks. Keeps a copy of the matrices that it scales."""

    def __init__(self, target: PreTrainedModel, draft_layers: int):
        layers = target.model.layers[draft_layers:]
        names = ("self_attn.o_proj.weight", "linear_attn.out_proj.weight", "mlp.down_proj.weight")
        self.outputs = [weight for name, weight in layers.named_parameters() if name.endswith(names)]
        self.originals = [weight.detach().clone() for weight in self.outputs]

    @torch.no_grad()
    def scale(self, epsilon: float) -> None:
        """Makes the layers add `epsilon` times what they were made to add to the residual stream."""
        for weight, original in zip(self.outputs, self.originals):
            torch.mul(original, epsilon, out=weight)


@torch.no_grad()
def acceptance_rate(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    temperature: float = 0.0,
    seed: int = 0,
    num_prompts: int = 32,
    new_tokens: int = 32,
) -> float:
    """
    Measures the chance that one drafted token is accepted, along text that the target itself continues from random
    prompts of 32 tokens. Greedy: how often the two most likely tokens agree. Sampled: the mean of `sum(min(p, q))`
    (Leviathan et al., 2023, Corollary 3.6). Leaves torch's default generators as they were.

    The standard error of a greedy rate `a` is `sqrt(a * (1 - a) / (num_prompts * new_tokens))`, 0.011 for 0.85; that of
    a sampled one is a third of it.
    """
    length = 32
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        prompts = torch.randint(1, target.config.vocab_size, (num_prompts, length), device="cpu").to(target.device)
        output = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
            **sampling,
        )
    p = torch.stack(output.logits, dim=1).float()
    q = draft(input_ids=output.sequences[:, :-1], use_cache=False).logits[:, length - 1 :].float()
    if not temperature:
        return (p.argmax(-1) == q.argmax(-1)).float().mean().item()
    return torch.minimum((p / temperature).softmax(-1), (q / temperature).softmax(-1)).sum(-1).mean().item()


def calibrate(deeper: DeeperLayers, agreement: float, measure) -> tuple[float, float]:
    """
    Scales the deeper layers so that the acceptance rate, which `measure` returns, is `agreement`, by bisection over the
    logarithm of epsilon. Returns epsilon and the acceptance rate measured with it.
    """
    measured = {}
    low, high = BISECTION_RANGE
    progress = tqdm(range(BISECTION_STEPS), desc="bisection", unit="step", leave=False)
    for _ in progress:
        epsilon = math.sqrt(low * high)
        deeper.scale(epsilon)
        rate = measured[epsilon] = measure()
        progress.set_postfix(epsilon=f"{epsilon:.4f}", acceptance=f"{rate:.3f}")
        if abs(rate - agreement) <= TOLERANCE:
            break
        low, high = (epsilon, high) if rate > agreement else (low, epsilon)
    progress.close()
    best = min(measured, key=lambda epsilon: abs(measured[epsilon] - agreement))
    deeper.scale(best)
    return best, measured[best]


def layered_pair(
    size: str | Size = "287m/39m",
    agreement: float = 0.9,
    temperature: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """
    Makes a target and a draft that agree as often as asked.

    Args:
        size (`str` or `Size`): A name in `SIZES`, or any shape.
        agreement (`float`): The chance that one drafted token is accepted, 0.1 to 1. It is met to within the standard
            error of [`acceptance_rate`]. In bfloat16 rounding alone costs some of it: 0.99 is the most that
            "287m/39m" reaches.
        temperature (`float`): At which the agreement holds; 0 is greedy.
        dtype (`torch.dtype`): Of both models.
        seed (`int`): Of the weights and of the texts. Torch's default generators stay as they were.
        device (`str`): Where to make, measure and leave both models.

    Returns:
        Two models: target and draft. Both configs hold `epsilon` and the `acceptance_rate` that the
        bisection measured with it.

    Raises:
        `ValueError`: Unknown size, an agreement out of range, or a negative temperature.
    """
    if isinstance(size, str):
        if size not in SIZES:
            raise ValueError(f"size is {size!r}: use one of {', '.join(SIZES)}, or a Size")
        size = SIZES[size]
    if not 0.1 <= agreement <= 1:
        raise ValueError(f"agreement is {agreement}: use 0.1 to 1")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: use 0 for greedy, or more")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = new_target(size, dtype, device)
        draft = first_layers(target, size)
    deeper = DeeperLayers(target, size.draft_layers)
    epsilon, rate = calibrate(deeper, agreement, lambda: acceptance_rate(target, draft, temperature, seed))
    for model in (target, draft):
        model.config.epsilon, model.config.acceptance_rate = epsilon, rate
    return target, draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="287m/39m")
    parser.add_argument("--agreement", type=float, default=0.9, help="chance that one drafted token is accepted")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, required=True, help="folder for target/ and draft/")
    args = parser.parse_args()

    start = time.perf_counter()
    target, draft = layered_pair(
        args.size, args.agreement, args.temperature, getattr(torch, args.dtype), args.seed, args.device
    )
    seconds = time.perf_counter() - start
    # The bisection stops where its own texts look right; other texts tell without that bias.
    rate = acceptance_rate(target, draft, args.temperature, args.seed + 1, new_tokens=64)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(args.output / name)
    print(f"target {target.num_parameters():,} parameters, draft {draft.num_parameters():,}, {args.dtype}")
    print(f"acceptance rate {rate:.3f} on new texts at temperature {args.temperature:g} ({args.agreement:g} asked)")
    print(f"epsilon {target.config.epsilon:.4f}, {seconds:.0f} seconds")


if __name__ == "__main__":
    main()
