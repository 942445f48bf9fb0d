"""The laboratory: experiments over objectives, regimes and seeds.

`regimes` names the kinds of mismatch, `experiment` plans every method x regime x seed, or what the `[compare]` section
of a recipe asks for, `tuning` chooses settings before a comparison. `runner` trains a plan in processes, each of them
`worker`.
"""
