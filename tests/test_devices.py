"""What is asked of devices, with stand-ins for accelerators that are not there."""

from types import SimpleNamespace

import pytest
import torch

from hf_ssd import devices
from hf_ssd.cache.trial import check_supported
from hf_ssd.distributed.launch import device_for
from hf_ssd.distributed.worker import use_device

from .helpers.tiny import tiny_model


@pytest.fixture
def two_accelerators(monkeypatch):
    """Two of them, where there was the CPU alone; the list says how many bytes this process holds on each."""
    held, cpu = [0, 0], torch.device("cpu")
    assert device_for("hub/id", None) == cpu and devices.identity(cpu) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda index: held[index])
    return held


@pytest.mark.parametrize("held, expected", [([0, 0], 1), ([5, 0], 1), ([0, 5], 0), ([5, 5], 1)])
def test_a_draft_goes_where_this_process_holds_nothing_or_says_that_it_shares(
    two_accelerators, monkeypatch, held, expected
):
    said = []
    monkeypatch.setattr(devices.logger, "warning_once", said.append)
    two_accelerators[:] = held
    assert device_for("hub/id", None) == torch.device("xpu", expected) and len(said) == all(held)
    assert all("shares xpu:1 with the target" in line and "asynchronous=False" in line for line in said)


def test_a_device_is_taken_by_its_name_if_it_is_there(two_accelerators):
    for name in ("cpu", "cpu:0", "xpu", "xpu:1"):
        assert devices.existing(name) == torch.device(name)
    for name in ("xpu:2", "cuda:0", "cpu:1", "gpu"):
        with pytest.raises(ValueError, match=f"no device '{name}', only cpu, xpu:0, xpu:1"):
            devices.existing(name)


def test_the_worker_uses_its_device(monkeypatch):
    used = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    for device in ("cpu", "xpu", "xpu:1"):
        use_device(torch.device(device))
    assert used == [torch.device("xpu:1")]


def test_double_precision_is_asked_for(monkeypatch):
    for answer in (False, True):
        properties = SimpleNamespace(has_fp64=answer)
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _, properties=properties: properties)
        assert devices.has_float64(torch.device("xpu:0")) == answer
    assert not devices.has_float64(torch.device("mps")) and devices.has_float64(torch.device("cpu"))


def test_a_precision_that_is_set_by_the_newer_functions_of_torch_is_no_error():
    """torch raises if its older function is asked then."""
    place = torch.backends.mkldnn.matmul
    try:
        place.fp32_precision = "bf16"
        assert not devices.multiplies_in_float32(torch.device("cpu"))
        check_supported(tiny_model())
    finally:
        place.fp32_precision = "none"
    assert devices.multiplies_in_float32(torch.device("cpu"))
