"""The `trimtab` command. Heavy packages are imported only when a command runs.

`main` is the entry point. Each command is in the file with its name, except: `sft` and `export` are in `train`, `eval`
is in `evaluate`, `rescore` is in `diagnose`, and `recipes`, `show` and `explain` are in `describe`. `starting` lists
what each command needs; `output` has the code that commands share.
"""
