"""`trimtab rescore`: scores the token ids of a dump again, from the checkpoint, for `trimtab diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.diagnose import Columns, Framework, parse_columns
from trimtab.cli.output import echo
from trimtab.errors import TrimtabError

SUFFIXES = (".parquet", ".jsonl")
Dump = Annotated[
    list[Path],
    typer.Argument(metavar="DUMP...", help="Files or folders with log-probs and token ids, as for `trimtab diagnose`."),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="PATH", help="The checkpoint that sampled them: a folder, an HF id, or a bundled name."
    ),
]
Out = Annotated[
    Path,
    typer.Option("--out", metavar="FILE", help="Where the rows with the third column go: a .parquet or .jsonl file."),
]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", min=1, help="Score an even choice of N responses. Default: all.")
]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="N", help="Only the responses of this step, whose weights the checkpoint has."),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=0.01, help="The trainer's temperature. Default: that of the data, else 1."),
]


def rescore(
    dump: Dump,
    model: Model,
    out: Out = Path("rescored.parquet"),
    limit: Limit = None,
    step: Step = None,
    temperature: Temperature = None,
    framework: Framework = None,
    columns: Columns = None,
) -> None:
    """Which side is wrong? Score the ids of a dump a third time, with transformers in float32.

    The ids of prompts and responses are taken as they are, so that no template is applied. The result is the same rows
    with a column logp_rescored; `trimtab diagnose` on it says whether sampler, trainer or both differ from the
    checkpoint.
    """
    if out.suffix not in SUFFIXES:
        raise TrimtabError(f"--out {out} is not a table: give a name that ends in {' or '.join(SUFFIXES)}")
    if any(path.resolve() == out.resolve() for path in dump):
        raise TrimtabError(f"--out {out} is the file that is read: give another name")
    from trimtab.preflight.rescoring import encoded
    from trimtab.preflight.rescoring import rescore as run
    from trimtab.runs.atomic import write_output
    from trimtab.trainer.display import progress

    with progress("loading") as update:
        rows = run(
            dump,
            model,
            framework=framework,
            columns=parse_columns(columns or []),
            limit=limit,
            step=step,
            temperature=temperature,
            on_progress=lambda done, whole: update(description="scoring", completed=done, total=whole),
        )
    write_output(out, encoded(rows, out.suffix))
    echo(f"scored    {rows.num_rows} responses with {model} in float32")
    echo(f"wrote     {out}\nnext      trimtab diagnose {out}")
