"""The injected gradient, of the hidden state and of the loss's own parameters, against autograd; in chunks of rows."""

from __future__ import annotations

import pytest
import torch

from nemo_oprd.distillation import gradient_injection
from nemo_oprd.distillation.gradient_injection import inject_gradient


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("keep_rows", [False, True])
def test_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int, keep_rows: bool) -> None:
    monkeypatch.setattr(gradient_injection, "ROW_CHUNK", chunk)
    draw = torch.Generator().manual_seed(0)
    rows, weight = torch.tensor([9, 0, 4, 7, 2, 5, 11, 3]), torch.rand(8, generator=draw)
    target = torch.randn(8, 3, generator=draw)
    leaves = [torch.randn(shape, generator=draw) for shape in ((12, 1, 4), (3, 4), (3,))]

    def loss(rows_ND: torch.Tensor, part: slice) -> torch.Tensor:
        distance = (rows_ND @ parameters[0].T + parameters[1] - target[part]).square().sum(-1)
        return (distance * weight[part]).sum()

    hidden = leaves[0].clone().requires_grad_()
    parameters = [torch.nn.Parameter(value.clone()) for value in leaves[1:]]
    for _ in range(2):  # two microbatches
        out = inject_gradient(hidden, rows, loss, keep_rows=keep_rows, parameters=parameters)
        assert torch.equal(out, hidden)
        out.sin().sum().backward()
    got = [hidden.grad, *(parameter.grad for parameter in parameters)]

    state = leaves[0].double().requires_grad_()
    parameters = [torch.nn.Parameter(value.double()) for value in leaves[1:]]
    weight, target = weight.double(), target.double()
    total = 2 * (loss(state.flatten(0, 1)[rows], slice(None)) + state.sin().sum())
    expected = torch.autograd.grad(total, [state, *parameters])
    for ours, theirs in zip(got, expected, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_a_gradient_in_another_memory_order() -> None:
    """A batch [S, B, D] may get its gradient as a transposed [B, S, D]; the rows' gradients are added to it, too."""
    hidden = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = inject_gradient(hidden, torch.tensor([1, 4]), lambda rows_ND, part: rows_ND.sum(), keep_rows=False)
    out.backward(torch.zeros(2, 3, 4).transpose(0, 1))
    assert hidden.grad is not None
    assert hidden.grad.flatten(0, 1).sum(-1).tolist() == [0, 4, 0, 0, 4, 0]
