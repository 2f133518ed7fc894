"""The stand-in itself: it refuses what torch refuses on CUDA, and notes every wait."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ssd import devices
from hf_ssd.devices import from_host

from ..helpers.stand_in_gpu import OnGPU, StandInGPU

MIXED = {
    "add": lambda gpu, cpu: gpu + cpu,
    "multiply by a number": lambda gpu, cpu: gpu * cpu.sum(),
    "join": lambda gpu, cpu: torch.cat([gpu, cpu]),
    "choose": lambda gpu, cpu: torch.where(gpu > 0, gpu, cpu),
    "gather": lambda gpu, cpu: gpu.gather(0, cpu.long()),
    "scatter": lambda gpu, cpu: gpu.scatter(0, gpu.long(), cpu),
    "look up": lambda gpu, cpu: torch.nn.functional.embedding(cpu.long(), gpu.view(-1, 1)),
    "in place": lambda gpu, cpu: gpu.add_(cpu),
    "move": lambda gpu, cpu: gpu + cpu.to(gpu.device),
}


def is_legal(operation, mode) -> bool:
    with mode:
        gpu, cpu = torch.ones(3, device="cuda"), torch.ones(3)
        try:
            operation(gpu, cpu)
        except RuntimeError as error:
            assert "device" in str(error) and "linked" not in str(error)
            return False
    return True


@pytest.mark.parametrize("name", MIXED)
def test_it_refuses_what_torch_refuses(name):
    """torch's judgement is that of its tensors without numbers."""
    assert is_legal(MIXED[name], StandInGPU()) == is_legal(MIXED[name], FakeTensorMode())


WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "__bool__": lambda x: bool(x.any()),
    "__int__": lambda x: int(x[0]),
    "__float__": lambda x: float(x[0]),
    "__index__": lambda x: range(x[1]),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "multinomial": lambda x: torch.multinomial(x.float(), 1),
    "boolean index": lambda x: x[x > 0],
    "index as a number": lambda x: x[x[1] :],
    "index on the host": lambda x: x[[0, 1]],
    "copy to host": lambda x: x.cpu().numpy(),
    "copy from host": lambda x: x.copy_(torch.ones(3)),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
    "synchronize": lambda x: torch.cuda.current_stream(x.device).synchronize(),
}


@pytest.mark.parametrize("what", WAITS)
def test_every_kind_of_wait_is_noted(what):
    gpu = StandInGPU()
    with gpu:
        x = torch.arange(3, device="cuda")
        WAITS[what](x)
    assert set(gpu.waits) == {what}


def test_what_does_not_wait_is_not_noted():
    gpu = StandInGPU()
    with gpu:
        x = torch.zeros(3, device="cuda")
        x[1:2] = 5
        x[from_host([0, 2], x.device)] += x.new_ones(2)
        view = x[None]
        view.narrow(1, 0, 1).fill_(7)
        assert all(isinstance(one, OnGPU) for one in (x, view, *x.topk(2), x.softmax(0)))
    assert not gpu.waits
    assert x.as_subclass(torch.Tensor).tolist() == [7, 5, 1]


def test_a_copy_that_is_read_before_it_has_arrived_holds_nothing():
    """The mutant: tokens of branches that are read at once."""
    with StandInGPU() as gpu:
        copy = devices.HostCopy(torch.full((2, 3), 7, device="cuda"), torch.tensor([[1], [2]]).to("cuda"))
        waits = gpu.waits.total()
        assert copy.lists() == [[[0] * 3] * 2, [[0], [0]]] and not copy.has_arrived() and copy.has_arrived()
        assert copy.lists() == [[[7] * 3] * 2, [[1], [2]]] and gpu.waits.total() == waits
    assert devices.HostCopy(torch.tensor([3])).lists() == [[3]]
