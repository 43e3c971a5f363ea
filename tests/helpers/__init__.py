"""Agents, environments and programs that several test modules use."""
