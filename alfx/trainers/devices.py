"""Which device a program computes on."""
import re

import torch

from alfx import context, gin_utils


def find_device(name: str) -> torch.device:
    """The device that a user calls ``name``.

    Args:
        name: 'cpu', 'cuda', 'cuda:N' or 'auto'.

    Returns:
        The device, a GPU always with its number.

    Raises:
        ConfError: an unknown name, or there is no such device; the message says which ones there are.
    """
    if not re.fullmatch(r'cpu|cuda(:\d+)?|auto', name):
        raise gin_utils.ConfError(f"--device={name}: expected 'cpu', 'cuda', 'cuda:N' or 'auto'", _what_there_is())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == 'cpu' or (name == 'auto' and not count):
        return torch.device('cpu')
    number = int(name.partition(':')[2] or 0)
    if number >= count:
        raise gin_utils.ConfError(f'--device={name}: there is no such GPU', _what_there_is())
    return torch.device('cuda', number)


def use_device(device: torch.device) -> None:
    """Let this process compute on ``device``: networks, training data, and what is made on 'cuda' without a number."""
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    context.set_default_device(device)


def _what_there_is() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        reason = 'this torch is built without CUDA' if torch.version.cuda is None else 'torch finds no GPU'
        return f'{reason}: use --device=cpu'
    names = ', '.join(f'cuda:{i} ({torch.cuda.get_device_name(i)})' for i in range(count))
    return f'there are cpu and {names}'
