"""From graph to values: a plan is made of what was asked for, then run."""
