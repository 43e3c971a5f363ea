"""SavedCount."""
import copy
import io

import torch
from torch import nn

from alfx.utils.saved_count import SavedCount


class _Part(nn.Module):

    def __init__(self):
        super().__init__()
        self.register_buffer('other', torch.zeros(2))
        self.count = SavedCount(self, '_count')


def _whole(count=0):
    module = nn.ModuleDict({'part': _Part()})
    module['part'].count.add(count)
    return module


def test_a_module_state_holds_the_count_at_the_time_of_asking():
    module = _whole(2)
    assert module['part'].count.add() == 3
    state = module.state_dict()
    assert torch.equal(state['part._count'], torch.tensor(3)) and state['part._count'].dtype == torch.int64
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)['part._count'] == 3


def test_a_loaded_count_continues():
    module, other = _whole(5), _whole(2)
    other.load_state_dict(module.state_dict())
    assert other['part'].count.value == 5
    assert other['part'].count.add(2) == 7 and module['part'].count.value == 5
    assert other.state_dict()['part._count'] == 7


def test_a_state_without_the_count_leaves_it_unchanged():
    module = _whole(5)
    module.load_state_dict({'part.other': torch.ones(2)}, strict=False)
    assert module['part'].count.value == 5


def test_a_copy_has_its_own_count():
    module = _whole(5)
    other = copy.deepcopy(module)
    other['part'].count.add()
    assert (other.state_dict()['part._count'], module.state_dict()['part._count']) == (6, 5)
    module.load_state_dict(other.state_dict())
    other['part'].count.add()
    assert (other['part'].count.value, module['part'].count.value) == (7, 6)


def test_a_module_moved_to_another_kind_of_numbers_keeps_its_count():
    module = _whole(5).double()
    assert module.state_dict()['part._count'] == 5
