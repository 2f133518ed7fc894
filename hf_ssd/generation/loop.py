"""
The target's side of speculative speculative decoding: one loop, any batch size.

A round verifies a few drafted tokens of each row, its *speculation*, in one forward pass. The *outcome* of a row is how
many of them are accepted, and the bonus token that the target adds after them. While the target verifies, the draft
prepares speculations for likely outcomes. If the actual outcome is among them, the next speculation is available at
once (a *hit*); otherwise it is drafted just in time (a *miss*). The planner says for each round how many tokens are
drafted, and whether ahead, in turn with the target, or not at all.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import time

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .. import devices
from ..advice import adjustable
from ..cache.cache_name import CACHE, cache_argument
from ..cache.cached_model import CachedModel, view_for_passes
from ..cache.compiled import is_compiled
from ..cache.hidden_states import HiddenStates, hooked_modules
from ..cache.recurrent import RecurrentModel
from ..cache.trial import check_supported
from ..config import SSDConfig
from ..devices import from_host
from ..distributed.cores import TargetCores
from ..distributed.launch import assistant_for
from ..distributed.sessions import SessionRequest
from ..distributed.target_ranks import TargetRanks
from ..drafting.resolver import ResolvedDraft
from ..drafting.vocabulary import Translation
from ..planning.cost_model import LOOKAHEADS
from ..planning.experience import CallKind
from ..planning.fixed_plan import FixedPlan
from ..planning.planner import Planner
from ..planning.planners import planner_for
from ..rounds import RoundRecord
from ..stats import SSDDecoderOnlyOutput, SSDStats
from .checks import check_generation
from .deciding import Decider
from .draft import FaultTolerantDraft
from .features import Features
from .recording import StepRecord
from .sequences import Sequences, longest_output
from .streaming import Stream
from .target import feed_what_is_missing, prefill, prompts_without_padding, verify_alone


def speculative_speculative_decoding(
    model,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    resolved: ResolvedDraft | None = None,
    ssd_config: SSDConfig | None = None,
    streamer: BaseStreamer | None = None,
    translation: Translation | None = None,
    is_bound: bool = False,
    **model_kwargs,
):
    """
    A decoding method in the form that `generate(custom_generate=...)` calls, with inputs as transformers prepared them.

    Args:
        model (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): The prompts.
        logits_processor, stopping_criteria, generation_config, streamer: As in `GenerationMixin._sample`.
        resolved ([`~hf_ssd.drafting.resolver.ResolvedDraft`]): The draft.
        ssd_config ([`SSDConfig`]): The settings.
        translation ([`~hf_ssd.drafting.vocabulary.Translation`], *optional*): From the target's tokens
            to the draft's.
        is_bound (`bool`, *optional*): Whether the settings are those of [`~hf_ssd.enable`], not of the call.
        model_kwargs: The cache, `attention_mask`, `position_ids` and other inputs of the prefill.

    Returns:
        `torch.LongTensor` or [`SSDDecoderOnlyOutput`]: As in plain `generate()`, depending on
        `return_dict_in_generate`.
    """
    max_length = longest_output(stopping_criteria)
    options = generation_config, logits_processor, max_length, model_kwargs
    check_generation(model, input_ids, *options, resolved.model, ssd_config, is_bound)
    longest = max(LOOKAHEADS) if ssd_config.lookahead == "auto" else ssd_config.lookahead
    check_supported(model, rows=len(input_ids), lookahead=longest)
    if not resolved.takes_worker:
        ssd_config = dataclasses.replace(ssd_config, asynchronous=False)
    # The draft in its own process, and as a model to run in this process.
    worker, draft_model = resolved.assistant, resolved.model
    if resolved.path is not None:
        worker = assistant_for(resolved.path, resolved.info)
    elif draft_model is not None:
        check_supported(draft_model, drafts=True)
        worker = assistant_for(draft_model, resolved.info) if ssd_config.asynchronous else None
        draft_model = None if worker is not None and is_compiled(draft_model) else draft_model
    divided = worker is not None and worker.cores is not None and devices.of_model(model).type == "cpu"
    of_the_draft = copy.copy(generation_config)
    of_the_draft.max_length = max_length
    prompts = prompts_without_padding(input_ids, model_kwargs.get("attention_mask"))
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    seed = int(torch.randint(2**31, ())) if generation_config.do_sample else 0  # greedy calls draw nothing
    request = SessionRequest(ssd_config, of_the_draft, prompts, seed, vocab_size, translation, head=resolved.fallback)
    start = time.perf_counter()
    rows, length = input_ids.shape
    temperature = generation_config.temperature if generation_config.do_sample else None
    workers = 1 if worker is None else len(worker.workers)
    kind = CallKind(ssd_config, rows, vocab_size, temperature, length, workers, resolved.needs.one_pass)
    planner = planner_for(model, worker or draft_model or model, kind)
    ranks = worker.ranks if worker is not None else TargetRanks()
    reads = resolved.reads
    view = view_for_passes(model, hooked_modules(model, *reads) if reads else (), ssd_config.pack_weights)
    captured = HiddenStates(view, *reads) if reads else None
    cores = TargetCores(worker.cores.target if divided else None)
    with ranks.one_call():
        draft = FaultTolerantDraft(worker, draft_model, request, planner, input_ids.device, ranks, cores)
        with contextlib.closing(draft), contextlib.closing(draft):  # again, in case of an interrupt
            draft.open(patience(ssd_config, generation_config, stopping_criteria))
            # 1. Prefill, while the draft does the same and prepares the likely first tokens.
            options = {"cuda_graphs": ssd_config.cuda_graphs, "view": view, "hidden_states": captured}
            decoder, logits = prefill(model, input_ids, generation_config, model_kwargs, max_length, **options)
            features = None
            if captured is not None:
                features = Features(decoder.features, model_kwargs.get("attention_mask"), input_ids.shape[1])
            # transformers' context changes how experts are computed.
            with contextlib.closing(decoder), view._optimize_model_for_decode():
                return decode(
                    decoder,
                    logits,
                    input_ids,
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    draft,
                    planner,
                    streamer,
                    start,
                    theirs=model_kwargs[CACHE],
                    features=features,
                )


def patience(ssd_config: SSDConfig, generation_config, stopping_criteria: StoppingCriteriaList) -> float:
    """
    Returns the seconds that a call waits for a worker that is starting: 0, unless the call samples with a fixed
    lookahead. Then a seed must reproduce its tokens, but rounds before the draft is ready draw other random numbers.
    """
    if not generation_config.do_sample or ssd_config.lookahead == "auto":
        return 0.0
    clocks = [criteria for criteria in stopping_criteria if isinstance(criteria, MaxTimeCriteria)]
    return min((clock.initial_timestamp + clock.max_time - time.time() for clock in clocks), default=math.inf)


def decode(
    decoder: CachedModel,
    logits: torch.Tensor,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    draft: FaultTolerantDraft,
    planner: Planner | FixedPlan,
    streamer,
    start: float,
    theirs: DynamicCache,
    features: Features | None = None,
):
    """
    Runs the rounds until all rows are finished, and returns the output. At the end its columns are copied to `theirs`,
    the cache of the user or of transformers, if that is returned or belongs to the user.
    """
    do_sample, wants_dict = generation_config.do_sample, generation_config.return_dict_in_generate
    pad_token = generation_config._pad_token_tensor
    sequences = Sequences(input_ids, stopping_criteria, 0 if pad_token is None else int(pad_token))
    batch_size, prompt_length = input_ids.shape
    stats = SSDStats(batch_size, adjustable=adjustable(draft.request.config, do_sample))
    scores_record, logits_record = (
        StepRecord(batch_size, prompt_length, input_ids.device, dtype) if wants_dict and wanted else None
        for wanted, dtype in ((generation_config.output_scores, None), (generation_config.output_logits, torch.float32))
    )
    stream = Stream(streamer, sequences) if streamer is not None else None
    received = start

    def keep(rows, new_tokens, scores, logits, on_device=None):
        """Adds the new tokens to the rows, and finds out which rows have ended."""
        sequences.accept(new_tokens, on_device)
        for record, values in ((scores_record, scores), (logits_record, logits)):
            for row, of_row in zip(rows, values) if record is not None else ():
                record.add(row, of_row[: len(new_tokens[row])])
        sequences.stop_where_plain_generation_would(
            new_tokens, scores_record.up_to if scores_record else lambda _: None
        )
        if not sequences.simple:  # a time limit, for example, may pass earlier on some ranks
            sequences.stops = draft.ranks.share_values(sequences.stops)

    wants_cache = wants_dict or getattr(theirs, "_is_user_defined", False)
    if wants_cache and isinstance(decoder, RecurrentModel) and not sequences.ends_by_row:
        decoder.remember_prefill()  # rows may end where other rows stop them, before their last checkpoint
    columns_before_ids = decoder.cache.get_seq_length() - prompt_length
    decider = Decider(
        logits_processor,
        sequences,
        do_sample,
        draft.ranks,
        scores_record is not None,
        functools.partial(verify_alone, decoder, sequences, columns_before_ids),
    )
    following, probabilities = input_ids.new_full((batch_size, 1), -1), None
    record: RoundRecord | None = None  # of the round that is being verified
    stats.prefill_seconds = time.perf_counter() - start

    while True:
        # 2. Decide: accepted count and bonus token of each row, by comparison or by rejection sampling.
        if decider.by_step:  # which calls `keep` itself
            outcome = decider.decide_by_step(logits, probabilities, following[:, :-1], keep)
        else:
            outcome, bonus, scores = decider.decide(logits, probabilities, following)

        # 3. Send the outcome with the planner's plan before anything else is done. All ranks get the leader's outcome.
        seconds = time.perf_counter() - received
        if features is not None and record is not None:
            features.add(decoder.features, outcome.accepted)
        outcome = draft.send_outcome(outcome, features)
        accepted = [len(tokens) - 1 for tokens in outcome.tokens]

        # 4. Bookkeeping, while the draft looks up its answer.
        if not decider.by_step:
            keep(range(batch_size), outcome.tokens, scores, logits, bonus)
        if record is not None:
            record.accepted, record.verify_seconds = accepted, seconds
            is_new = any(one.compiles for one in stats.records[-2:])
            if len(stats.records) > 1 and draft.decides and not is_new:
                planner.observe(stats.records[-2], record)
        if stream is not None:
            stream.update(stats)
        unfinished = sequences.unfinished
        finished = [not goes_on for goes_on in unfinished]
        if all(finished):
            break
        decoder.leave_out(finished)

        # 5. Receive the next speculation, and cut it to the tokens that may still be needed.
        waiting = time.perf_counter()
        speculation = draft.receive_speculation()
        received = time.perf_counter()
        tokens, record = speculation.tokens, speculation.record
        if sequences.max_length is not None:
            room = max(sequences.remaining(row) for row, goes_on in enumerate(unfinished) if goes_on)
            tokens = [of_row[: room - 1] for of_row in tokens]
        record.lookahead, record.wait_seconds = len(tokens[0]), received - waiting
        record.received_at = received - start
        record.prepared_at, record.answered_at = record.prepared_at - start, record.answered_at - start
        stats.records.append(record)

        # 6. Verify: one forward pass over the last token and the drafted tokens of each row.
        following, before = sequences.propose(tokens), decoder.runner.preparations
        drafted = following[:, :-1]
        fed = torch.cat([sequences.last[:, None], drafted], dim=1).to(decoder.device)
        starts = [length - 1 + columns_before_ids for length in sequences.lengths]
        logits = decoder.extend(fed, starts)
        record.compiles = decoder.runner.preparations > before

        # 7. The distributions that the tokens were drawn from are needed only now.
        probabilities = draft.receive_probabilities() if do_sample and speculation.width else None
        if probabilities is not None:
            probabilities = from_host(probabilities[:, : drafted.shape[1]], input_ids.device)

    if stream is not None:
        stream.end()
    draft.finish(input_ids.device, do_sample)
    output = sequences.finish()
    stats.total_seconds = time.perf_counter() - start
    stats.generated_tokens = sum(sequences.kept(row) - prompt_length for row in range(batch_size))
    stats.unlikely_tokens = decider.unlikely_tokens
    stats.draft_failure, stats.draft_joined_at = draft.failure, draft.joined_at
    stats.reason = planner.reason_of(stats.records)
    if wants_cache:
        feed_what_is_missing(decoder, sequences, output, columns_before_ids)
        if 0 < len(theirs.layers) < len(decoder.cache.layers):
            # A model that repeats its layers (Dory) adds cache layers for the repetitions in its first pass.
            decoder.model(output[:, -1:].to(decoder.device), use_cache=True, **{cache_argument(decoder.model): theirs})
        decoder.cache.copy_to(theirs, output.shape[1] - 1 + columns_before_ids)
    if not wants_dict:
        return output
    return SSDDecoderOnlyOutput(
        sequences=output,
        scores=scores_record.up_to(output.shape[1]) if scores_record else None,
        logits=logits_record.up_to(output.shape[1]) if logits_record else None,
        ssd_stats=stats,
        **{CACHE: theirs},
    )
