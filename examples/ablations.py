"""The paper's ablations on the embedded pair: a figure and a table of each, and all numbers in one JSON file.

    python examples/ablations.py
    python examples/ablations.py --only shapes saguaro --output docs/figures

All but `fallback` and `trees` count and do not depend on time. These two measure it: give them a machine that does
nothing else. docs/ablations.md says what the figures show.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
from itertools import chain, pairwise, product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import prompt_kinds
import torch
import transformers
from own_texts import as_messages
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.utils import logging
from workload import PAIR

import hf_ssd
from hf_ssd import theory
from hf_ssd.cli.methods import sampling
from hf_ssd.distributed.cores import available_cores
from hf_ssd.distributed.target_ranks import TargetRanks
from hf_ssd.drafting import cache_shapes
from hf_ssd.drafting.cache_shapes import CacheShape, Confidence, RowByRow, shape_for
from hf_ssd.drafting.draft_info import DraftInfo
from hf_ssd.drafting.heads.loading import head_for
from hf_ssd.drafting.sampling import DraftSampler
from hf_ssd.generation.local_session import LocalSession

try:
    from matplotlib.figure import Figure
except ImportError:
    raise SystemExit('The figures need matplotlib: pip install -e ".[plot]"') from None

SNIPPETS = [
    "def {}(path):\n",
    'def {}_all(items):\n    """',
    "class {}er:\n    def __init__(self, ",
    "    def {}(self, *args, **kwargs):\n        if ",
    "import os\n\ndef {}_file(name, mode):\n    try:\n",
    "async def {}(host, port, *, timeout=None):\n",
    "    for name in {}_names(self):\n        ",
    "class {}Error(Exception):\n    pass\n\n\nclass ",
]
WORDS = ["read", "write", "parse", "copy", "send", "close", "encode", "load"]
PROMPTS = [snippet.format(word) for word in WORDS for snippet in SNIPPETS]
FAN_OUTS = [1, 2, 4, 8, 16, 32, 64]
BATCH_SIZES = [1, 2, 4, 8, 16]
ROWS = 8  # of one call where time does not matter
# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#777777"
SHAPES = {
    **{"uniform": (GREEN, "^-", 2), "geometric": (ORANGE, "s-", 2), "confidence": (BLUE, "o-", 2)},
    **{"all_accepted": (GREY, "D--", 1), "single_branch": (RED, "x--", 1), "greedy_tree": (PURPLE, "v--", 1)},
}


# ---------------------------------------------------------------- the outcomes that other systems prepare


class AllAccepted(RowByRow):
    """
    The outcomes of AMUSD and PEARL: both go on drafting as if every token will be accepted, so the only outcomes are K
    accepted tokens and a bonus token. Rejections are not prepared; after a rejection, AMUSD and PEARL wait for a new
    speculation. (They guess a single bonus token; here the number of guesses is the budget.)
    """

    def fan_out(self, acceptance, budget):
        return [0] * len(acceptance) + [budget]


class SingleBranch(RowByRow):
    """
    The outcomes of SpecBranch: a single branching point at the draft's least confident token, where the alternatives to
    that token are prepared. No other accepted count is prepared, complete acceptance included. (SpecBranch also uses a
    learned predictor to choose the point.)
    """

    def fan_out(self, acceptance, budget):
        least = int(acceptance.argmin())
        return [budget * (k == least) for k in range(len(acceptance) + 1)]


class GreedyTree(Confidence):
    """
    The outcomes of SwiftSpec: a token tree grown from the current speculation, always by the node with the highest
    product of draft probabilities along its path. The probabilities are not calibrated, and they do not account for the
    rejection that precedes a bonus token before the end of the speculation (no residual distribution).
    """

    def chances(self, candidates):
        reached = np.pad(candidates.drafted_probabilities.cumprod(axis=1), ((0, 0), (1, 0)), constant_values=1.0)
        possible = np.pad(1 - candidates.drafted_probabilities, ((0, 0), (0, 1)), constant_values=1)
        return (reached * possible)[:, :, None] * candidates.chances


