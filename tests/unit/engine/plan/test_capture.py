"""Updates as CUDA graphs; what needs a GPU is in tests/contract/test_gpu.py."""
import logging

import torch

from alfx.engine import cuda_graph


class Doubling:
    is_current = True

    def __call__(self, leaves):
        return [2 * x for x in leaves]


def test_on_the_cpu_an_update_stays_what_it_is():
    update = Doubling()
    assert cuda_graph.captured(update, [], [torch.ones(2)], 'Doubling') is update


def test_an_update_that_cannot_be_captured_is_called_as_it_is_and_the_log_names_it(monkeypatch, caplog):
    def refuse(*args):
        raise RuntimeError('operation not permitted when capturing\nlong text')

    monkeypatch.setattr(cuda_graph, '_is_on_gpu', lambda leaves: True)
    monkeypatch.setattr(cuda_graph, 'CudaGraph', refuse)
    update = Doubling()
    with caplog.at_level(logging.WARNING, 'alfx'):
        assert cuda_graph.captured(update, [], [torch.ones(2)], 'Doubling') is update
    assert 'the update of Doubling cannot be captured as a CUDA graph' in caplog.text
    assert 'operation not permitted when capturing' in caplog.text and 'long text' not in caplog.text
