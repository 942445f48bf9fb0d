"""Says whether a loss function is a named objective, by probes that are made for one property each.

The path of a loss, a file for each step:

    isolated        loads the function of a file and runs the check, in a process with limits
    signatures      calls the function with a batch, by the names of its parameters (signatures.toml)
    probes          makes the batches, and computes gradients (`Loss`)
    readings        reads the properties of a loss from gradients (`Readings`)
    bends           finds the bounds of a weight
    differences     compares the readings of a loss and an objective (`Comparison`), in sentences of differences.toml
    exponents       names the cause if the ratios differ, in a table of causes; bounds does so for clips and masks
    identification  if no objective is given: finds the nearest one and its parameters (`identify`)
    check           returns the answer as text and values (`check`); loss_page draws it
"""
