"""HumanEval: does prompt and completion together pass the tests? Each program runs in a process with limits."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import datasets
import evaluate

_DESCRIPTION = "Share of HumanEval problems whose one completion passes the problem's tests."
_CITATION = """
@article{chen2021evaluating,
  title={Evaluating Large Language Models Trained on Code},
  author={Chen, Mark and others},
  journal={arXiv preprint arXiv:2107.03374},
  year={2021}
}
"""
_INPUTS = """
Args:
    predictions (`list[str]`): Completions of the prompts; in an answer with a fenced block, the block counts.
    references (`list[dict]`): Rows of openai/openai_humaneval: `prompt`, `test` and `entry_point`.
    execute_code (`bool`): Must be `True`: the programs were written by a model. They run in processes of their own with
        limits of time and memory and without this process's environment variables, which is no sandbox.
    time_limit (`float`): Seconds for each program.
    memory_limit (`int`): Bytes of address space for each program.
    num_workers (`int`): Programs that run at the same time.
Returns:
    pass_at_1 (`float`): Share of programs that run to their end, between 0 and 1.
"""
STOPS = re.compile(r"\n(?:class|def|#|if|print)")  # where a function has ended: the stop sequences of the paper
FENCED = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\r?\n(.*?)(?:\n```|\Z)", re.DOTALL)
PASSED = 42  # an exit status of its own: a program that leaves early with status 0 has not passed
RUNNER = f"""
import os, resource, sys
memory = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
exec(compile(sys.stdin.buffer.read(), "program", "exec"), {{"__name__": "__main__"}})
os._exit({PASSED})
"""


def code_of(completion: str, entry_point: str) -> str:
    """Returns what follows the prompt: a fenced block, a whole program, or the rest of the function that it began."""
    fenced = FENCED.search(completion)
    if fenced:
        return fenced.group(1)
    goes_on = completion.lstrip("\r\n")[:1] in (" ", "\t")
    if not goes_on and f"def {entry_point}(" in completion:
        return completion
    return STOPS.split(completion, maxsplit=1)[0]


def passes(program: str, time_limit: float, memory_limit: int) -> bool:
    """Runs a program, and tells whether it came to its end."""
    command = [sys.executable, "-I", "-c", RUNNER, str(memory_limit)]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, **nowhere, cwd=folder, env={}, start_new_session=True
        )
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=time_limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the program has started
            process.wait()
    return process.returncode == PASSED


class PassAt1(evaluate.Metric):
    """See `_INPUTS`."""

    def _info(self):
        text = datasets.Value("string")
        features = {"predictions": text, "references": {"prompt": text, "test": text, "entry_point": text}}
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(features),
            reference_urls=["https://github.com/openai/human-eval"],
        )

    def _compute(
        self, predictions, references, execute_code=False, time_limit=10.0, memory_limit=1 << 30, num_workers=1
    ):
        if not execute_code:
            raise ValueError("pass_at_1 runs code that a model wrote; pass `execute_code=True` if it may do so.")
        if sys.platform != "linux":
            raise ValueError("pass_at_1 needs Linux, where the memory of a process can be limited.")
        programs = []
        for completion, reference in zip(predictions, references):
            code = code_of(completion, reference["entry_point"])
            check = f"check({reference['entry_point']})"
            programs.append("\n".join((reference["prompt"] + code, reference["test"], check, "")))
        with ThreadPoolExecutor(num_workers) as pool:
            passed = list(pool.map(lambda program: passes(program, time_limit, memory_limit), programs))
        return {"pass_at_1": sum(passed) / len(passed)}
