"""The command line: `benign-attention chapters | run | claims | prepare`."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Run the chapters of the book on benign overfitting in attention."""


@cli.command()
def chapters() -> None:
    """List the chapters with their parameters, types, defaults and meaning."""
    from benign_attention.chapters import CHAPTERS, describe

    for chapter in CHAPTERS:
        click.secho(chapter, bold=True)
        for parameter in describe(chapter):
            click.echo(
                f"  {f'{parameter.name}: {parameter.type} = {parameter.default}':<43}  {parameter.help}".rstrip()
            )


@cli.command()
@click.argument("chapter")
@click.option(
    "-p", "pairs", nargs=2, multiple=True, metavar="NAME VALUE", help="Set a parameter; VALUE is read as YAML."
)
@click.option(
    "-f", "file", type=click.Path(path_type=Path), metavar="FILE.yml", help="Set the parameters in a YAML file."
)
@click.option(
    "--scale", default="reader", show_default=True, metavar="smoke|reader|paper", help="The parameters to start from."
)
@click.option("--device", metavar="auto|cpu|cuda|mps", help="Where arrays live (the same as -p device).")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder for the results."
)
def run(chapter: str, pairs: tuple, file: Path | None, scale: str, device: str | None, out: Path) -> None:
    """Execute CHAPTER; leave OUT/CHAPTER.ipynb and OUT/CHAPTER.json.

    Later settings win: the chapter's defaults, then --scale, then -f, then -p and --device.
    """
    from benign_attention import chapters
    from benign_attention.experiments import load
    from benign_attention.records import read_record

    chapters.notebook_path(chapter)
    params_class = load(chapter).Params
    from_file = chapters.read_parameters(file) if file else {}
    from_line = {name: chapters.parse(params_class, name, text) for name, text in pairs}
    if device is not None:
        from_line["device"] = device
    params = chapters.parameters(chapter, scale, from_file, from_line)
    path = chapters.run(chapter, params, out)
    for name, metric in read_record(path).metrics.items():
        click.echo(f"{name:<40} {metric}")
    click.echo(f"wrote {path.with_suffix('.ipynb')} and {path}")


@cli.command()
@click.option("--scale", default="reader", show_default=True, metavar="reader|paper", help="Which records to judge.")
@click.option(
    "--records", type=click.Path(path_type=Path), metavar="DIR", help="Folder of SCALE/CHAPTER.json (book/records)."
)
def claims(scale: str, records: Path | None) -> None:
    """Print every claim with its verdict; exit 1 if a verdict is not the committed one, or a record is missing."""
    from benign_attention import ledger, paths
    from benign_attention.records import SCALE_NAMES

    compared = [name for name in SCALE_NAMES if name != "smoke"]
    if scale not in compared:
        raise click.BadParameter(f"must be one of {', '.join(compared)}, got {scale!r}", param_hint="--scale")
    if records is not None and not records.is_dir():
        raise click.BadParameter(f"must be a folder, got {str(records)!r}", param_hint="--records")
    found = ledger.entries(scale, records or paths.RECORDS)
    for entry in found:
        firmness = {True: "firm", False: "alone", None: ""}[entry.firm]
        click.echo(f"{entry.claim.id:<10} {entry.verdict.outcome:<18} {firmness:<6} {entry.verdict.details[0]}")
    wrong = ledger.problems(found, scale)
    for line in wrong:
        click.echo(line, err=True)
    if wrong:
        raise click.exceptions.Exit(1)


@cli.command()
@click.argument("scale")
def prepare(scale: str) -> None:
    """Lay out the book's sources at SCALE in _build/src-SCALE, for jupyter-book to build."""
    from benign_attention import chapters, paths

    folder = paths.ROOT / "_build" / f"src-{scale}"
    chapters.prepare(scale, folder)
    click.echo(f"wrote {folder}")


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns 0, 2 for a mistake in the input, or 1 for a failed chapter, and says why in one line."""
    from benign_attention.parameters import ParameterError

    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return cli.main(arguments, prog_name="benign-attention", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        return _complain(error.format_message(), 2)
    except click.ClickException as error:
        return _complain(f"Error: {error.format_message()}", 2)
    except ParameterError as error:
        return _complain(f"Error: {error}", 2)
    except click.Abort:
        return _complain("Error: interrupted", 130)
    except OSError as error:
        return _complain(f"Error: {error}", 1)
    except RuntimeError as error:
        from benign_attention.chapters import ChapterError
        from benign_attention.realdata.catalogue import SourceError

        if not isinstance(error, ChapterError | SourceError):
            raise
        return _complain(f"Error: {error}", 1)


def _complain(message: str, status: int) -> int:
    click.echo(message, err=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
