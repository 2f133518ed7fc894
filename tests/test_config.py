import inspect

import pytest

from hf_ssd import SSDConfig

from .helpers.last_token import LastToken


def test_round_trips(tmp_path):
    config = SSDConfig(fan_out=[4, 3, 2, 1], saguaro_c=0.5, fallback="ngram", timeout=5.0, on_draft_failure="raise")
    assert SSDConfig.from_dict(config.to_dict()) == config
    config.save_pretrained(tmp_path / "made" / "for it")
    assert SSDConfig.from_pretrained(tmp_path / "made" / "for it") == config
    assert SSDConfig.from_pretrained(tmp_path / "made" / "for it", timeout=6.0).timeout == 6.0
    with pytest.raises(ValueError, match="cannot be saved"):
        SSDConfig(fallback=LastToken()).to_dict()


def test_explicit_fan_out_sets_the_budget_and_fits_the_lookahead():
    for config in (SSDConfig(lookahead=2, fan_out=(5, 0, 6)), SSDConfig(fan_out=(5, 0, 6))):
        assert (config.lookahead, config.budget) == (2, 11)
    with pytest.raises(ValueError, match=r"`fan_out` is \[1, 2\], but must be .*here 7 \+ 1"):
        SSDConfig(lookahead=7, fan_out=[1, 2])


INVALID = {  # values of each setting
    "lookahead": [-1, 2.0, True, 65, "automatic"],
    "budget": [0, "24"],
    "fan_out": ["triangular", [1], [0] * 8, [1.5] * 8, [-1] * 8, "all_accepted", "single_branch", "greedy_tree"],
    "saguaro_c": [-0.1, 1.5, "auto", True],
    "fallback": ["bigram", object, None],
    "acceptance_rate": [0, 1, "high"],
    "power_law_exponent": [0, float("inf")],
    "timeout": [0, float("nan")],
    "on_draft_failure": ["ignore"],
    "asynchronous": [1],
    "cuda_graphs": [1, "always"],
    "pack_weights": [1, "always"],
}


@pytest.mark.parametrize("field, value", [(field, value) for field, values in INVALID.items() for value in values])
def test_invalid_values_name_the_field_the_value_and_what_is_allowed(field, value):
    with pytest.raises(ValueError, match=rf"`{field}` is .*, but must be ") as error:
        SSDConfig(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("make", [SSDConfig, lambda **settings: SSDConfig.from_dict(settings)])
def test_a_misspelled_setting_is_told_which_one_is_meant(make):
    with pytest.raises(ValueError, match="no setting 'lookahed'; did you mean 'lookahead'. The settings are lookahead"):
        make(lookahed=3)
    with pytest.raises(ValueError, match="no setting 'zzz'; the settings are lookahead, budget"):
        make(zzz=3)
    assert list(inspect.signature(SSDConfig).parameters)[:2] == ["lookahead", "budget"]  # as editors show it
