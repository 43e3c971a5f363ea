"""Operations without autograd."""
import pytest
import torch

from alfx.optimizers.autograd import without_autograd


def test_no_graph_is_built_and_parameters_may_change_in_place():
    parameter = torch.nn.Parameter(torch.ones(2))
    with without_autograd([parameter]):
        doubled = 2 * parameter
        parameter.add_(1.0)
    assert not doubled.requires_grad and doubled.tolist() == [2.0, 2.0] and parameter.tolist() == [2.0, 2.0]
    assert (2 * parameter).requires_grad


def test_a_gradient_with_modified_inputs_raises():
    parameter = torch.nn.Parameter(torch.ones(2))
    squares = (parameter * parameter).sum()
    with without_autograd([parameter]):
        torch._foreach_add_([parameter], [torch.ones(2)])
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        squares.backward()


def test_elsewhere_than_on_the_cpu_it_is_no_grad():
    assert isinstance(without_autograd([torch.ones(1), torch.ones(1, device='meta')]), torch.no_grad)
