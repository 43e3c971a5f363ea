"""Shared parts of particle, generator and hypernetwork algorithms; see the modules."""
