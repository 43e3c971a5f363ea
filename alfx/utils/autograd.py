"""Work that autograd has no part in."""
import torch

# As ``torch.no_grad``, but operations do not ask autograd in the first place, which takes them as long as work on a
# small tensor. What is changed in place is counted as changed all the same. For code that only calls operations.
below_autograd = torch._C._AutoDispatchBelowAutograd