KINDS = {**cache_shapes.SHAPES, "all_accepted": AllAccepted, "single_branch": SingleBranch, "greedy_tree": GreedyTree}

# ---------------------------------------------------------------- calls


def load_pair(folder: Path, draft: Path | None = None):
    """Returns target, draft and tokenizer, in float32. No token ends a text, so that every row gets all its tokens."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype="float32").eval()
    target.generation_config.eos_token_id = target.config.vocab_size  # no token has this number
    draft = draft or folder / "draft"
    model = head_for(draft, target) or AutoModelForCausalLM.from_pretrained(draft, dtype="float32").eval()
    return hf_ssd.enable(target), model, AutoTokenizer.from_pretrained(folder / "target", padding_side="left")


def generate(pair, assistant, config: hf_ssd.SSDConfig, temperature: float, prompts: list[str], seed: int, args):
    """Returns the [`~hf_ssd.SSDStats`] of one call. Temperature 0 is greedy."""
    target, _, tokenizer = pair
    set_seed(seed)
    inputs = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    options = {"max_new_tokens": args.max_new_tokens, "return_dict_in_generate": True, **sampling(temperature)}
    return target.generate(**inputs, **options, assistant_model=assistant, ssd_config=config).ssd_stats


class Recorder(hf_ssd.DraftAssistant, CacheShape):
    """
    A draft in this process that keeps what a cache shape sees of each round, and how the round ended. With a fixed
    lookahead neither depends on what is prepared, so one recording serves every shape and budget.
    """

    state, positions = "ready", None

    def __init__(self, draft):
        self.draft, self.cores, self.info, self.rounds = draft, None, DraftInfo.of(draft.config), []
        self.ranks, self.process, self.workers = TargetRanks(), os.getpid(), [None]
        self.path = self.weights = None
        self.closed = False

    def begin_call(self, patience):
        pass

    def open_session(self, request, device):
        session = LocalSession(self.draft, request())
        session.speculator.shape = self
        return session

    def fan_outs(self, candidates, budget):
        # As little as possible: nobody needs it.
        return [[1] + [0] * (len(candidates.limits) - 1)] * len(candidates.from_fallback)

    def covered(self, *_):
        raise NotImplementedError("with fixed settings nothing is planned")

    def learn(self, candidates, accepted, bonus):
        self.rounds.append((candidates, accepted, bonus))


def record(pair, config: hf_ssd.SSDConfig, temperature: float, args) -> tuple[list, list]:
    """Returns the rounds of each call, `(candidates, accepted, bonus)` each, and its [`~hf_ssd.SSDStats`]."""
    calls, stats = [], []
    for start in range(0, len(args.texts), ROWS):
        recorder = Recorder(pair[1])
        prompts = args.texts[start : start + ROWS]
        stats.append(generate(pair, recorder, config, temperature, prompts, start, args))
        calls.append(recorder.rounds)
    return calls, stats


def replay(calls: list, shape: CacheShape, budget: int) -> list[list[bool]]:
    """Returns in which of its rounds each row of each call would have hit with this shape and budget."""
    hits = []
    for rounds in calls:
        rows, lesson = [[] for _ in rounds[0][1]], None
        for candidates, accepted, bonus in rounds:
            fan_outs = shape.fan_outs(candidates, budget)
            for row, (k, token) in enumerate(zip(accepted, bonus)):
                if k >= 0:
                    guesses = candidates.guesses[row, k, : min(fan_outs[row][k], candidates.limits[k])]
                    rows[row].append(token in guesses.tolist())
            if lesson is not None:
                shape.learn(*lesson)  # a draft learns when the branches have grown, so a round later
            lesson = candidates, accepted, bonus
        hits += rows
    return hits


def ranks_of(calls: list) -> list[tuple[float, int]]:
    """Returns the rank of each bonus token among the guesses, from 0, and its accepted count."""
    return [
        (guesses[k].index(token) if token in guesses[k] else math.inf, k)
        for candidates, accepted, bonus in chain(*(rounds[1:] for rounds in calls))
        for guesses, k, token in zip(candidates.guesses.tolist(), accepted, bonus)
        if k >= 0
    ]


def fan_out(pair, args) -> list[dict]:
    """Figure 3: how often the bonus token is not among the F best guesses, and the power law scale * F^-r"""
    table = []
    config = hf_ssd.SSDConfig(lookahead=4, budget=max(FAN_OUTS), fallback="primary")
    for temperature in tqdm([0.0, 1.0], desc="fan_out", unit="temperature"):
        calls, stats = record(pair, config, temperature, args)
        rejected = 1 - mean(s.acceptance_rate for s in stats)
        for after, accepted_all in (("a rejection", False), ("complete acceptance", True)):
            found = [rank for rank, k in ranks_of(calls) if (k == config.lookahead) == accepted_all]
            misses = [mean(rank >= size for rank in found) for size in FAN_OUTS]
            fitted = sum(miss * len(found) >= 5 for miss in misses)  # fewer misses are noise
            law = theory.fit_power_law(FAN_OUTS[:fitted], misses[:fitted]) if fitted > 1 else (math.nan, math.nan)
            row = {"T": temperature, "rejected": rejected, "after": after, "outcomes": len(found)}
            row |= {f"F={size}": miss for size, miss in zip(FAN_OUTS, misses)}
            table.append(row | dict(zip(("scale", "r"), law)) | {"fitted": fitted})
    return table


def draw_fan_out(table: list[dict], axes) -> None:
    for row in table:
        sizes, greedy = FAN_OUTS[: row["fitted"]], row["T"] == 0
        look = {"color": ORANGE if row["after"] == "a rejection" else BLUE, "fillstyle": "none" if greedy else "full"}
        label = f"T = {row['T']:g}, after {row['after']}: r = {row['r']:.2f}"
        axes.plot(sizes, [row[f"F={size}"] for size in sizes], "o" if greedy else "s", label=label, **look)
        law = [row["scale"] * size ** -row["r"] for size in sizes]
        axes.plot(sizes, law, "--" if greedy else "-", linewidth=1, **look)
    axes.set(xscale="log", yscale="log", ylim=(2e-3, 1.2), xlabel="fan-out F (guesses)", ylabel="miss rate (share)")
    axes.set(xticks=FAN_OUTS, xticklabels=FAN_OUTS)
    axes.set_title("The miss rate falls about as a power of the fan-out (lines: scale · F$^{-r}$)")
    axes.legend(loc="lower right")


def shapes(pair, args) -> list[dict]:
    """Figure 4: hit rate of each cache shape on the same rounds; the gain is that of confidence over geometric"""
    table = []
    for temperature in tqdm([0.0, 0.3, 0.7, 1.0, 1.3], desc="shapes", unit="temperature"):
        calls, _ = record(pair, hf_ssd.SSDConfig(lookahead=4, budget=24, fallback="primary"), temperature, args)
        for budget in (12, 24):
            hits = {name: replay(calls, KINDS[name](hf_ssd.SSDConfig()), budget) for name in SHAPES}
            row = {"T": temperature, "budget": budget, "rounds": sum(map(len, hits["uniform"]))}
            row |= {name: mean(chain(*rows)) for name, rows in hits.items()}
            gains = [mean(a) - mean(b) for a, b in zip(hits["confidence"], hits["geometric"])]
            table.append(row | {"gain": mean(gains), "error": statistics.stdev(gains) / len(gains) ** 0.5})
    return table


def draw_shapes(table: list[dict], *panels) -> None:
    for axes, budget in zip(panels, (12, 24)):
        rows = [row for row in table if row["budget"] == budget]
        for name, (color, style, width) in SHAPES.items():
            hit_rates = [row[name] for row in rows]
            axes.plot([row["T"] for row in rows], hit_rates, style, color=color, linewidth=width, label=name)
        axes.set(xlabel="temperature (0: greedy)", ylabel="hit rate (share of outcomes)", ylim=(0, 1))
        axes.set_title(f"Confidence hits most: {budget} prepared outcomes per round")
    panels[-1].legend(title="fan_out")


def saguaro(pair, args) -> list[dict]:
    """Figure 5: what C trades, and by Theorem 7 the speed over plain decoding if a miss costs T_b verifications"""
    table = []
    for c in tqdm([0.0, 0.1, 0.3, 0.5, 0.7, 1.0], desc="saguaro", unit="C"):
        config = hf_ssd.SSDConfig(lookahead=4, budget=12, fan_out="geometric", saguaro_c=c, fallback="primary")
        calls, stats = record(pair, config, 1.0, args)
        hits = [mean(row) for row in replay(calls, shape_for(config), config.budget)]
        p, tokens = mean(hits), mean(s.tokens_per_round for s in stats)
        row = {"C": c, "acceptance": mean(s.acceptance_rate for s in stats), "tokens_per_round": tokens}
        row |= {"hit_rate": p, "error": statistics.stdev(hits) / len(hits) ** 0.5}
        table.append(row | speeds(p, tokens))
    return table


def speeds(hit_rate: float, tokens: float) -> dict[str, float]:
    """By Theorem 7, over plain decoding, if preparing is hidden and a miss costs T_b verifications."""
    return {f"T_b={t:g}": theory.ssd_speedup(hit_rate, tokens, tokens, 1.0, t) for t in (0.5, 1.0, 2.0, 4.0)}


def draw_saguaro(table: list[dict], axes) -> None:
    points = [row["acceptance"] for row in table], [row["hit_rate"] for row in table]
    axes.errorbar(*points, [row["error"] for row in table], fmt="o-", color=BLUE, capsize=3)
    for row, *place in zip(table, *points):
        text = f"C = {row['C']:g}: {row['tokens_per_round']:.2f} tokens per round"
        axes.annotate(text, place, (-10, -4), textcoords="offset points", ha="right")
    axes.set(xlabel="acceptance rate (share of tested tokens)", ylabel="hit rate (share of outcomes; bars: std. error)")
    axes.set(xlim=(min(points[0]) - 0.15, None), title="A smaller C gives more hits and fewer accepted tokens (T = 1)")


BY_Q_ALONE = {"bonus_noise": lambda *_: None, "luck": lambda *_: 0.0}
RULES = {  # settings, and whether the draft knows the random numbers of the target
    "ranked by q": ({}, False),
    "ranked by q / e": ({}, True),
    "coupled": ({"verification": "coupled"}, True),
    "Saguaro, C = 0.5": ({"saguaro_c": 0.5}, True),
}


def noise(pair, args) -> list[dict]:
    """What a draft gains that knows the target's random numbers: hits of 12 outcomes, speeds, misses of F guesses"""
    table = []
    for temperature in tqdm(args.temperatures, desc="noise", unit="temperature"):
        for name, (settings, is_known) in RULES.items():
            config = hf_ssd.SSDConfig(lookahead=4, budget=max(FAN_OUTS), fallback="primary", **settings)
            with contextlib.nullcontext() if is_known else patch.multiple(DraftSampler, **BY_Q_ALONE):
                calls, stats = record(pair, config, temperature, args)
            hits = [mean(row) for row in replay(calls, shape_for(config), 12)]
            p, tokens = mean(hits), mean(s.tokens_per_round for s in stats)
            row = {"T": temperature, "rule": name, "acceptance": mean(s.acceptance_rate for s in stats)}
            row |= {"tokens_per_round": tokens, "hit_rate": p, "error": statistics.stdev(hits) / len(hits) ** 0.5}
            row |= speeds(p, tokens)
            ranks = [rank for rank, k in ranks_of(calls) if k < config.lookahead]
            table.append(row | {f"F={size}": mean(rank >= size for rank in ranks) for size in FAN_OUTS})
    return table


