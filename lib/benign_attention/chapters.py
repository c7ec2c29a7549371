"""Chapters as programs: strict parameters in, an executed notebook and a record out."""

from __future__ import annotations

import difflib
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from benign_attention import leftovers, paths
from benign_attention.experiments import CHAPTERS, load
from benign_attention.parameters import ChapterParams, ParameterError, allowed
from benign_attention.realdata.catalogue import SourceError
from benign_attention.records import MIME, require_writable, scale_values, write_json

KERNEL = "python3"
KERNEL_OPTIONS = ["--IPKernelApp.log_level=CRITICAL"]
RUNNING = ".running-"
ATTEMPTS = 3
STARTING_SECONDS = 60.0
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # dates like 2000-13-45, numbers of 5000 digits, deep nesting


class ChapterError(RuntimeError):
    """A chapter could not be executed; the message is one line and says where to look."""


@dataclass(frozen=True)
class ParameterHelp:
    """One parameter of a chapter, as `benign-attention chapters` shows it."""

    name: str
    type: str
    default: str
    help: str


def notebook_path(chapter: str) -> Path:
    """The notebook of `chapter`.

    Raises
    ------
    ParameterError
        The book has no such chapter; the line suggests the nearest name.
    """
    if chapter not in CHAPTERS:
        raise ParameterError(
            f"chapter must be one of {', '.join(CHAPTERS)}, got {chapter!r}{_nearest(chapter, CHAPTERS)}"
        )
    return paths.BOOK / f"{chapter}.ipynb"


def describe(chapter: str) -> list[ParameterHelp]:
    """The parameters of a chapter in the order of its parameters cell."""
    from papermill import inspect_notebook

    fields = load(chapter).Params.model_fields
    return [
        ParameterHelp(
            name, found["inferred_type_name"], found["default"], found["help"] or fields[name].description or ""
        )
        for name, found in inspect_notebook(notebook_path(chapter)).items()
    ]


def coerce(value: Any, annotation: Any) -> Any:
    """`value` as the annotated type where YAML's own type is merely narrower, else unchanged.

    A number may be written as text (YAML reads `1e-3` as text), a whole number as `1e4`.
    Nothing else is converted: `Params` refuses what does not fit.
    """
    if get_origin(annotation) is list and isinstance(value, list):
        return [coerce(item, get_args(annotation)[0]) for item in value]
    if get_args(annotation) and get_origin(annotation) not in (list, None):
        annotation = get_args(annotation)[0]
    if annotation not in (int, float) or isinstance(value, bool):
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, float) and annotation is int and value.is_integer():
        return int(value)
    return float(value) if isinstance(value, int) and annotation is float else value


def parse(params_class: type[ChapterParams], name: str, text: str) -> Any:
    """The value that `text` stands for on the command line: YAML, except that text stays text."""
    field = known_field(params_class, name)
    if field.annotation not in (int, float, bool) and get_origin(field.annotation) is not list:
        return text
    try:
        return yaml.safe_load(text)
    except NOT_YAML:
        raise ParameterError(f"{name} must be {allowed(field)}, got {text!r}") from None


def known_field(params_class: type[ChapterParams], name: str):
    """The field of that name, or a `ParameterError` that suggests the nearest name."""
    fields = params_class.model_fields
    if name not in fields:
        names = ", ".join(parameter_names(params_class))
        raise ParameterError(
            f"{name or repr(name)} is not a parameter{_nearest(str(name), fields)}; the parameters are {names}"
        )
    return fields[name]


def parameter_names(params_class: type[ChapterParams]) -> list[str]:
    """The names in the order of a parameters cell: a chapter's own, then those that every chapter has."""
    own = [name for name in params_class.model_fields if name not in ChapterParams.model_fields]
    return [*own, *ChapterParams.model_fields]


