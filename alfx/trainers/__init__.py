"""The outer loops: when to unroll, train, evaluate, summarise, checkpoint. Begin with ``policy_trainer``."""
