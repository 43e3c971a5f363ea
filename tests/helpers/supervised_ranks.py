"""Small supervised runs of all kinds; as a program, a run that trains as one of several ranks.

    python tests/helpers/supervised_ranks.py OUT

Writes the parameters of each kind after :data:`EPOCHS` epochs to OUT.RANK.
"""
import sys

import torch

from alfx.algorithms.functional_particle_vi_algorithm import FuncParVIAlgorithm
from alfx.algorithms.hypernetwork_algorithm import HyperNetwork
from alfx.engine.plan import backends
from alfx.engine.remote import data_parallel
from alfx.optimizers import SGD, Adam
from alfx.utils.tensor_loader import TensorLoader

EPOCHS = 3
KINDS = {
    'deep ensemble': (FuncParVIAlgorithm, dict(par_vi=None)),
    'svgd': (FuncParVIAlgorithm, dict(par_vi='svgd', prior_stddev=1.0)),
    'gfsf': (FuncParVIAlgorithm, dict(par_vi='gfsf')),
    'functions': (FuncParVIAlgorithm, dict(par_vi='svgd', function_vi=True)),
    'functions with noise': (FuncParVIAlgorithm, dict(par_vi='gfsf', function_vi=True,
                                                      function_extra_bs_sampler='normal', function_extra_bs_ratio=0.5)),
    'hypernetwork': (HyperNetwork, dict(par_vi='svgd', prior_stddev=1.0)),
    'hypernetwork of halves': (HyperNetwork, dict(par_vi='svgd2', function_vi=True)),
    'hypernetwork of functions': (HyperNetwork, dict(par_vi='gfsf', function_vi=True)),
    'gpvi': (HyperNetwork, dict(functional_gradient=True, direct_jac_inverse=True, block_inverse_mvp=True, noise_dim=4,
                                num_particles=4)),
}
OWN_UPDATES = {  # of a critic, and of a network of inverse products
    'minmax': (FuncParVIAlgorithm, dict(par_vi='minmax', critic_use_bn=False, critic_optimizer=Adam(lr=1e-3))),
    'gpvi by a network': (HyperNetwork, dict(functional_gradient=True, noise_dim=4, num_particles=4,
                                             inverse_mvp_optimizer=Adam(lr=1e-3))),
}


def data():
    """Return three blobs; the last batch is smaller, with an odd number of rows."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.arange(47) % 3
    centers = torch.tensor([[0.0, 2.0], [2.0, 0.0], [-2.0, -2.0]])
    loader = TensorLoader(centers[targets] + 0.3 * torch.randn(47, 2, generator=generator), targets, 20)
    return loader, loader


def make(kind, **more):
    torch.manual_seed(0)
    cls, arguments = {**KINDS, **OWN_UPDATES}[kind]
    size = dict(hidden_layers=(8, )) if cls is HyperNetwork else {}
    algorithm = cls(**{**dict(data_creator=data, num_train_classes=3, fc_layer_params=(4, ), num_particles=6,
                              entropy_regularization=None, optimizer=SGD(lr=1e-2)), **size, **arguments, **more})
    algorithm.set_path('')
    algorithm.finalize()
    torch.manual_seed(1)
    return algorithm


def parameters(algorithm):
    return {name: p.detach().clone() for name, p in algorithm.named_parameters()}


def trained(kind):
    """Return the parameters after :data:`EPOCHS` epochs."""
    algorithm = make(kind)
    for _ in range(EPOCHS):
        algorithm.train_iter()
    return parameters(algorithm)


def main(out):
    torch.set_num_threads(1)
    backends.WARM_UP = backends.WarmUp(1, 1)  # two of three epochs are replayed
    ranks = data_parallel.join(torch.device('cpu'))
    found = {}
    for kind in {**KINDS, **OWN_UPDATES}:
        algorithm = make(kind)
        algorithm.activate_ddp(ranks.rank)
        torch.manual_seed(1 + ranks.rank)  # other ranks draw the same numbers as rank 0
        for _ in range(EPOCHS):
            algorithm.train_iter()
        plan = algorithm.updater.plan(algorithm._batch_losses)
        assert not algorithm.capabilities.traceable_update or plan.replayed.num_graphs == 2, kind
        found[kind] = parameters(algorithm)
    torch.save(found, f'{out}.{ranks.rank}')
    data_parallel.leave()


if __name__ == '__main__':
    main(sys.argv[1])