def read_parameters(file: Path) -> dict:
    """The parameters in a YAML file, one `name: value` a line.

    Raises
    ------
    ParameterError
        The file cannot be read, or is not a mapping from names to values.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ParameterError(f"parameters file {str(file)!r} cannot be read ({_reason(error)})") from None
    try:
        values = yaml.safe_load(text)
    except NOT_YAML as error:
        raise ParameterError(f"parameters file {str(file)!r} is not YAML ({_one_line(str(error))})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ParameterError(f"parameters file {str(file)!r} must map names to values, got {type(values).__name__}")
    return values


def parameters(chapter: str, scale: str = "reader", *changes: Mapping[str, Any]) -> ChapterParams:
    """The checked parameters of a chapter: its defaults, then the scale's, then each of `changes` in turn.

    Raises
    ------
    ParameterError
        An unknown chapter, scale or name, or a value of a wrong type or out of bounds.
    """
    notebook_path(chapter)
    params_class = load(chapter).Params
    values: dict[str, Any] = {}
    for layer in (scale_values(chapter, scale), *changes):
        for name, value in layer.items():
            values[name] = coerce(value, known_field(params_class, name).annotation)
    return params_class(**values)


def run(chapter: str, params: ChapterParams, out: Path) -> Path:
    """Execute a chapter into `out`: the notebook `<chapter>.ipynb` and the record `<chapter>.json`.

    Both appear whole, after the last cell, or not at all; a failed run leaves `<chapter>.failed.ipynb`
    and no record of an earlier one is touched.

    Returns
    -------
    Path
        The record.

    Raises
    ------
    ParameterError
        `out` cannot be written, or a cell refused a parameter.
    SourceError
        A data set that the chapter was asked for cannot be had.
    ChapterError
        A cell failed, or the kernel died.
    """
    source = notebook_path(chapter)
    if params.record_path:
        require_writable(Path(params.record_path), parameter="record_path")
    notebook, record, failed = (out / f"{chapter}{suffix}" for suffix in (".ipynb", ".json", ".failed.ipynb"))
    with _work_folder(out, results=(notebook, record, failed)) as work:
        draft = Path(work) / notebook.name
        try:
            executed = _execute(source, draft, params)
        except _papermill_error() as error:
            if error.ename == "ParameterError":
                raise ParameterError(error.evalue) from None
            if error.ename == "SourceError":
                raise SourceError(error.evalue) from None
            os.replace(draft, failed)
            raise ChapterError(
                f"{chapter} failed at In [{error.exec_count}] with {error.ename}: {_one_line(error.evalue)} "
                f"(the traceback is in {failed})"
            ) from None
        found = record_in(executed)
        if found is None:
            raise ChapterError(f"{chapter} ran, but its last code cell left no record")
        executed.metadata.papermill.output_path = str(notebook)
        draft.write_text(_notebook_text(executed), encoding="utf-8")
        record.unlink(missing_ok=True)
        os.replace(draft, notebook)
        write_json(record, found, parameter="--out")
        failed.unlink(missing_ok=True)
    return record


def prepare(scale: str, folder: Path) -> None:
    """Lay out the sources of the book at `scale` in `folder`, ready for `jupyter-book build`.

    Every chapter gets the scale's parameters in an injected cell and is not run. Files that would
    not change are left alone, so that a second build finds nothing new.
    """
    from papermill import execute_notebook

    config = yaml.safe_load((paths.ROOT / "_config.yml").read_text(encoding="utf-8"))
    config["sphinx"]["config"]["book_scale"] = scale
    wanted = {Path("_config.yml"): yaml.safe_dump(config, sort_keys=False).encode()}
    for name in ("_toc.yml", "_ext", "book"):
        top = paths.ROOT / name
        for file in [top] if top.is_file() else sorted(top.rglob("*")):
            if file.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & set(file.parts):
                wanted[file.relative_to(paths.ROOT)] = file.read_bytes()
    for chapter in CHAPTERS:
        source = notebook_path(chapter)
        changes = scale_values(chapter, scale)
        parameters(chapter, scale)
        nb = execute_notebook(source, None, changes, prepare_only=True, kernel_name=KERNEL, progress_bar=False)
        del nb.metadata["papermill"]
        for cell in nb.cells:
            cell.metadata.pop("papermill", None)
            if "injected-parameters" in cell.metadata.get("tags", []):
                cell.id = "injected-parameters"
                cell.metadata.tags.append("hide-input")
        wanted[source.relative_to(paths.ROOT)] = _notebook_text(nb).encode()
    _mirror(wanted, folder)


def _mirror(wanted: dict[Path, bytes], folder: Path) -> None:
    for old in folder.rglob("*"):
        inside = old.relative_to(folder)
        if old.is_file() and inside.parts[0] != "_build" and inside not in wanted:
            old.unlink()
    for name, content in wanted.items():
        target = folder / name
        if not target.is_file() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def _execute(source: Path, draft: Path, params: ChapterParams):
    """Run the notebook; a kernel that dies while it starts (parallel kernels race for ports) is tried again."""
    from papermill import execute_notebook
    from zmq.error import ZMQError

    for attempt in range(1, ATTEMPTS + 1):
        started = time.monotonic()
        try:
            return execute_notebook(
                source,
                draft,
                params.model_dump(),
                kernel_name=KERNEL,
                progress_bar=False,
                extra_arguments=KERNEL_OPTIONS,
            )
        except (RuntimeError, ZMQError) as error:  # nbclient's DeadKernelError is a RuntimeError
            if attempt == ATTEMPTS or time.monotonic() - started > STARTING_SECONDS:
                raise ChapterError(f"the kernel of {source.name} died: {_one_line(str(error))}") from None


def _papermill_error() -> type[Exception]:
    from papermill.exceptions import PapermillExecutionError

    return PapermillExecutionError


def _work_folder(out: Path, results: tuple[Path, ...]) -> tempfile.TemporaryDirectory:
    """A folder beside the results, so that moving them into place is atomic."""
    try:
        if out.resolve() == paths.BOOK.resolve():
            raise ParameterError(
                f"--out must be a folder for results, got {str(out)!r}: the chapters' sources are there"
            )
        for result in results:
            if result.is_dir():
                raise ParameterError(
                    f"--out must be a folder for results, got {str(out)!r}: {result.name} is a folder there"
                )
        out.mkdir(parents=True, exist_ok=True)
        leftovers.remove(out, RUNNING)
        return tempfile.TemporaryDirectory(dir=out, prefix=RUNNING)
    except ParameterError:
        raise
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"--out must be a folder that can be written, got {str(out)!r} ({_reason(error)})"
        ) from None


def record_in(notebook) -> dict | None:
    """The record in the outputs of an executed notebook (an nbformat node), if it has one."""
    for cell in reversed(notebook.cells):
        for output in cell.get("outputs", []):
            if MIME in output.get("data", {}):
                return output["data"][MIME]
    return None


def _notebook_text(notebook) -> str:
    import nbformat

    return nbformat.writes(notebook) + "\n"


def _nearest(name: str, known) -> str:
    matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]}?)" if matches else ""


def _one_line(text: str, limit: int = 300) -> str:
    return " ".join(text.split())[:limit]


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or _one_line(str(error))
