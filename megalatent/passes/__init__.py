"""Passes on a pipeline ring: plan, validate, simulate, execute.

Importing this package imports none of its modules: the planner must start without torch.
"""
