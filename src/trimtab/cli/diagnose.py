"""`trimtab diagnose`: measures the mismatch between trainer and sampler and recommends a correction.

`trimtab rescore` writes the same files with a third log-prob, scored again from the checkpoint.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.output import Json, check_page, echo, print_json, print_result
from trimtab.errors import TrimtabError

PAGE = "diagnose.html"
Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE...",
        help="Files of log-probs (parquet, JSON, CSV, gzipped or not, ...), folders of them, or run directories.",
    ),
]
Framework = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="trimtab, verl, trl, miles, slime, prime-rl, nemo-rl or open-instruct. Default: found out."
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OURS=THEIRS",
        help="A column of the files under the name used here, as logp_behavior=rollout_logprobs; repeat it, or "
        "separate several by commas. `OURS=` leaves a column of the files out.",
    ),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="For the texts of token ids: a tokenizer.json, the folder of a model or run that holds one, or a model in "
        "the local Hugging Face cache. Default: that of the run, if the files are of one.",
    ),
]
Out = Annotated[
    Path | None, typer.Option(metavar="FILE.html", help=f"Where the page goes. Default: {PAGE} in the current folder.")
]
AgainstFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Compare with these files or folders, of any framework: how much larger the mismatch is, where, and "
        "whether that is more than chance. Repeat it for several. --framework and --columns are those of both.",
    ),
]
Markdown = Annotated[
    bool, typer.Option("--markdown", help="Print Markdown for an issue instead: a few sentences and a table.")
]
Redact = Annotated[
    bool,
    typer.Option("--redact", help="In every output, leave out texts, file names and cells; token ids become random."),
]
Sampler = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        help="What the sampler computes in, if you know it: bfloat16, fp8, int8, int4, awq, fp8-cache, ...",
    ),
]
Lag = Annotated[
    int | None, typer.Option(metavar="UPDATES", help="By how many updates all of the sampler's weights are old, if so.")
]
Tested = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=yes|no",
        help="Whether the test of a candidate found it, as model-config=no; repeat it for several.",
    ),
]
Scalars = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Instead of log-probs, the scalars that a run logged, in the names of any framework: JSON, CSV (as W&B "
        "exports it), TensorBoard events, a trainer_state.json of transformers, or a folder with one of these.",
    ),
]


SUFFIXES = (".parquet", ".jsonl")
Dump = Annotated[
    list[Path],
    typer.Argument(metavar="DUMP...", help="Files or folders with log-probs and token ids, as for `trimtab diagnose`."),
]
Model = Annotated[
    str, typer.Option(metavar="PATH", help="The checkpoint that sampled them: a folder, an HF id, or a bundled name.")
]
Table = Annotated[
    Path, typer.Option(metavar="FILE", help="Where the rows with the third column go: a .parquet or .jsonl file.")
]
Limit = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Score an even choice of N responses. Default: all.")
]
Step = Annotated[
    int | None, typer.Option(metavar="N", help="Only the responses of this step, whose weights the checkpoint has.")
]
Temperature = Annotated[
    float | None, typer.Option(min=0.01, help="The trainer's temperature. Default: that of the data, else 1.")
]


def diagnose(
    files: Files = None,
    framework: Framework = None,
    columns: Columns = None,
    tokenizer: TokenizerName = None,
    out: Out = None,
    as_json: Json = False,
    against: AgainstFiles = None,
    markdown: Markdown = False,
    redact: Redact = False,
    sampler: Sampler = "",
    lag: Lag = None,
    tested: Tested = None,
    scalars: Scalars = None,
) -> None:
    """Compare trainer and sampler: how large the mismatch is, where it sits, what causes it, what to do."""
    says = sampler or tested or lag is not None
    if scalars is not None:
        if any((files, framework, columns, tokenizer, out, against, markdown, redact, says)):
            raise TrimtabError("--scalars PATH takes no FILE and no other option than --json: leave them out")
        return _scalars(scalars, as_json=as_json)
    names = parse_columns(columns or [])
    if not files:
        raise TrimtabError("no FILE given: name trajectory files, the directory of a run, or --scalars PATH")
    if redact and tokenizer is not None:
        raise TrimtabError("--redact shows no texts of tokens: leave out --tokenizer")
    if markdown and as_json:
        raise TrimtabError("--markdown and --json are two forms of one output: leave one out")
    if against and says:
        raise TrimtabError("--sampler, --lag and --tested are about one run: leave out --against")
    options: dict[str, Any] = {"framework": framework, "columns": names, "tokenizer": tokenizer}
    if says:
        from trimtab.diagnosis.records import Stated

        options["stated"] = Stated(sampler, lag, parse_tested(tested or []))
    form = "json" if as_json else "markdown" if markdown else "terminal"
    return _answer(files, against or [], options, page_path(out), form, redact=redact)


def _scalars(path: Path, *, as_json: bool) -> None:
    from trimtab.monitor.scalar_files import find_scalars, read_scalars
    from trimtab.monitor.scalars import as_dict, judge, terminal_lines

    read = find_scalars(path)
    report = judge(read_scalars(read))
    print_result(as_json, as_dict(report, read), "\n".join(terminal_lines(report, read)))


def _answer(
    files: list[Path], against: list[Path], options: Mapping[str, Any], target: Path, form: str, *, redact: bool
) -> None:
    """Diagnoses the files, writes the page, and prints the answer; `form` is "terminal", "json" or "markdown"."""
    from trimtab.diagnosis.output.as_json import against_dict, as_dict
    from trimtab.diagnosis.output.as_text import markdown, terminal_text
    from trimtab.diagnosis.output.html_page import write_page
    from trimtab.diagnosis.pipeline import compare
    from trimtab.diagnosis.pipeline import diagnose as run
    from trimtab.diagnosis.redaction import Redaction
    from trimtab.trainer.display import progress, terminal_width

    redaction, comparison = Redaction() if redact else None, None
    with progress("starting") as update:

        def on_progress(what: str, tokens: int) -> None:
            update(description=f"{what}: {tokens:,} tokens")

        if against:
            diagnosis, comparison = compare(files, against, on_progress=on_progress, redaction=redaction, **options)
        else:
            diagnosis = run(files, on_progress=on_progress, redaction=redaction, **options)
        on_progress("drawing the page", diagnosis.measured.origin.tokens)
        command = "" if redact else shlex.join(["trimtab", *sys.argv[1:]])
        with nullcontext() if redaction is None else redaction.hide_errors():
            write_page(diagnosis, target, command, comparison)
    shown = "written; --redact leaves its name out" if redact else str(target)
    if form == "json":
        against_json = {} if comparison is None else {"against": against_dict(comparison)}
        print_json({**as_dict(diagnosis), **against_json, "report": None if redact else target})
        return
    as_markdown, width = form == "markdown", terminal_width()
    echo(
        markdown(diagnosis, comparison, command) if as_markdown else terminal_text(diagnosis, shown, width, comparison)
    )


def parse_columns(given: Sequence[str]) -> dict[str, str]:
    """Parses comma-separated `OURS=THEIRS` pairs; an empty THEIRS means that the column is ignored.

    Raises `TrimtabError` for a malformed pair or a column that is named twice.
    """
    columns: dict[str, str] = {}
    for pair in (part.strip() for word in given for part in word.split(",")):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        if not (ours and equals):  # only the name after the = may be empty
            raise TrimtabError(f"--columns {pair!r} is not a pair: write OURS=THEIRS, as logp_behavior=rollout_lp")
        if ours in columns:
            raise TrimtabError(f"--columns names {ours!r} twice: leave one of the two out")
        columns[ours] = theirs
    return columns


def parse_tested(given: Sequence[str]) -> dict[str, bool]:
    """Parses `NAME=yes` and `NAME=no`. Raises `TrimtabError` for other words and unknown candidates."""
    from trimtab.diagnosis.causes.candidates import KINDS

    names, tested = [kind.name for kind in KINDS], {}
    for word in given:
        name, _, result = word.partition("=")
        if name not in names or result not in ("yes", "no"):
            raise TrimtabError(f"--tested {word!r}: write NAME=yes or NAME=no, with a name of {', '.join(names)}")
        if tested.setdefault(name, result == "yes") != (result == "yes"):
            raise TrimtabError(f"--tested says yes and no of {name}: leave one out")
    return tested


def page_path(out: Path | None) -> Path:
    """Returns the path of the page: `diagnose.html` in a folder, or the file `out`, which `check_page` checks."""
    target = Path(PAGE) if out is None else out / PAGE if out.is_dir() else out
    check_page(target, "--out", ", or a folder that exists")
    return target


def rescore(
    dump: Dump,
    model: Model,
    out: Table = Path("rescored.parquet"),
    limit: Limit = None,
    step: Step = None,
    temperature: Temperature = None,
    framework: Framework = None,
    columns: Columns = None,
) -> None:
    """Which side is wrong? Score the ids of a dump a third time, with transformers in float32.

    The ids of prompts and responses are taken as they are; no template is applied. The result is the same rows with a
    column logp_rescored; `trimtab diagnose` on it says whether sampler, trainer or both differ from the checkpoint.
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
