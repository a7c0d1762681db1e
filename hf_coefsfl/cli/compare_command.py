"""`coefsfl compare`: train many settings, as a spec lists them, and report them in the paper's tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from .._recipes import specs
from ..analysis.tables import format_table
from ..analysis.timing import Network
from ..compare import Archive, Cell, Runner, Spec, check_files, expand, load_finished, load_spec, total, write_report
from ..compare.budget import Budget, with_server_work
from ..compare.grid import Summary
from ..trainer.output_folder import FolderLock
from .units import parse_bandwidth, parse_latency, parse_speed

EPILOG = """\
A run is one process, and its folder tells what it has done: kill the comparison at any point and start it again, and
only what is missing runs. The learning rate of each setting is chosen on the first seed. docs/comparing.md explains
the spec and the report.

example:
  coefsfl compare recipes/compare/sick_nli.yaml --jobs 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    names = ", ".join(specs())
    add("spec", help=f"YAML file of tasks, splits, cuts, methods, learning rates and seeds, or one of: {names}")
    add("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    add("--output_dir", help="default: outputs/compare/NAME for NAME.yaml")
    add("--runs_dir", help="folder of the runs, which specs may share (default: runs in --output_dir)")
    add("--archive", metavar="FILE", help="Parquet file of finished runs: they are not run again, new ones are added")
    add("--bandwidth", default="10Mbps", help="of a client's link, for the table's seconds (default: %(default)s)")
    add("--latency", default="50ms", help="of one transfer over it (default: %(default)s)")
    add(
        "--device_speed",
        help="with --dry_run: adds MiB, and hours on a device of e.g. 10TFLOPS (what it reaches, not its peak)",
    )
    add(
        "--server_work",
        action="store_true",
        help="with --report_only: estimates the server's GFLOPs of runs that did not count them (count_flops)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry_run", action="store_true", help="list the runs and start none")
    what.add_argument("--report_only", action="store_true", help="rebuild the report of what is done")


def run(arguments: argparse.Namespace) -> str:
    """Run what is missing and return the table; a failed run makes the status 1."""
    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {arguments.jobs}.")
    if arguments.server_work and not arguments.report_only:
        raise ValueError("--server_work needs --report_only: let a run count with count_flops, or report it later.")
    link = Network(parse_bandwidth(arguments.bandwidth), parse_latency(arguments.latency))
    spec = load_spec(arguments.spec)
    cells = expand(spec)
    root = Path(arguments.output_dir or Path("outputs", "compare", spec.name))
    runs = Path(arguments.runs_dir or root / "runs")
    archive = Archive(Path(arguments.archive)) if arguments.archive is not None else None
    if arguments.dry_run:
        return _listing(cells, load_finished(cells, runs, archive), arguments.device_speed)
    if arguments.device_speed is not None:
        raise ValueError("--device_speed needs --dry_run: it estimates the runs and starts none.")
    if not arguments.report_only:
        check_files(cells, load_finished(cells, runs, archive))
    with FolderLock(root):
        if arguments.report_only:
            finished, notes = load_finished(cells, runs, archive), list[str]()
            if arguments.server_work:
                finished, notes = with_server_work(cells, finished)
            text = write_report(spec, cells, root, finished, link=link)
            return "\n".join([*notes, _answer(text, root)])
        return _compare(spec, Runner(cells, runs, jobs=arguments.jobs, archive=archive), root, link)


def _compare(spec: Spec, runner: Runner, root: Path, link: Network | None) -> str:
    def refresh(finished: Mapping[str, Summary]) -> None:
        write_report(spec, cells, root, finished, list(runner.failures.values()), plots=False, link=link)

    cells, runner.on_finish = runner.cells, refresh
    try:
        failures = runner.run()
    except KeyboardInterrupt:
        done = f"{len(runner.finished)} of {total(cells)} runs are done"
        print(f"\nStopped; {done}. The same command continues from there.", file=sys.stderr)
        sys.exit(130)
    text = write_report(spec, cells, root, runner.finished, failures, link=link)
    if not failures:
        return _answer(text, root)
    print(_answer(text, root), flush=True)
    print(f"{len(failures)} runs failed; the same command tries them again:", file=sys.stderr)
    print("\n".join(f"  {failure.run.id}: {failure.log}" for failure in failures), file=sys.stderr)
    sys.exit(1)


def _answer(text: str, root: Path) -> str:
    return f"{text}\nReport: {root / 'report.html'}"


def _listing(cells: list[Cell], finished: Mapping[str, Summary], speed: str | None) -> str:
    budget = Budget(parse_speed(speed)) if speed is not None else None
    rows, notes, hours, mib = [], set(), 0.0, 0.0
    for cell in tqdm(cells, desc="estimating", unit="setting", leave=False, disable=budget is None):
        runs = cell.first()
        row = {"task": cell.spec.title or cell.spec.task, "model": cell.spec.model, "split": cell.split.name}
        row |= {"cut": str(cell.cut), "method": cell.variant.name}
        planned = len(runs) + len(cell.spec.seeds) - 1
        done = sum(run.id in finished for run in runs) + max(0, len(cell.results(finished)) - 1)
        row |= {"runs": "--" if cell.refused else str(planned), "done": "" if cell.refused else str(done)}
        if cell.refused:
            notes.add(f"-- {cell.variant.name}, {cell.spec.task}: {cell.refused}")
        if budget is not None:
            row |= {"hours": "--", "MiB": "--"}
            if not cell.refused:
                try:
                    estimate = budget.of(cell)
                except ValueError as error:
                    notes.add(f"-- {cell.spec.task}, {cell.spec.model}: cannot be estimated: {error}")
                else:
                    left = planned - done
                    row |= {"hours": f"{left * estimate.seconds / 3600:,.2f}", "MiB": f"{left * estimate.mib:,.0f}"}
                    hours, mib = hours + left * estimate.seconds / 3600, mib + left * estimate.mib
        rows.append(row)
    conclusion = f"{total(cells)} runs, {len(finished)} of them done."
    if budget is not None:
        conclusion += (
            f" The others take about {hours:,.1f} hours on one device of {speed} and move {mib:,.0f} MiB. Runs that "
            "settings share are counted for each."
        )
    return "\n".join([format_table(rows), "", *sorted(notes), conclusion])
