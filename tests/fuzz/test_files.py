"""Saved settings and prompt files that are damaged are refused in a sentence, or say something that can be."""

import functools
import json
import math
import random

import datasets
import pytest
from evaluation.prompts import load_samples

from hf_ssd import SSDConfig

from .conftest import refused

SAVED = SSDConfig(fan_out=[4, 3, 2, 1], saguaro_c=0.5, fallback="ngram", timeout=5.0).to_dict()
ODD = [None, True, 0, -1, 65, 10**400, 1e308, math.nan, math.inf, "", "auto", [], [[]], {}, [1, 10**400], ["a"]]
is_refused = functools.partial(refused, error=ValueError)


def read(values):
    config = SSDConfig.from_dict(values)
    assert config.lookahead == "auto" or 0 <= config.lookahead <= 64
    assert config.budget == "auto" or config.budget >= 1
    assert 0 < config.acceptance_rate < 1 and 0 < config.timeout < math.inf
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def read_file(path):
    config = SSDConfig.from_pretrained(path)
    assert config.lookahead == "auto" or 0 <= config.lookahead <= 64


slow = pytest.mark.slow, pytest.mark.timeout(3000)


@pytest.mark.parametrize("count", [2000, pytest.param(300_000, marks=slow)])
def test_damaged_settings(count):
    chance, found = random.Random(count), []
    for _ in range(count):
        values = dict(SAVED) if chance.random() < 0.5 else SSDConfig().to_dict()
        for _ in range(chance.randint(1, 3)):
            values[chance.choice([*SAVED, "look_ahead"] if chance.random() < 0.9 else [None, 3])] = chance.choice(ODD)
        found.append(is_refused(read, values))
    assert 0.2 < sum(found) / count < 0.999


@pytest.mark.parametrize("count", [1_000, pytest.param(20_000, marks=slow)])
def test_damaged_files_of_settings(tmp_path, count):
    chance, found = random.Random(count), []
    SSDConfig.from_dict(SAVED).save_pretrained(tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for _ in range(count):
        file.write_bytes(damaged_text(whole, chance))
        found.append(is_refused(read_file, tmp_path))
    assert 0.2 < sum(found) / count < 0.999


def damaged_text(data, chance):
    data = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        what, place = chance.randrange(4), chance.randrange(len(data) or 1)
        if what == 0 and data:
            data[place] ^= 1 << chance.randrange(8)
        elif what == 1:
            del data[place : place + chance.randint(1, 20)]
        elif what == 2:
            data[place:place] = chance.choice([b"[" * 5000, b"\xff\xfe", b"null", b"-", b"9" * 400, b"{", b"\0", b'"'])
        else:
            data = data[:place]
    return bytes(data)


@pytest.mark.parametrize("content", ["[]", "null", "3", "[" * 100_000, "", '{"lookahead": ' + "9" * 5000 + "}"])
def test_files_that_hold_no_settings(tmp_path, content):
    (tmp_path / "ssd_config.json").write_text(content)
    assert is_refused(read_file, tmp_path)


FILES = {
    ".jsonl": b"".join(json.dumps({"prompt": f"tell {n}", "n": n}).encode() + b"\n" for n in range(5)),
    ".json": json.dumps([{"prompt": f"tell {n}"} for n in range(5)]).encode(),
    ".csv": b"prompt,n\n" + b"".join(b'"tell, %d",%d\n' % (n, n) for n in range(5)),
}


@pytest.mark.parametrize("suffix", FILES)
@pytest.mark.parametrize("count", [6, pytest.param(1000, marks=slow)])
def test_damaged_prompt_files(tmp_path, monkeypatch, suffix, count):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    chance, file = random.Random(count), tmp_path / f"prompts{suffix}"

    def read_prompts():
        samples = load_samples(str(file), "prompt", 3, fits=lambda prompt: True)
        assert 1 <= len(samples) <= 3 and all(sample.prompt and type(sample.prompt) is str for sample in samples)

    file.write_bytes(FILES[suffix])
    read_prompts()
    for _ in range(count):
        file.write_bytes(damaged_text(FILES[suffix], chance))
        is_refused(read_prompts)


NO_PROMPTS = {
    ".jsonl": [b"", b"\n\n", b"\xff\xfe\x00", b"[" * 100_000, b'{"prompt": null}\n',
               b'{"prompt": [1, 2]}\n{"prompt": "text"}\n', b'null{"prompt": "text"}\n{"prompt": "text"}\n'],
    ".json": [b"3"],
    ".csv": [b"", b'prompt\n"never ends\n'],
    ".parquet": [b"", b"PAR1"],
}  # fmt: skip


@pytest.mark.parametrize("suffix, content", [(kind, one) for kind, of_kind in NO_PROMPTS.items() for one in of_kind])
def test_prompt_files_that_hold_no_prompts(tmp_path, monkeypatch, suffix, content):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / f"prompts{suffix}"
    file.write_bytes(content)
    assert is_refused(load_samples, str(file), "prompt", 3, lambda prompt: True)
