"""Selection of the device of a program."""
import re

import torch

from alfx import context, gin_utils


def find_device(name: str | torch.device) -> torch.device:
    """Return the device called ``name``.

    Args:
        name: 'cpu', 'cuda', 'cuda:N' or 'auto', or a device.

    Returns:
        The device; a GPU always has a number.

    Raises:
        ConfError: the name is unknown or the device does not exist; the message lists the available devices.
    """
    name = str(name)
    if not re.fullmatch(r'cpu|cuda(:\d+)?|auto', name):
        raise gin_utils.ConfError(f"device={name}: expected 'cpu', 'cuda', 'cuda:N' or 'auto'", _available_devices())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == 'cpu' or (name == 'auto' and not count):
        return torch.device('cpu')
    number = int(name.partition(':')[2] or 0)
    if number >= count:
        raise gin_utils.ConfError(f'device={name}: this GPU does not exist', _available_devices())
    return torch.device('cuda', number)


def use_device(device: torch.device) -> None:
    """Make ``device`` the default device of this process, also for tensors created on 'cuda' without a number."""
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    context.set_default_device(device)


def _available_devices() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        reason = 'this torch is built without CUDA' if torch.version.cuda is None else 'torch finds no GPU'
        return f'{reason}: use device=cpu'
    names = ', '.join(f'cuda:{i} ({torch.cuda.get_device_name(i)})' for i in range(count))
    return f'available devices: cpu, {names}'


def unused_gpu() -> str:
    """Return the name of the first GPU if networks compute on the CPU although there is a GPU, otherwise ''."""
    is_unused = context.get_default_device().type == 'cpu' and torch.cuda.is_available()
    return torch.cuda.get_device_name(0) if is_unused else ''
