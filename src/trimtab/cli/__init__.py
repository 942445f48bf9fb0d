"""The `trimtab` command. Heavy packages are imported only when a command runs.

`main` is the entry point. A command is in the file of its name, but `sft` and `export` are in `train`, `eval` is in
`evaluate`, and `recipes`, `show` and `explain` are in `describe`. `commands` is the table of what each needs; `output`
has what they share.
"""
