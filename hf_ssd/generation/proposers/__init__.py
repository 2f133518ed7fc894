"""Who proposes tokens in the target's process, by the names that a plan has for them. A new proposer is a line here."""

from collections.abc import Callable

from ...drafting.request import SessionRequest
from ...rounds import CUSTOM, NGRAM, RANDOM
from .base import Proposer
from .custom import CustomFallback
from .mtp import MtpFallback
from .ngrams import Ngrams
from .random_tokens import RandomFallback

PROPOSERS: dict[str, Callable[[SessionRequest], Proposer]] = {
    NGRAM: lambda request: Ngrams(),
    RANDOM: lambda request: RandomFallback(request.vocab_size, request.seed),
    "mtp": lambda request: MtpFallback(request.head, request),
    CUSTOM: lambda request: CustomFallback(request.config.fallback, request.vocab_size),
}
