"""Does a job of `compare_engines.py` in the environment of an engine. For the programs beside this file."""

import json
import sys
import time
from collections.abc import Callable


def do(ways_of: Callable[[dict], dict[str, Callable]]) -> None:
    """
    Reads a job from stdin, and prints for each way to generate a line of JSON with its figures or its error.

    Args:
        ways_of (`Callable[[dict], dict[str, Callable]]`): Takes the job and returns, by name, functions that load a
            way to generate. The function that they return takes the prompt and a number of tokens, both as the job has
            them, and returns the tokens of the answer.
    """
    job = json.load(sys.stdin)
    for name, load in ways_of(job).items():
        report(name, load, job)


def report(name: str, load: Callable, job: dict) -> None:
    """Prints the line of a way to generate."""
    try:
        figures = measure(load(), job)
    except Exception as error:
        figures = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"way": name, **figures}), flush=True)


def measure(generate: Callable[[list[int], int], list[int]], job: dict) -> dict:
    """Returns tokens per second of each run, the prompt included, and the tokens. One more run goes before."""
    generate(job["prompt"], job["new_tokens"])
    speeds = []
    for _ in range(job["repeats"]):
        start = time.perf_counter()
        tokens = [int(token) for token in generate(job["prompt"], job["new_tokens"])]
        speeds.append(len(tokens) / (time.perf_counter() - start))
    return {"speeds": speeds, "tokens": tokens}


def speculating(job: dict, lookup: Callable, draft: Callable) -> dict[str, Callable]:
    """Returns the ways that speculate, once for each lookahead; those of a draft only if the job has a draft."""
    ways = {"prompt lookup": lookup, "draft": draft} if job["draft"] else {"prompt lookup": lookup}
    return {f"{name}, {n}": lambda load=load, n=n: load(n) for name, load in ways.items() for n in job["lookaheads"]}