def draw_noise(table: list[dict], misses, hits) -> None:
    for (name, _), color in zip(RULES.items(), (GREY, BLUE, ORANGE, GREEN)):
        rows = [row for row in table if row["rule"] == name]
        of_1 = next(row for row in rows if row["T"] == 1.0)
        misses.plot(FAN_OUTS, [of_1[f"F={size}"] for size in FAN_OUTS], "o-", color=color, label=name)
        hits.plot([row["T"] for row in rows], [row["hit_rate"] for row in rows], "o-", color=color, label=name)
    misses.set(xscale="log", xticks=FAN_OUTS, xticklabels=FAN_OUTS, xlabel="fan-out F (guesses)")
    misses.set(ylabel="miss rate after a rejection (share)", ylim=(0, 1), title="Temperature 1")
    hits.set(xlabel="temperature", ylabel="hit rate (share of outcomes)", ylim=(0, 1), title="12 prepared outcomes")
    hits.legend(title="guesses")


def fallback(pair, args) -> list[dict]:
    """Figure 6: tokens per second, also over those of the primary (quartiles), and b* of Theorem 17, with its parts"""
    table, kinds = [], ("primary", "ngram", "random")
    with hf_ssd.launch_draft(pair[1], num_threads=1) as assistant:
        for batch_size in tqdm(BATCH_SIZES, desc="fallback", unit="batch size"):
            # 1. All fallbacks in turn, again and again, so that what else the machine does falls on all of them alike.
            runs = {kind: [] for kind in kinds}
            for turn in range(1 + max(12, 32 // batch_size)):
                prompts = [args.texts[(turn * batch_size + row) % args.prompts] for row in range(batch_size)]
                for kind in kinds:
                    config = hf_ssd.SSDConfig(lookahead=3, budget=12, fallback=kind)
                    stats = generate(pair, assistant, config, 0.7, prompts, turn, args)
                    runs[kind] += [stats] if turn else []  # the first turn warms up

            # 2. What was measured of each, and what the theory makes of it.
            parts = {kind: measured_parts(runs[kind]) for kind in kinds}
            speeds = {kind: [measured_parts([run])["tokens/s"] for run in runs[kind]] for kind in kinds}
            p, wait, tokens = (parts["primary"][key] for key in ("p", "T_miss", "E"))
            for kind, part in parts.items():
                ratios = [mine / primary for mine, primary in zip(speeds[kind], speeds["primary"])]
                row = {"b": batch_size, "fallback": kind} | part
                row |= dict(zip(("low", "median", "high"), statistics.quantiles(ratios, n=4)))
                row["predicted"] = part["predicted"] / parts["primary"]["predicted"]
                is_backup = kind != "primary" and 1 <= part["E_miss"] <= tokens and 0 < p < 1
                row["b*"] = theory.critical_batch_size(p, wait, tokens, part["E_miss"]) if is_backup else math.nan
                table.append(row)
    return table


def trees(pair, args) -> list[dict]:
    """Token trees and chains of single prompts: tokens per round, hit rate, and speed over that of the best chain"""
    table, forms = [], list(product((2, 4, 6), ("auto", *args.nodes)))  # "auto" is a chain
    with hf_ssd.launch_draft(pair[1], num_threads=1) as assistant:
        for temperature in tqdm((0.0, 0.7), desc="trees", unit="temperature"):
            for asynchronous, draft in ((True, assistant), (False, pair[1])):
                runs = {form: [] for form in forms}
                for number, prompt in enumerate([args.texts[0], *args.texts]):
                    for form in forms:  # in turn, so that what else the machine does falls on all of them alike
                        settings = {"lookahead": form[0], "tree_nodes": form[1], "asynchronous": asynchronous}
                        config = hf_ssd.SSDConfig(budget=12, verification="coupled", **settings)
                        stats = generate(pair, draft, config, temperature, [prompt], number, args)
                        if number:  # the first calls of a pair take longer
                            runs[form].append(stats)
                if asynchronous:
                    prepared = runs  # where the ranks of bonus tokens are known
                speeds = {
                    form: statistics.median(s.generated_tokens / s.total_seconds for s in of)
                    for form, of in runs.items()
                }
                best = max(speed for (_, nodes), speed in speeds.items() if nodes == "auto")
                for (lookahead, nodes), of in runs.items():
                    row = {"T": temperature, "mode": "ahead" if asynchronous else "in turn", "lookahead": lookahead}
                    row |= {"nodes": lookahead if nodes == "auto" else nodes}
                    row |= {name: mean(getattr(s, name) for s in of) for name in ("tokens_per_round", "hit_rate")}
                    row["expected"] = expected_tokens(prepared[lookahead, "auto"], row["nodes"])
                    row["verify_ms"] = 1e3 * statistics.median(chain(*(s.column("verify_seconds") for s in of)))
                    table.append(row | {"over_best_chain": speeds[lookahead, nodes] / best})
    return table


def expected_tokens(chains: list[hf_ssd.SSDStats], nodes: int) -> float:
    """
    Returns the tokens per round that theory expects of trees with so many nodes, from the acceptance at each depth of
    these chains, and from the ranks that the target's tokens have among their guesses after a rejection. Those are
    known where outcomes were prepared; nan elsewhere. As if all drafted tokens had as many siblings.
    """
    records = [record for stats in chains for record in stats.records]
    lookahead = max(record.lookahead for record in records)
    counts = [record.accepted[0] for record in records if record.lookahead == lookahead and record.live]
    reached = [max(1, sum(count >= depth for count in counts)) for depth in range(lookahead)]
    rates = [sum(count > depth for count in counts) / whole for depth, whole in enumerate(reached)]
    rounds = chain(*(pairwise(stats.records) for stats in chains))
    ranks = [two.ranks[0] for one, two in rounds if two.budget and one.accepted[0] < one.lookahead and one.live]
    siblings, more = divmod((nodes - lookahead) / lookahead, 1)
    least, most = (mean(0 <= rank < count for rank in ranks) for count in (siblings, siblings + 1))
    caught = (1 - more) * least + more * most
    return theory.expected_tokens_of_tree(rates, [caught] * lookahead) if ranks else math.nan


def draw_trees(table: list[dict], axes) -> None:
    kinds = [(mode, T) for mode in ("in turn", "ahead") for T in (0.0, 0.7)]
    for (mode, temperature), color in zip(kinds, (GREY, BLUE, GREEN, ORANGE)):
        rows = [row for row in table if (row["mode"], row["T"]) == (mode, temperature) and row["lookahead"] == 4]
        values = [[row[name] for row in rows] for name in ("nodes", "over_best_chain")]
        axes.plot(*values, "o-", color=color, label=f"{mode}, T = {temperature:g}")
    axes.set(xlabel="nodes of the tree (4: a chain)", ylabel="speed over the best chain", title="Lookahead 4")
    axes.legend()


def measured_parts(runs: list[hf_ssd.SSDStats]) -> dict[str, float]:
    """Returns what Corollary 16 needs, of the rounds in which all rows ran. Times T are in units of a verification."""
    whole = [record for run in runs for record in run.records if len(record.live) == len(record.sources)]
    rows = [(k + 1, hit) for record in whole for k, hit in zip(record.accepted, record.hits)]
    waits = [(record.wait_seconds, all(record.hits)) for record in whole]
    verify = mean(record.verify_seconds for record in whole)
    return {
        "tokens/s": sum(tokens for tokens, _ in rows)
        / sum(record.verify_seconds + record.wait_seconds for record in whole),
        "predicted": theory.predict(hf_ssd.SSDStats(runs[0].batch_size, whole)),
        "p": mean(hit for _, hit in rows),
        "E": mean(tokens for tokens, _ in rows),
        "E_hit": mean(tokens for tokens, hit in rows if hit),
        "E_miss": mean(tokens for tokens, hit in rows if not hit),
        "T_hit": mean(wait for wait, all_hit in waits if all_hit) / verify,
        "T_miss": mean(wait for wait, all_hit in waits if not all_hit) / verify,
    }


def draw_fallback(table: list[dict], axes) -> None:
    axes.axhline(1, color=BLUE, linewidth=2, label="primary")
    labels = [f"{b}\n" for b in BATCH_SIZES]
    for kind, color, style, shift in (("ngram", ORANGE, "s-", -0.05), ("random", GREEN, "^-", 0.05)):
        rows = [row for row in table if row["fallback"] == kind]
        places, medians = [i + shift for i in range(len(rows))], [row["median"] for row in rows]
        bars = [[abs(row[end] - row["median"]) for row in rows] for end in ("low", "high")]
        axes.errorbar(places, medians, bars, fmt=style, color=color, capsize=3, label=f"{kind} (bars: quartiles)")
        axes.plot(places, [row["predicted"] for row in rows], ":", color=color, label=f"{kind}, by Corollary 16")
        labels = [label + f"\n{kind} {row['b*']:.2f}".replace("inf", "∞") for label, row in zip(labels, rows)]
    axes.set(xticks=range(len(labels)), xticklabels=labels, ylabel="tokens per second over those of the primary")
    axes.set_xlabel("batch size b (rows), and b*: by Theorem 17 a backup wins where b > b*")
    wins = ", ".join(f"{row['fallback']} at {row['b']}" for row in table if row["low"] > 1)
    axes.set_title(f"Faster than drafting just in time in three of four turns: {wins or 'nothing'}")
    axes.legend()


def mean(values) -> float:
    """Returns the mean, nan of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


def report(name: str, table: list[dict], draw, args) -> None:
    """Prints the table, draws the figure, and puts the numbers into the JSON beside those of the others."""
    texts = [list(table[0])] + [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()] for row in table]
    widths = [max(map(len, column)) for column in zip(*texts)]
    print(*("  ".join(map(str.rjust, line, widths)) for line in texts), sep="\n")
    panels = 2 if name in ("shapes", "noise") else 1
    figure = Figure(figsize=(4 + 3.4 * panels, 4.8), layout="constrained")
    draw(table, *figure.subplots(1, panels, squeeze=False)[0])
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(args.output / f"{name}.png", dpi=120)
    path = args.output / "ablations.json"
    numbers = json.loads(path.read_text()) if path.exists() else {}
    settings = {"new_tokens": args.max_new_tokens, "prompts": args.prompts, "cores": len(available_cores())}
    versions = {module.__name__: module.__version__ for module in (hf_ssd, torch, transformers)}
    rows = [{key: str(x) if str(x) in ("nan", "inf") else x for key, x in row.items()} for row in table]
    numbers[name] = settings | versions | {"rows": rows}
    path.write_text(json.dumps(numbers, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    drawings = {fan_out: draw_fan_out, shapes: draw_shapes, saguaro: draw_saguaro, noise: draw_noise}
    drawings |= {fallback: draw_fallback, trees: draw_trees}
    ablations = {measure.__name__: (measure, draw) for measure, draw in drawings.items()}
    parser.add_argument("--only", nargs="+", choices=ablations, default=list(ablations), help="some of them")
    parser.add_argument("--output", type=Path, default=Path("docs/figures"), help="folder for figures and JSON")
    parser.add_argument("--pair", type=Path, default=PAIR, help="folder with the folders `target` and `draft`")
    parser.add_argument("--draft", type=Path, help="folder of another draft, or of a head of the target")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32], metavar="N", help="of `trees`")
    temperatures = {"type": float, "nargs": "+", "default": [0.3, 0.7, 1.0, 1.3], "metavar": "T"}
    parser.add_argument("--temperatures", **temperatures, help="of `noise`, 1.0 among them")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="for each prompt")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), choices=range(2, len(PROMPTS) + 1), metavar="N")
    kinds = {"choices": prompt_kinds.all_prompts(), "help": "of prompts, for the target's chat template"}
    parser.add_argument("--kind", **kinds)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    pair = load_pair(args.pair, args.draft)
    args.texts = PROMPTS[: args.prompts]
    if args.kind:
        args.texts = as_messages(prompt_kinds.held_out(args.prompts)[args.kind], pair[2])
    for name in args.only:
        measure, draw = ablations[name]
        print(f"\n{measure.__doc__}")
        report(name, measure(pair, args), draw, args)


if __name__ == "__main__":
    main()
