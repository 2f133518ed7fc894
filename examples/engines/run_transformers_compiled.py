"""Runs transformers with static caches and a compiled target, whose assisted generation takes both. See `job.py`."""

import os

import job
import run_transformers
from transformers import CompileConfig

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of compilers ended the process


def ways(work: dict) -> dict:
    config = CompileConfig(mode="default")
    config._compile_all_devices = True  # otherwise transformers compiles on accelerators alone
    return run_transformers.ways(work, cache_implementation="static", compile_config=config)


if __name__ == "__main__":
    job.do(ways)
