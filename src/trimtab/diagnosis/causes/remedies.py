"""What to do about each cause, by its name."""

from trimtab.diagnosis.records import CAUSES

REMEDIES = {name: kind.fix for name, kind in CAUSES.items()}
