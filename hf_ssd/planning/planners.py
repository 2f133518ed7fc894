"""The planner of each call, and the measurements of each pair of models in this process, from which it starts."""

import threading
import weakref

from .experience import CallKind, PairKnowledge
from .fixed_plan import FixedPlan
from .planner import Planner

_pairs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def planner_for(target, draft, kind: CallKind) -> "Planner | FixedPlan":
    """Returns a planner for a call of a pair; `draft` is a model, or the assistant that holds its workers."""
    config = kind.config
    if config.lookahead != "auto" and config.budget != "auto":
        return FixedPlan(config)
    with _lock:  # measurements of earlier calls are kept while both live
        pair = _pairs.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, PairKnowledge())
    with pair.lock:
        pair.last = Planner(kind, pair)
    return pair.last


def last_planner(target, draft) -> Planner | None:
    """Returns the planner of the last planned call with this pair, whose `costs` hold the measurements."""
    pair = _pairs.get(target, {}).get(draft)
    return None if pair is None else pair.last
