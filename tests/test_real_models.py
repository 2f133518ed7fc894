"""The GGUF files that examples/real_models.py joins from the parts of several packages."""

import struct

import pytest
import real_models

NAME = "qwen-coder-1.5b"
HEADER = b"GGUF" + struct.pack("<IQ", 3, 339)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Packages with the parts of a small file, of which the second half comes after part 9 and not after part 1."""
    count, (tensors, _) = len(real_models.PACKAGES[NAME]), real_models.IN_PARTS[NAME]
    for part, package in enumerate(real_models.PACKAGES[NAME], 1):
        (tmp_path / package / "data").mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "data" / f"part{part:02d}.bin").write_bytes(HEADER if part == 1 else bytes([part]) * 4)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(real_models.IN_PARTS, NAME, (tensors, 16 + 4 * (count - 1)))
    return tmp_path


def test_parts_are_joined_by_their_numbers_and_once(parts, tmp_path):
    file = real_models.gguf_file(NAME, tmp_path)
    assert file.read_bytes() == HEADER + b"".join(bytes([part]) * 4 for part in range(2, 23))
    written = file.stat().st_mtime_ns
    assert real_models.gguf_file(NAME, tmp_path) == file and file.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "part, content, sentence",
    [
        (1, b"GGML" + HEADER[4:], "does not begin as a GGUF file does"),
        (1, b"", "does not begin as a GGUF file does"),
        (1, HEADER[:8] + struct.pack("<Q", 291), "has 291 tensors and should have 339"),
        (22, b"", "has 96 bytes and should have 100"),
    ],
)
def test_parts_that_make_another_file_are_refused_and_leave_none(part, content, sentence, parts, tmp_path):
    (next((parts / real_models.PACKAGES[NAME][part - 1]).glob("data/*"))).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        real_models.gguf_file(NAME, tmp_path)
    assert not list(tmp_path.glob("*.gguf"))
