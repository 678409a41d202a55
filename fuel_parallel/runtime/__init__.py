"""From a graph to values: passes, plan, executor and memory."""
