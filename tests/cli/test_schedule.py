"""What of a check fits into its seconds, and the dtype that a processor computes fastest."""

from types import SimpleNamespace

import pytest
import torch

from hf_ssd.cli import doctor
from hf_ssd.cli.schedule import Schedule, schedule_for, seconds_asked

from ..helpers.tiny import tiny_model


def plain(prefill: float, token: float) -> SimpleNamespace:
    """Returns the figures of a plain answer, by its seconds until the first token and for each token after it."""
    return SimpleNamespace(prefill=prefill, speed=1 / token)


QUIET = plain(0.6, 0.25)  # a pair of 1.5 and 0.5 billion parameters in float32 on two cores that nothing else uses


@pytest.mark.parametrize(
    "seconds, pace, expected",
    [
        (60, plain(0.01, 0.01), Schedule(64, 5, 3, True)),
        (60, plain(0.1, 0.05), Schedule(64, 3, 3, True)),
        (50, plain(0.1, 0.1), Schedule(32, 3, 3, True)),
        (51, QUIET, Schedule(20, 3, 3, False)),
        (20, QUIET, Schedule(24, 1, 1, False)),
        (10, QUIET, None),
        (-5, QUIET, None),
    ],
)
def test_a_schedule_gives_up_turns_then_length_then_methods(seconds, pace, expected):
    found = schedule_for(seconds, pace, methods=4, tokens=64, repeats=5)
    assert found == expected
    assert found is None or found.seconds(pace, 4) <= seconds


def test_the_seconds_that_are_asked_for_are_enough_for_whole_answers():
    for pace in (QUIET, plain(3.0, 1.5), plain(0.001, 0.0001)):
        asked = seconds_asked(9.0, pace, methods=4, tokens=64, repeats=5)
        found = schedule_for(asked - 9.0, pace, methods=4, tokens=64, repeats=5)
        assert found.tokens == 64 and found.assisted and found.turns >= 3 and asked % 10 == 0


@pytest.mark.parametrize(
    "times, expected", [((2.0, 1.0), "bfloat16"), ((1.0, 2.0), "float32"), ((1.0, 1.1), None), ((1.1, 1.0), None)]
)
def test_the_faster_dtype_is_named_where_it_is_faster_for_steps_and_verifications(monkeypatch, times, expected):
    seconds, shapes = dict(zip((torch.float32, torch.bfloat16), times)), []
    monkeypatch.setattr(doctor, "seconds_of", lambda shape, _, dtype: shapes.append(shape) or [seconds[dtype]] * 2)
    model = tiny_model()
    assert doctor.fastest(model, torch.device("cpu")) == expected
    mlp = model.model.layers[0].mlp
    assert {*shapes} <= {tuple(layer.weight.shape) for layer in (mlp.up_proj, mlp.down_proj)}  # the largest layers
    assert doctor.fastest(model, torch.device("cuda")) is None
    both = {torch.float32: [1.0, 1.0], torch.bfloat16: [0.5, 2.0]}  # half of the bytes, but no instructions for them
    monkeypatch.setattr(doctor, "seconds_of", lambda shape, _, dtype: both[dtype])
    assert doctor.fastest(model, torch.device("cpu")) is None


def test_a_layer_is_tried_in_each_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        assert all(seconds > 0 for seconds in doctor.seconds_of((64, 32), 2, dtype))


def test_advice_is_given_where_the_model_has_another_dtype():
    model = {"name": "a", "family": "llama", "parameters": 1, "layers": 1, "attention": "full", "vocabulary": 9}
    known = {"target": {**model, "device": "cpu", "dtype": "float32"}, "fastest_dtype": "bfloat16"}
    assert "computes bfloat16 faster than float32: --dtype bfloat16" in doctor.in_words(known)
    assert "dtype" not in doctor.in_words({**known, "fastest_dtype": "float32"})
    assert "0.90 running programs for each core, a busy machine" in doctor.in_words({**known, "load": 0.9})
    assert "busy" not in doctor.in_words({**known, "load": 0.1})
