"""The networks of MONet under the contract of network_contract.py."""
import torch
from network_contract import NetworkContract

from alfx.algorithms.monet_algorithm import MoNetUNet
from alfx.networks.encoding_networks import SpatialBroadcastDecodingNetwork
from alfx.tensor_specs import TensorSpec


class TestMoNetUNet(NetworkContract):

    def network(self):
        return MoNetUNet(TensorSpec((2, 8, 8)), (3, 4), (5, ), 2)


class TestSpatialBroadcastDecodingNetwork(NetworkContract):

    def network(self):
        return SpatialBroadcastDecodingNetwork(3, 5, ((4, 3, 1), (2, 1, 1)), output_width=4, fc_layer_params=(6, ),
                                               activation=torch.tanh)
