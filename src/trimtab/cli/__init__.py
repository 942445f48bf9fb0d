"""The `trimtab` command. Heavy packages are imported only when a command runs.

`main` is the entry point. A command is in the file of its name, but `sft` and `export` are in `train`, `eval` is in
`evaluate`, `rescore` is in `diagnose`, and `recipes`, `show` and `explain` are in `describe`. `starting` has the table
of what each needs, `output` what they share.
"""
