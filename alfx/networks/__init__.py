"""Networks: modules with input specs and state. Read next: :mod:`alfx.networks.network`."""
