import inspect

import pytest

from hf_ssd import SSDConfig


def test_round_trips(tmp_path):
    config = SSDConfig(fan_out=[4, 3, 2, 1], saguaro_c=0.5, fallback="ngram", timeout=5.0, on_draft_failure="raise")
    assert SSDConfig.from_dict(config.to_dict()) == config
    config.save_pretrained(tmp_path / "made" / "for it")
    assert SSDConfig.from_pretrained(tmp_path / "made" / "for it") == config
    assert SSDConfig.from_pretrained(tmp_path / "made" / "for it", timeout=6.0).timeout == 6.0


def test_explicit_fan_out_sets_the_budget():
    for config in (SSDConfig(lookahead=2, fan_out=(5, 0, 6)), SSDConfig(fan_out=(5, 0, 6))):
        assert (config.lookahead, config.budget) == (2, 11)


class Proposer:
    def propose(self, input_ids, lookahead):
        return input_ids[:, :0], None


def test_a_fallback_of_ones_own_is_taken_and_not_saved():
    config = SSDConfig(fallback=Proposer())
    with pytest.raises(ValueError, match="cannot be saved"):
        config.to_dict()


@pytest.mark.parametrize(
    "field, value",
    [
        ("lookahead", 0),
        ("lookahead", 2.0),
        ("lookahead", True),
        ("budget", 0),
        ("budget", "24"),
        ("fan_out", "triangular"),
        ("lookahead", 65),
        ("lookahead", "automatic"),
        ("fan_out", [1]),
        ("fan_out", [0] * 8),
        ("fan_out", [1.5] * 8),
        ("fan_out", [-1] * 8),
        ("saguaro_c", -0.1),
        ("saguaro_c", 1.5),
        ("saguaro_c", "auto"),
        ("saguaro_c", True),
        ("fallback", "bigram"),
        ("fallback", object),
        ("fallback", None),
        ("acceptance_rate", 0),
        ("acceptance_rate", 1),
        ("acceptance_rate", "high"),
        ("power_law_exponent", 0),
        ("power_law_exponent", float("inf")),
        ("timeout", 0),
        ("timeout", float("nan")),
        ("on_draft_failure", "ignore"),
        ("asynchronous", 1),
        ("cuda_graphs", 1),
        ("cuda_graphs", "always"),
        ("pack_weights", 1),
        ("pack_weights", "always"),
    ],
)
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


@pytest.mark.parametrize("name", ["all_accepted", "single_branch", "greedy_tree"])
def test_shapes_of_other_systems_are_no_setting(name):
    with pytest.raises(
        ValueError, match=f'`fan_out` is \'{name}\', but must be "confidence", "geometric", "uniform" or'
    ):
        SSDConfig(fan_out=name)


def test_a_list_that_does_not_fit_the_lookahead_is_refused():
    with pytest.raises(ValueError, match=r"`fan_out` is \[1, 2\], but must be .*here 7 \+ 1"):
        SSDConfig(lookahead=7, fan_out=[1, 2])
