"""Train an EAGLE-3 head for the target of the embedded pair.

    python examples/train_eagle3.py --max-files 60 --output examples/pair/eagle3

The head reads hidden states of three of the target's layers and learns the target's distribution on text that the
target writes. It is trained as it is used (training-time test; Li et al., NeurIPS 2025): first each token is guessed
from the target's hidden states before it, then from the head's own state there, and so on, as many steps as a
speculation has.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from train_pair import prompts_of, read_text
from train_parallel_draft import all_logits, drop_mask_tokens
from training import acceptance_on_prompts, chance_by_position, checkpoints_of, own_text, train, write_with
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM

from hf_ssd.cache.hidden_states import HiddenStates, hooked_modules
from hf_ssd.cache.view import view_of
from hf_ssd.drafting.heads.eagle3 import WEIGHTS, Eagle3Head, head_config
from hf_ssd.drafting.heads.loading import head_for

PAIR = Path(__file__).parent / "pair"


def save_head(head: Eagle3Head, folder: str | os.PathLike) -> None:
    """Writes a head in the format of SafeAILab, without embeddings: they are the target's."""
    folder, config = Path(folder), head.config.to_dict()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("target_width", "_name_or_path", "transformers_version"):
        config.pop(name, None)
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    config["eagle_aux_hidden_state_layer_ids"] = config.pop("target_layers")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
    state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.state_dict().items()}
    state.pop("embed_tokens.weight")
    own = torch.arange(len(head.d2t)) + head.d2t.cpu()
    state["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, own, True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, folder / WEIGHTS[0])


def new_head(target: LlamaForCausalLM, layers: list[int]) -> Eagle3Head:
    """Returns a head that begins as the target's last layer, which reads the last of the hidden states."""
    values = {**target.config.to_dict(), "num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": layers}
    head = Eagle3Head(head_config({**values, "draft_vocab_size": target.config.vocab_size}, target))
    known, size = target.model.layers[-1].state_dict(), target.config.hidden_size
    with torch.no_grad():
        for name, parameter in head.layers[0].named_parameters():
            if name in known and known[name].shape == parameter.shape:
                parameter.copy_(known[name])
            elif name in known:  # of the projections that read the token's embedding too
                parameter.zero_()
                parameter[:, size:] = known[name]
        head.layers[0].hidden_norm.weight.copy_(target.model.layers[-1].input_layernorm.weight)
        head.fc.weight.zero_()
        head.fc.weight[:, -size:] = torch.eye(size)
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.get_output_embeddings().weight)
    head.embed_tokens.weight = torch.nn.Parameter(target.get_input_embeddings().weight.detach(), requires_grad=False)
    return head


@torch.no_grad()
def features_of(target: LlamaForCausalLM, layers, ids: torch.Tensor) -> torch.Tensor:
    """Returns the hidden states of the target's layers at tokens `(rows, length)`, side by side."""
    view, _ = view_of(target, hooked=hooked_modules(target, layers))
    captured = HiddenStates(view, layers)
    view(input_ids=ids, use_cache=False)
    return captured.take()


