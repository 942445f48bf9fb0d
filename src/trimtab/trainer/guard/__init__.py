"""`[guard]`: a run that sees a collapse returns to an earlier checkpoint and goes on with a lower learning rate.

guard      what it judges, decides and does
history    the steps of a run that were not discarded
"""

from trimtab.trainer.guard.guard import Guard

__all__ = ["Guard"]
