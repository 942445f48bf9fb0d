"""The laboratory: experiments over objectives, regimes and seeds.

`regimes` defines the kinds of mismatch. `experiment` plans the runs: every method x regime x seed, or the runs of the
`[compare]` section of a recipe. `tuning` chooses settings before a comparison. `runner` trains the planned runs in
worker processes (`worker`).
"""
