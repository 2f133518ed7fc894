"""A program for torchrun: SSD with a divided target, in good and bad times. Each rank writes down what it saw.

torchrun --nproc-per-node 3 roles.py PAIR FOLDER NUM_DRAFT_RANKS SCENARIO ...
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, set_seed

import hf_ssd
from tests.helpers.at_length import AtLength
from tests.helpers.tiny import padded_batch, ready


class Program:
    def __init__(self, path: Path, roles):
        self.roles, self.inputs = roles, padded_batch(3)
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=roles.target_config(path))
        self.target = hf_ssd.enable(model)

    def generate(self, rows=2, action=None, **options):
        settings = {key: options.pop(key) for key in ("timeout", "on_draft_failure") if key in options}
        if self.roles.is_leader:
            ready(self.roles.draft)
        set_seed(7)
        output = self.target.generate(
            **{key: value[-rows:] for key, value in self.inputs.items()},
            **{"max_new_tokens": 20, "do_sample": False, **options},
            logits_processor=LogitsProcessorList([AtLength(15, action)] if action else []),
            assistant_model=self.roles.draft,
            ssd_config=hf_ssd.SSDConfig(lookahead=3, budget=6, **settings),
            return_dict_in_generate=True,
        )
        stats = output.ssd_stats
        seen = {"hits": stats.column("hits"), "accepted": stats.column("accepted"), "failure": stats.draft_failure}
        return {"tokens": output.sequences.tolist(), **seen}

    @property
    def workers(self):
        return [worker.worker_info["pid"] for worker in self.roles.draft.workers]  # the leader's; no one else has any

    def signal_worker(self, number):
        if self.roles.is_leader:
            os.kill(self.workers[0], number)

    # ---------------------------------------------------------------- scenarios

    def greedy(self):
        return [self.generate(rows) for rows in (1, 3)]

    def sampled(self):
        return [self.generate(rows, do_sample=True, temperature=0.7) for rows in (1, 3)]

    def sampled_plain_afterwards(self):
        self.generate(do_sample=True, temperature=0.7)
        state = torch.get_rng_state().sum().item()
        tokens = self.target.generate(**self.inputs, max_new_tokens=10, do_sample=True).tolist()
        return [state, tokens]

    def a_clock(self):
        """Ranks that would stop at different times."""
        slow = 0.0 if self.roles.is_leader else 0.2
        seen = self.generate(action=lambda: time.sleep(slow), max_time=0.15, max_new_tokens=100)
        return {"tokens": seen["tokens"]}

    def killed(self):
        before = self.workers
        seen = [self.generate(action=lambda: self.signal_worker(signal.SIGKILL)), self.generate()]
        return seen + [before, self.workers]

    def stopped_between_calls(self):
        """So that messages are on their way to it when it is given up."""
        self.signal_worker(signal.SIGSTOP)
        return [self.generate(timeout=1.0), self.generate()]

    def raising(self):
        """The draft's failure, and an error of the leader's own, reach all ranks."""
        seen = []
        try:
            self.generate(action=lambda: self.signal_worker(signal.SIGKILL), on_draft_failure="raise")
        except hf_ssd.DraftError as error:
            seen.append(str(error))

        def fail():
            if self.roles.is_leader:
                raise KeyError("the leader's own")

        try:
            self.generate(action=fail)
        except (KeyError, RuntimeError) as error:
            seen.append(f"{type(error).__name__} {error}")
        return seen + [self.generate()]

    def a_rank_dies(self):
        is_last = self.roles.rank == self.roles.tp_size - 1
        self.generate(action=lambda: is_last and os.kill(os.getpid(), signal.SIGKILL))


def main():
    pair, folder, num_draft_ranks, scenarios = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    roles = hf_ssd.distributed.init_roles(num_draft_ranks)
    if roles.is_draft:
        roles.serve(AutoModelForCausalLM.from_pretrained(pair / "draft", device_map={"": roles.device}))
        (folder / f"served-{roles.rank}").touch()
        return
    program = Program(pair / "target", roles)
    out = folder / f"rank-{roles.rank}.json"
    seen = {"workers": program.workers}
    for scenario in scenarios:
        out.write_text(json.dumps(seen))  # for a test that kills this program
        seen[scenario] = getattr(program, scenario)()
        seen["workers"] += program.workers
    out.write_text(json.dumps(seen))
    roles.shutdown()


if __name__ == "__main__":
    main()
