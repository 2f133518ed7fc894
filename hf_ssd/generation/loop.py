"""
The target's side of speculative speculative decoding: one loop, any batch size.

A round verifies a few drafted tokens of each row, its *speculation*, in one forward pass. The *outcome* of a row is how
many of them are accepted, and the bonus token that the target adds after them. While the target verifies, the draft
prepares speculations for likely outcomes. If the actual outcome is among them, the next speculation is available at
once (a *hit*); otherwise it is drafted just in time (a *miss*).
"""

import contextlib
import dataclasses
import time

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .. import devices
from ..cache.cache_name import CACHE
from ..cache.compiled import is_compiled
from ..cache.trial import check_supported
from ..config import SSDConfig
from ..devices import from_host
from ..distributed.assistant import DraftAssistant
from ..distributed.cores import TargetCores
from ..distributed.launch import assistant_for
from ..distributed.target_ranks import TargetRanks
from ..drafting.drafts import seed_of_call
from ..drafting.request import SessionRequest
from ..drafting.resolver import ResolvedDraft
from ..drafting.vocabulary import Translation
from ..planning.experience import CallKind
from ..planning.planner import asks_for_half, planner_for
from ..rounds import RoundRecord
from .checks import check_generation
from .deciding import CallRows
from .draft import FaultTolerantDraft
from .sequences import Sequences
from .settings import Settings
from .target import Target
from .trees import config_for_trees, verify_tree, widest


class Pair:
    """A target and the draft of its calls: a `worker`, which is started here, a model in this process, or both."""

    def __init__(self, model: PreTrainedModel, resolved: ResolvedDraft, config: SSDConfig, uses_q: bool, rows: int):
        check_supported(model, rows=rows, lookahead=widest(config), pack_weights=config.pack_weights)
        self.model, self.resolved = model, resolved
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size
        config = config if resolved.takes_worker else dataclasses.replace(config, asynchronous=False)
        self.worker: DraftAssistant | None = resolved.assistant
        self.draft = resolved.model
        if resolved.path is not None:
            self.worker = assistant_for(resolved.path, resolved.info)
        elif self.draft is not None:
            check_supported(self.draft, drafts=True, pack_weights=not config.asynchronous and config.pack_weights)
            if config.asynchronous:
                self.worker = assistant_for(self.draft, resolved.info)
                self.draft = None if is_compiled(self.draft) else self.draft
        self.config = config_for_trees(config, model, uses_q, self.worker)
        self.ranks = TargetRanks() if self.worker is None else self.worker.ranks

    def request(self, options: GenerationConfig, prompts: list, translation: Translation | None) -> SessionRequest:
        fallback = self.resolved.fallback
        return SessionRequest(self.config, options, prompts, 0, self.vocab_size, translation, head=fallback)

    def kind(self, rows: int, length: int, temperature: float | None = None) -> CallKind:
        workers = 1 if self.worker is None else len(self.worker.workers)
        return CallKind(self.config, rows, self.vocab_size, temperature, length, workers, self.resolved.one_pass)

    def planner(self, kind: CallKind):
        return planner_for(self.model, self.worker or self.draft or self.model, kind)

    def cores(self) -> TargetCores:
        """Returns the cores that the target has while its draft works, if both are on the CPU."""
        divided = self.worker is not None and self.worker.cores is not None
        divided = divided and devices.of_model(self.model).type == "cpu"
        return TargetCores(self.worker.cores.target if divided else None)