def chain_logits(head: Eagle3Head, ids: torch.Tensor, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """
    Returns for each step the logits `(rows, length - 1, vocab_size)` of the token after each but the first token, as
    the head gives them so many steps after the last token whose features it has.

    Args:
        ids (`torch.Tensor` of shape `(rows, length)`), features: Tokens, and what [`features_of`] returns for them.
    """
    tokens, states, cache = ids[:, 1:], head.fuse(features[:, :-1]), DynamicCache()
    length = tokens.shape[1]
    queries, keys = torch.arange(length)[:, None], torch.arange(length)[None]
    results = []
    for step in range(steps):
        # Of the tokens with features a token sees those from which its chain starts, and of each later step the one
        # column of its own chain.
        sees = [keys <= queries - step, *(keys == queries - step + i for i in range(1, step + 1))]
        sees = torch.cat(sees, dim=1)
        sees[:step, -length:] |= torch.eye(length, dtype=torch.bool)[:step]  # no chain is so long here
        mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[None, None]
        inputs = head.inputs(tokens, states)
        positions = torch.arange(length)[None]
        output = head(inputs, positions, mask.expand(len(ids), -1, -1, -1), cache=cache).last_hidden_state
        results.append(head.logits(output))
        states = torch.cat([torch.zeros_like(output[:, :1]), output[:, :-1]], dim=1)
    return results


def train_head(target: LlamaForCausalLM, head: Eagle3Head, windows: torch.Tensor, args) -> None:
    """The head learns from texts that the target writes, half of them greedily."""
    texts = own_text(target, windows, args.steps_per_text, args.seed)

    def loss_of(step):
        ids, target_logits = (of_rows[: args.rows] for of_rows in texts(step))
        features = features_of(target, head.config.target_layers, ids)
        teacher, loss = target_logits[:, 1:].log_softmax(-1), 0.0
        for i, logits in enumerate(chain_logits(head, ids, features, args.lookahead)):
            student = logits[:, i:].log_softmax(-1)
            divergence = F.kl_div(student, teacher[:, i:], log_target=True, reduction="none").sum(-1)
            loss = loss + divergence.mean() / args.lookahead
        return loss

    train(head, loss_of, args.steps, args.learning_rate, args.checkpoints / "eagle3.pt", "EAGLE-3")


@torch.no_grad()
def acceptance_by_position(target, head, draft, parallel, prompts, lookahead: int, temperature: int) -> dict:
    """
    Returns, along text of 128 tokens that the target writes after each prompt, the chance that each token of a
    speculation is accepted if those before it were, for the three drafts.
    """
    torch.manual_seed(0)
    ids, first = write_with(target, prompts, 128, do_sample=temperature == 1), prompts.shape[1]
    p = target(input_ids=ids, use_cache=False).logits
    starts = torch.arange(first, ids.shape[1] - lookahead - 1)  # the last token before the speculation
    chain = chain_logits(head, ids, features_of(target, head.config.target_layers, ids), lookahead)
    everything = drop_mask_tokens(ids.shape[1], lookahead, 1.0, 1.0, torch.Generator())
    of_parallel, of_draft = all_logits(parallel, ids, *everything), draft(input_ids=ids, use_cache=False).logits
    rates = {}
    for name in ("eagle3", "draft", "parallel"):
        pairs = []
        for d in range(lookahead):
            theirs = p[:, starts + d]
            if name == "eagle3":
                ours = chain[d][:, starts + d - 1]
            elif name == "draft":
                ours = of_draft[:, starts + d]
            else:
                is_start = torch.isin(everything[0], starts)
                ours = of_parallel[:, is_start & (everything[1] == d)]
            pairs.append((theirs, ours))
        rates[name] = chance_by_position(pairs, temperature)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("eagle3"))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/eagle3"), help="to go on from")
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--draft", default=str(PAIR / "draft"), help="to compare with")
    parser.add_argument("--parallel-draft", default=str(PAIR / "parallel_draft"), help="to compare with")
    parser.add_argument("--layers", type=int, nargs=3, default=[2, 6, 11], help="whose hidden states the head reads")
    parser.add_argument("--lookahead", type=int, default=5, help="steps that the head learns to guess ahead")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--rows", type=int, default=4, help="of a text in a step, at most 8")
    parser.add_argument("--steps-per-text", type=int, default=60, help="on one text of the target, 48 of 160 tokens")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window, which a text goes on from")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-files", type=int, help="read no more files of a package than this")
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)

    checkpoints_of(args, ("target", "layers", "lookahead", "max_files", "length", "seed"))
    windows, held_out, tokenizer = read_text(args, AutoTokenizer.from_pretrained(args.target))
    prompts = prompts_of(held_out, tokenizer, args.length)
    target, draft, parallel = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (args.target, args.draft, args.parallel_draft)
    )
    head = new_head(target, args.layers)
    train_head(target, head, windows, args)
    save_head(head.to(torch.bfloat16), args.output)
    head = head_for(args.output, target)
    report = {"parameters": sum(one.numel() for name, one in head.named_parameters() if "embed" not in name)}
    report["acceptance_by_position"] = {
        f"{name}_temperature_{temperature}": rates
        for temperature in (0, 1)
        for name, rates in acceptance_by_position(
            target, head, draft, parallel, prompts, args.lookahead, temperature
        ).items()
    }
    report["acceptance_rate_on_prompts"] = acceptance_on_prompts(target, head, tokenizer)
    (args.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
