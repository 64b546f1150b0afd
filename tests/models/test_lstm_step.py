"""One step of an LSTM, as torch's own cell takes it; on a GPU by one kernel."""

import pytest
import torch
from torch import Tensor, nn

from coterie.models.networks import lstm_step

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_and_its_way_back_are_those_of_torchs_cell(device: str) -> None:
    torch.manual_seed(0)
    cell = nn.LSTMCell(5, 6)
    inputs, state, memory = torch.randn(4, 5), torch.randn(4, 6), torch.randn(4, 6)
    drive = (inputs @ cell.weight_ih.T + cell.bias_ih).detach().requires_grad_()
    recurrent = (state @ cell.weight_hh.T + cell.bias_hh).detach().requires_grad_()
    memory.requires_grad_()
    expected = cell(inputs, (state, memory))
    # What reaches a step comes in slices of a longer sequence.
    sliced = torch.stack([drive, drive], dim=1).to(device).unbind(1)[0]
    found = lstm_step(sliced, recurrent.to(device), memory.to(device))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-6)

    def back(parts: tuple[Tensor, Tensor], of: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad((parts[0] * 2).sum() + parts[1].square().sum().to(parts[0].device), of)

    mine, theirs = back(found, [drive, recurrent, memory]), back(expected, [memory])
    torch.testing.assert_close(mine[2], theirs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine[0], mine[1], rtol=1e-5, atol=1e-6)
    by_bias = torch.autograd.grad((cell(inputs, (state, memory))[0] * 2).sum(), cell.bias_hh)[0]
    alone = torch.autograd.grad((lstm_step(drive, recurrent, memory)[0] * 2).sum(), recurrent)[0]
    torch.testing.assert_close(alone.sum(dim=0), by_bias, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_gpus_kernel_is_the_processors_arithmetic_and_keeps_records_apart() -> None:
    torch.manual_seed(0)
    drive, recurrent, memory = torch.randn(7, 24), torch.randn(7, 24), torch.randn(7, 6)
    there = [part.cuda().requires_grad_() for part in (drive, recurrent, memory)]
    here = [part.requires_grad_() for part in (drive, recurrent, memory)]
    gradients = []
    for own in (here, there):
        state, cell = lstm_step(*own)
        gradients.append(torch.autograd.grad(state.sum() + (3 * cell).sum(), own))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(theirs.cpu(), mine, rtol=1e-5, atol=1e-6)
    spoilt = drive.detach().clone()
    spoilt[3] = torch.nan
    clean, dirty = (lstm_step(part.cuda(), there[1], there[2])[0] for part in (drive, spoilt))
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(clean[others], dirty[others])
    assert bool(dirty[3].isnan().all())
