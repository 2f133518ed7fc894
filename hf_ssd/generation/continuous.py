"""A running batch, which requests join from any thread. The names are those of transformers' continuous batching."""

import contextlib
import dataclasses
import itertools
import math
import queue
import threading
import time
from collections.abc import Iterator

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..cache.kept_prefixes import AUTO, KeptPrefixes
from ..cache.support import without_wrapper
from ..config import COUPLED, SSDConfig
from ..drafting.resolver import ResolvedDraft
from ..stats import SSDDecoderOnlyOutput
from .api import bound_to, settings_of
from .checks import check_arguments, check_joining
from .draft import FaultTolerantDraft
from .loop import Pair, decode
from .request import Request, make_request
from .running_rows import Cancelled, RunningRows
from .target import Target
from .tokenizers import translation_for

LOOK = 0.5  # seconds between two looks whether the thread that decodes is alive
END_TIMEOUT = 60.0  # seconds for that thread to reach its next round


class BatchIsFull(RuntimeError):
    """As many requests wait for a place in a running batch as may wait."""


class ContinuousBatching:
    """
    A running batch of a target and its draft, in a thread of its own. A request joins between two rounds, while others
    are decoded, and leaves when it ends. Its tokens do not depend on its neighbours: greedy tokens are those of a call
    of its own, and sampled tokens those of a call with `verification="coupled"` and the same seed.

    ```python
    with hf_ssd.continuous_batching(target, assistant_model=draft) as manager:
        first = manager.add_request(input_ids, max_new_tokens=200, streaming=True)
        for output in manager.request_id_iter(first):
            print(output.generated_tokens)
    ```

    Args:
        model (`PreTrainedModel`): The target, in one process.
        assistant_model (*optional*): The draft, as in [`SSDGenerationMixin.generate`]. By default the
            draft and the settings that the model was enabled with.
        ssd_config ([`SSDConfig`] or `dict`, *optional*): Settings of all requests.
        max_rows (`int`): Requests that are decoded at a time. The others wait in the order in which they came.
        prefill_chunk (`int`): Tokens of a prompt that are read between two rounds of other requests.
        max_waiting (`int`, *optional*): Requests that may wait for a place. By default any number.
        keep_prefixes (`int` or `str`): Bytes of keys and values of requests that have ended, which are kept for target
            and draft each, so that a request that begins in the same way does not read them again. `"auto"` keeps an
            eighth of the free memory, at most 8 GiB; with 0 each request reads its whole prompt.
        tokenizer, assistant_tokenizer (*optional*): As in [`SSDGenerationMixin.generate`].

    Raises:
        `ValueError`, `TypeError`: The models or settings do not allow rows to join.
    """

    def __init__(
        self,
        model,
        assistant_model=None,
        ssd_config: SSDConfig | dict | None = None,
        max_rows: int = 8,
        prefill_chunk: int = 256,
        max_waiting: int | None = None,
        keep_prefixes: int | str = "auto",
        tokenizer=None,
        assistant_tokenizer=None,
    ):
        if max_rows < 1 or prefill_chunk < 1:
            raise ValueError(f"`max_rows` and `prefill_chunk` are at least 1, and not {max_rows} and {prefill_chunk}.")
        if keep_prefixes != "auto" and not (type(keep_prefixes) is int and 0 <= keep_prefixes < 2**63):
            raise ValueError(f'`keep_prefixes` is "auto" or a number of bytes, 0 for none, and not {keep_prefixes!r}.')
        self.max_waiting = max_waiting
        self.model = model = without_wrapper(model)
        if assistant_model is None and ssd_config is None:
            assistant_model, ssd_config, tokenizers = bound_to(model)
            tokenizer = tokenizer or tokenizers.get("tokenizer")
            assistant_tokenizer = assistant_tokenizer or tokenizers.get("assistant_tokenizer")
        config = settings_of(ssd_config) or SSDConfig()
        resolved = check_arguments(model, assistant_model, config, synced_gpus=None)
        check_joining(model)
        config = dataclasses.replace(config, verification=COUPLED, cuda_graphs=False)
        resolved = resolved if config.lookahead else ResolvedDraft()
        self.translation = translation_for(model, resolved, tokenizer, assistant_tokenizer)
        self.pair, self.max_rows = Pair(model, resolved, config, uses_q=False, rows=max_rows), max_rows
        # A head needs the hidden states of all tokens, which nobody keeps.
        self.keep_prefixes = 0 if resolved.reads else AUTO if keep_prefixes == "auto" else keep_prefixes
        self.kept_of_draft = KeptPrefixes()  # if it is in this process
        self.rows = RunningRows(self.pair, max_rows, prefill_chunk)
        self.requests: dict[str, tuple[Request, queue.SimpleQueue]] = {}
        self.numbers = itertools.count()
        self.wake, self.thread = threading.Event(), None

    # ---------------------------------------------------------------- transformers' names

    def start(self) -> None:
        """Starts the thread that decodes."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="hf_ssd continuous batching", daemon=True)
            self.thread.start()

    def stop(self, timeout: float = END_TIMEOUT) -> None:
        """Ends all requests with an error, and the thread, waiting up to `timeout` seconds for its next round."""
        self.rows.is_closing = True
        self.wake.set()
        if self.thread is not None:
            self.thread.join(timeout)

    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self.thread is not None and self.thread.is_alive() and not self.rows.is_closing

    def __enter__(self) -> "ContinuousBatching":
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self.stop()

    def add_request(
        self, input_ids, request_id: str | None = None, streaming: bool = False, seed: int | None = None, **kwargs
    ) -> str:
        """
        Lets a request join, and returns its id at once.

        Args:
            input_ids (`list[int]` or `torch.LongTensor` of shape `(length,)` or `(1, length)`): The prompt.
            request_id (`str`, *optional*): An id that no other request has.
            streaming (`bool`): Whether [`~ContinuousBatching.request_id_iter`] gets the tokens of each round.
            seed (`int`, *optional*): The sampled tokens are those of a coupled call after `torch.manual_seed(seed)`. By
                default the state of torch's generator counts, as in a call.
            kwargs: Arguments of `generate()`: `generation_config`, `max_new_tokens`, `do_sample`, `streamer`,
                `logits_processor`, `stopping_criteria`, `stop_strings` with `tokenizer`, and so on. A processor, a
                criterion or a streamer is called in the thread that decodes.

        Raises:
            `ValueError`: The request cannot be answered.
            `RuntimeError`: The batch does not run.
            [`BatchIsFull`]: `max_waiting` requests wait already.
        """
        if not self.is_running():
            raise RuntimeError("This batch does not run; use it in a `with` block, or call start() before.")
        if self.is_full:
            raise BatchIsFull(f"{len(self.rows.waiting)} requests wait already; try again later.")
        request_id = f"req_{next(self.numbers)}" if request_id is None else request_id
        if request_id in self.requests:
            raise ValueError(f"There is a request {request_id!r} already; give another `request_id`.")
        outputs: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        created = time.perf_counter()

        def changed(request: Request) -> None:
            if streaming or request.has_ended.is_set():
                outputs.put(output_of(request_id, request, created))

        request = make_request(self.pair, input_ids, changed, seed, **kwargs)
        self.requests[request_id] = request, outputs
        self.rows.waiting.append(request)
        self.wake.set()
        return request_id

    @property
    def is_full(self) -> bool:
        """Whether as many requests wait as may wait."""
        free = self.max_rows - len(self.rows.live) - len(self.rows.reading)
        return self.max_waiting is not None and len(self.rows.waiting) >= self.max_waiting + free

    def cancel_request(self, request_id: str) -> None:
        """Ends a request with its next round, if it has not ended yet."""
        if request_id in self.requests:
            self.requests[request_id][0].is_cancelled = True

    def get_result(self, request_id: str, timeout: float | None = None) -> GenerationOutput | None:
        """Returns the next output of a request, `None` if there is none within `timeout` seconds."""
        outputs = self.requests[request_id][1]
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with contextlib.suppress(queue.Empty):
                output = outputs.get(timeout=min(LOOK, max(0.0, deadline - time.monotonic())))
                if output.is_finished():
                    self.requests.pop(request_id, None)
                return output
            if time.monotonic() >= deadline:
                return None
            if outputs.empty():
                self._check_thread()

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yields the outputs of a request until it has ended, each with all tokens that were generated so far."""
        while request_id in self.requests:
            yield self.get_result(request_id)

    def generate(self, input_ids, **kwargs) -> torch.LongTensor | SSDDecoderOnlyOutput:
        """Returns what `model.generate(input_ids, ...)` would, as a request of this batch."""
        request_id, output = self.add_request(input_ids, **kwargs), None
        try:
            while output is None:
                output = self.result_of(request_id, LOOK)
            return output
        finally:
            self.forget(request_id)  # also if this thread was interrupted

    def result_of(self, request_id: str, timeout: float) -> torch.LongTensor | SSDDecoderOnlyOutput | None:
        """
        Returns what `generate()` would, once the request has ended, `None` if that takes longer than `timeout` seconds.
        Raises what the request has raised.
        """
        request = self.requests[request_id][0]
        if not request.has_ended.wait(timeout):
            self._check_thread()
            return None
        if request.error is not None:
            raise request.error
        return request.result(request.output)

    def _check_thread(self) -> None:
        if not self.thread.is_alive():
            raise RuntimeError("The thread that decodes has ended.")

    def forget(self, request_id: str) -> None:
        """Ends a request, if it has not ended, and keeps nothing of it."""
        self.cancel_request(request_id)
        self.requests.pop(request_id, None)

    # ---------------------------------------------------------------- the thread that decodes

    def _run(self) -> None:
        while not self.rows.is_closing:
            self.wake.wait()
            self.wake.clear()
            try:
                with torch.no_grad():
                    self._decode()
            except BaseException as error:  # of the models: nothing of this batch can go on
                self.rows.end_all(error)
        self.rows.end_all(Cancelled("The batch was closed."))
        self.kept_of_draft.close()

    def _decode(self) -> None:
        """Decodes until no request is left, with a draft that is replaced when it has failed."""
        pair, blank = self.pair, torch.zeros(0, dtype=torch.long)
        self.rows.kept.begin(self.model, self.keep_prefixes)
        target = Target(self.model, pair.config, self.rows, pair.resolved.reads)
        target.begin(self.max_rows, pair.resolved.width)
        with contextlib.closing(target.decoder), target.view._optimize_model_for_decode():
            while not self.rows.is_closing and (self.rows.waiting or self.rows.live or self.rows.reading):
                request = pair.request(GenerationConfig(), [blank] * self.max_rows, self.translation)
                request.forced = self.rows.forced
                request.keep_prefixes, request.kept = self.keep_prefixes, self.kept_of_draft
                arguments = request, self.rows.planner(1), self.rows.device, pair.ranks, pair.cores()
                with contextlib.closing(FaultTolerantDraft(pair.worker, pair.draft, *arguments)) as draft:
                    draft.open(0.0)
                    self.rows.resume(draft)
                    decode(target, self.rows, draft, None, time.perf_counter())


def output_of(request_id: str, request: Request, created: float) -> GenerationOutput:
    """Returns the tokens of a request that are certain, and its state."""
    sequences = request.sequences
    end = sequences.kept(0) if request.has_ended.is_set() else sequences.settled(0)
    output = GenerationOutput(request_id, list(request.prompt), created_time=created)
    output.generated_tokens = sequences.ids[0, sequences.prompt_length : end].tolist()
    output.status = RequestStatus.DECODING
    if request.has_ended.is_set():
        output.status = RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED
    output.error = None if request.error is None else f"{type(request.error).__name__}: {request.error}"
    return output


def continuous_batching(*arguments, **options) -> ContinuousBatching:
    """Returns a running batch, to be used in a `with` block. [`ContinuousBatching`] lists the arguments."""
    return ContinuousBatching(*arguments, **options)
