"""What networks put out, among the summaries (``TrainerConfig.summarize_output``)."""
from typing import Any

from torch import nn

from alfx import context, nest, summary
from alfx.networks.network import Network
from alfx.summary.summary_utils import add_mean_hist_summary


def summarize_outputs(algorithm: nn.Module) -> None:
    """From now on every network in ``algorithm`` writes its output where summaries are written.

    What it writes is ``network_output/<run mode>/<path of the network>``: histogram and mean of each tensor, or each
    parameter of a distribution, of the first call at a summary step in each run mode ('rollout', 'replay', ...).
    Unrolls that are played from a record call no network, and write nothing.
    """
    for path, module in algorithm.named_modules():
        if isinstance(module, Network):
            module.register_forward_hook(_Writer(path))


class _Writer:
    """A hook that writes the output of the network at ``path``."""

    def __init__(self, path: str):
        self._path = path
        self._written: dict[str, tuple[int, int]] = {}  # run mode -> iteration or update, step of summaries

    def __call__(self, network: nn.Module, inputs: Any, result: tuple[Any, Any]) -> None:
        if not (summary.should_record_summaries() and summary.should_summarize_output()):
            return
        mode, step = context.exe_mode_name(), (context.get_global_counter(), context.get_summary_step())
        if self._written.get(mode) == step:
            return
        self._written[mode] = step
        name = f'network_output/{mode}/{self._path}'
        for path, leaf in nest.flatten_with_path(result[0]):
            add_mean_hist_summary(f'{name}/{path}' if path else name, leaf)