def speculative_speculative_decoding(
    model,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    resolved: ResolvedDraft,
    ssd_config: SSDConfig,
    streamer: BaseStreamer | None = None,
    translation: Translation | None = None,
    is_bound: bool = False,
    **model_kwargs,
):
    """A decoding method in the form that `generate(custom_generate=...)` calls, and what it returns."""
    settings = Settings(logits_processor, stopping_criteria, generation_config, ssd_config, is_bound)
    resolved = resolved if ssd_config.lookahead else ResolvedDraft()  # nobody is asked
    check_generation(model, input_ids, settings, model_kwargs, resolved.model)
    pair = Pair(model, resolved, ssd_config, settings.uses_q, rows=len(input_ids))
    settings = dataclasses.replace(settings, config=pair.config)
    sequences = Sequences(input_ids, settings, model_kwargs.get("attention_mask"))
    request = pair.request(settings.of_the_draft, sequences.prompts, translation)
    request.forced = settings.forced
    if generation_config.do_sample:  # greedy calls draw nothing
        request.seed = seed_of_call(request, int(torch.randint(2**31, ())), resolved.reads is not None)
    start, worker = time.perf_counter(), pair.worker
    kind = pair.kind(*input_ids.shape, generation_config.temperature if generation_config.do_sample else None)
    cores = pair.cores()
    if cores.share is not None and worker.cores.half is not None and asks_for_half(model, worker, kind):
        kind, request.has_half = dataclasses.replace(kind, has_half=True), True
        cores = TargetCores(worker.cores.half.target)
    planner, ranks = pair.planner(kind), pair.ranks
    target = Target(model, pair.config, sequences, resolved.reads)
    rows = CallRows(settings, sequences, request.seed, pair.vocab_size, target, ranks, streamer)
    with ranks.one_call():
        draft = FaultTolerantDraft(worker, pair.draft, request, planner, input_ids.device, ranks, cores)
        with contextlib.closing(draft), contextlib.closing(draft):  # again, in case of an interrupt
            draft.open(settings.patience)
            # 1. Prefill, while the draft does the same and prepares the likely first tokens.
            logits = target.prefill(settings, input_ids, model_kwargs)
            # transformers' context changes how experts are computed.
            with contextlib.closing(target.decoder), target.view._optimize_model_for_decode():
                decode(target, rows, draft, logits, start)
                draft.finish(generation_config.do_sample)
                output, stats = rows.finish(), rows.stats
                stats.total_seconds = time.perf_counter() - start
                stats.draft_failure, stats.draft_joined_at = draft.failure, draft.joined_at
                stats.reason = planner.reason_of(stats.records)
                target.give_cache(output)
    return rows.result(output, **{CACHE: target.theirs})


def decode(target: Target, rows, draft: FaultTolerantDraft, logits: torch.Tensor | None, start: float) -> None:
    """Runs the rounds of a call, whose prompts `logits` follow, or of a running batch, until no row needs tokens."""
    stats, decoder, uses_q = rows.stats, target.decoder, rows.uses_q
    following = probabilities = None
    record: RoundRecord | None = None  # of the round that is being verified
    received = start
    stats.prefill_seconds = time.perf_counter() - start

    while True:
        # 2. Decide: accepted count and bonus token of each row, by comparison or by rejection sampling.
        outcome = rows.decide(logits, probabilities, following)

        # 3. Send the outcome with the planner's plan before anything else is done. All ranks get the leader's outcome.
        seconds = time.perf_counter() - received
        if target.states is not None and record is not None:
            target.take_in(outcome.accepted)
        if rows.join:
            rows.admit(draft)
        outcome = draft.send_outcome(outcome, target.states)

        # 4. Bookkeeping, while the draft looks up its answer.
        rows.keep(outcome)
        if record is not None:
            record.accepted, record.verify_seconds = outcome.accepted, seconds
            is_new = any(one.compiles for one in stats.records[-2:])
            if len(stats.records) > 1 and draft.decides and not is_new:
                draft.planner.observe(stats.records[-2], record)
        if rows.streams:
            rows.report()
        if rows.join:
            rows.read(target)
        finished = [not goes_on for goes_on in rows.unfinished]
        if all(finished) or rows.pause:
            return
        if any(finished):
            decoder.leave_out(finished)

        # 5. Receive the next speculation.
        waiting = time.perf_counter()
        speculation = draft.receive_speculation()
        received, record = time.perf_counter(), speculation.record
        record.wait_seconds, record.received_at = received - waiting, received - start
        record.prepared_at, record.answered_at = record.prepared_at - start, record.answered_at - start
        stats.records.append(record)

        # 6. Verify: one forward pass over the last token and the drafted tokens of each row.
        before = decoder.preparations
        following = rows.propose(speculation.tokens)
        if speculation.siblings is None or following.shape[1] == 1:  # no drafted token is needed any more
            logits = target.verify(following)
        else:
            following, logits = verify_tree(target, rows, speculation)
        record.lookahead = following.shape[1] - 1
        record.compiles = decoder.preparations > before or rows.has_read

        # 7. The distributions that the tokens were drawn from are needed only now.
        probabilities = draft.receive_probabilities() if uses_q and speculation.width else None
        if probabilities is not None:
            probabilities = from_host(probabilities[:, : record.lookahead], following.device)
