"""What a run will take: arithmetic over sizes of models, figures of devices and stated assumptions. No torch here."""
