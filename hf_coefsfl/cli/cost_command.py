"""`coefsfl cost`: what a round costs each method in transfers, bytes, FLOPs and memory, without training."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from typing import Any

import yaml
from tqdm import tqdm

from ..analysis.backbones import NAMED, SEQUENCE_LENGTH, TASKS, build_model, default_cut
from ..analysis.cost import Cost, CostModel, Round
from ..analysis.depth import DeepCostModel, cost_model
from ..analysis.memory import Run
from ..analysis.storage import DTYPES, computed_in, stored_as
from ..analysis.tables import format_table
from ..analysis.timing import Devices, Network
from ..methods import DEFAULT_METHOD, METHODS, Method, make_method, ordered_methods
from ..protocol.adapters import ADAPTER_CODECS, AS_THEY_ARE
from ..protocol.codecs import COMPACT, for_all_kinds
from .units import parse_bandwidth, parse_latency, parse_speed

EPILOG = f"""\
up_mib and down_mib are smashed data, gradients, curvature and auxiliary networks; extra_up_mib and extra_down_mib
are labels, masks and scalars, and the weights of federated averaging. GFLOPs are per sample of the client's data,
2 for each multiply-add. Nothing is trained and no weights are downloaded. docs/costs.md says how it is counted.

--rounds adds what a run takes: the memory of the process that simulates it, of a client and of the server's side of
one client in processes of their own, each beyond imports and dataset, and the files it leaves.

examples:
  coefsfl cost --model vit-tiny --num-labels 100 --cut 4 --num-samples 1000 --batch-size 32 --format json
  coefsfl cost --model distilroberta --num-labels 3 --methods {DEFAULT_METHOD} --rounds 100 --save-total-limit 2
"""
# The columns of a table and how their numbers are shown; JSON and CSV hold more of both.
COLUMNS = {
    "method": "", "cut": "", "transfers": ",", "up_mib": ",.2f", "down_mib": ",.2f", "extra_up_mib": ".3f",
    "extra_down_mib": ".3f", "client_gflops": ".3f", "server_gflops": ".3f", "client_memory_mib": ",.1f",
}  # fmt: skip
RUN_COLUMNS = {"method": "", "cut": ""} | dict.fromkeys(
    ("process_memory_mib", "client_alone_mib", "server_alone_mib", "disk_mib", "disk_peak_mib"), ",.1f"
)
_EXAMPLE = f"""'{{"{DEFAULT_METHOD}": {{"server_passes": 1}}}}'"""
RUN_OPTIONS = ("clients_per_round", "num_clients", "save_steps", "save_total_limit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(NAMED)}, a folder with a config.json, that file, or a Hub id")
    add("--task", choices=list(TASKS), help="default: the backbone's, or what the config says")
    add("--num-labels", type=int, help="number of classes (default: the config's)")
    add(
        "--cut",
        nargs="+",
        help='blocks on the client, one or several, or "all" (default: the paper\'s for its backbones, else 2)',
    )
    add("--num-samples", type=int, default=1000, help="samples of the client (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="default: %(default)s")
    add("--local-epochs", type=int, default=1, help="default: %(default)s")
    add("--sequence-length", type=int, help=f"tokens of a text (default: {SEQUENCE_LENGTH})")
    add("--head", choices=["full", "lora", "frozen"], help="how the task head is trained (default: as for training)")
    add(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"names, with options as in {DEFAULT_METHOD}:server_passes=1 (default: all that can train the model)",
    )
    add("--method-kwargs", metavar="JSON", help=f"options by method, e.g. {_EXAMPLE}")
    add("--exchange-dtype", choices=for_all_kinds(), default="float32", help="of what crosses (default: %(default)s)")
    add("--exchange-codec", metavar="TEXT", help=f"as for training: codecs by kind as JSON, or {COMPACT}")
    add(
        "--adapter-codec",
        choices=ADAPTER_CODECS,
        default=AS_THEY_ARE,
        help="of the weights of federated averaging (default: %(default)s)",
    )
    add("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="of the base weights (default: float32)")
    add("--gradient-checkpointing", "--gradient_checkpointing", action="store_true", help="as for training")
    add("--rounds", type=int, help="of a run: adds its memory and its files")
    add("--clients-per-round", type=int, help=f"in the process (default: {Run.clients_per_round})")
    add("--num-clients", type=int, help=f"of the run (default: {Run.num_clients})")
    add("--save-steps", type=int, help=f"rounds between checkpoints (default: {Run.save_steps})")
    add("--save-total-limit", type=int, help="checkpoints that are kept (default: all)")
    add("--bandwidth", nargs="+", help="of the client's connection, e.g. 10Mbps 1Gbps: adds the seconds of a round")
    add("--latency", nargs="+", help="of one transfer, e.g. 50ms: one for all connections or each (default: none)")
    add("--client-speed", help="of the client's device, e.g. 50GFLOPS: adds the seconds of computing")
    add("--server-speed", help="of what the server has for one client, e.g. 10TFLOPS")
    add("--format", choices=["table", "json", "csv", "markdown"], default="table", help="default: %(default)s")


def run(arguments: argparse.Namespace) -> str:
    """Return the table in the format that was asked for."""
    networks, devices, of_run = _networks(arguments), _devices(arguments), _run(arguments)
    options = _options(arguments.method_kwargs)
    plan = Round(arguments.num_samples, arguments.batch_size, arguments.local_epochs)
    for name in options:
        if name not in METHODS:
            raise ValueError(f"Unknown method {name!r}. Choose one of: {', '.join(ordered_methods())}.")
    methods = [_method(item, options) for item in arguments.methods or ordered_methods()]
    if arguments.num_labels is not None and arguments.num_labels < 1:
        raise ValueError(f"--num-labels must be at least 1, got {arguments.num_labels}.")
    costs: list[Cost] = []
    left_out: dict[str, str] = {}
    for computed in dict.fromkeys(map(computed_in, arguments.dtype)):
        stored = [dtype for dtype in dict.fromkeys(arguments.dtype) if computed_in(dtype) == computed]
        found = _costs(arguments, methods, options, plan, of_run, computed, left_out)
        costs += [stored_as(cost, dtype) for cost in found for dtype in stored]
    if not costs:
        raise ValueError(f"no method can train {arguments.model}: {next(iter(left_out.values()), 'none was named')}")
    for name, reason in left_out.items():
        print(f"coefsfl cost: {name} is left out: {reason}", file=sys.stderr)
    rows = [cost.row(networks, devices) for cost in costs]
    text = render(rows, arguments.format)
    if of_run is None or arguments.format in ("json", "csv"):
        return text
    columns = RUN_COLUMNS if len(arguments.dtype) < 2 else _with_dtype(RUN_COLUMNS)
    title = f"A run of {of_run.num_rounds} rounds with {of_run.clients_per_round} of {of_run.num_clients} clients each:"
    return f"{text}\n\n{title}\n\n{format_table(rows, columns, markdown=arguments.format == 'markdown')}"


def _costs(
    arguments: argparse.Namespace,
    methods: list[Method],
    options: dict[str, Any],
    plan: Round,
    of_run: Run | None,
    dtype: str,
    left_out: dict[str, str],
) -> list[Cost]:
    """Return the costs of a model that computes in this dtype; methods that cannot train it go to `left_out`."""
    model = cost_model(
        lambda: build_model(arguments.model, arguments.num_labels, arguments.task, dtype),
        head=arguments.head,
        sequence_length=arguments.sequence_length,
        exchange_dtype=arguments.exchange_dtype,
        exchange_codec=arguments.exchange_codec,
        adapter_codec=arguments.adapter_codec,
        gradient_checkpointing=arguments.gradient_checkpointing,
    )
    cuts = _cuts(arguments.cut, default_cut(arguments.model), model)
    costs: list[Cost] = []
    for cut in cuts:
        model.split(cut)  # a model that cannot be split is one error, not one for each method
    progress = tqdm([(cut, m) for cut in cuts for m in methods], file=sys.stderr, leave=False, unit="method")
    for cut, method in progress:
        name = method.name
        progress.set_description(f"cut {cut}, {name}")
        try:
            costs += model.costs(method, cut, plan, of_run)
        except ValueError as error:
            if arguments.methods or name in options:
                raise
            left_out[f"{name} at cut {cut}"] = str(error)
        except (IndexError, RuntimeError) as error:
            raise ValueError(f"{arguments.model} does not run {name} on such samples: {error}") from error
    return costs


def render(rows: list[dict[str, Any]], style: str) -> str:
    """Return rows as a table, Markdown, JSON or CSV. Parts of the memory are for JSON only."""
    if style == "json":
        return json.dumps(rows, indent=2)
    flat = [{name: value for name, value in row.items() if not isinstance(value, dict)} for row in rows]
    if style == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(flat[0]) if flat else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return text.getvalue().rstrip("\n")
    columns = COLUMNS if len({row["dtype"] for row in flat}) < 2 else _with_dtype(COLUMNS)
    shown = columns | {name: ",.2f" for row in flat for name in row if "seconds" in name}
    # A few bytes must not look like none.
    tiny = [
        row | {name: f"{row[name]:.6f}" for name in ("up_mib", "down_mib") if 0 < row[name] < 0.005} for row in flat
    ]
    return format_table(tiny, shown, markdown=style == "markdown")


def _with_dtype(columns: dict[str, str]) -> dict[str, str]:
    return {"method": "", "dtype": ""} | columns


def _networks(arguments: argparse.Namespace) -> dict[str, Network]:
    """Return the connections by the names that were given."""
    names, given = arguments.bandwidth or [], arguments.latency or []
    if not names and given:
        raise ValueError("--latency needs a --bandwidth to make a time of.")
    latencies = [parse_latency(text) for text in given] or [0.0]
    if len(latencies) not in (1, len(names)) and names:
        raise ValueError(f"--latency takes one value or one for each --bandwidth ({len(names)}), got {len(latencies)}.")
    latencies = latencies * len(names) if len(latencies) == 1 else latencies
    return {name: Network(parse_bandwidth(name), delay) for name, delay in zip(names, latencies, strict=True)}


def _devices(arguments: argparse.Namespace) -> Devices | None:
    given = arguments.client_speed, arguments.server_speed
    if None in given:
        if any(given):
            raise ValueError("--client-speed and --server-speed belong together: a round waits for both sides.")
        return None
    return Devices(*map(parse_speed, given))


def _method(item: str, options: dict[str, dict[str, Any]]) -> Method:
    """Return the method of `name` or `name:option=value,...`; its values are YAML."""
    name, _, text = item.partition(":")
    kwargs = dict(options.get(name, {}))
    for part in filter(None, text.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{item!r} is not a method with options: write {name}:option=value,option=value.")
        kwargs[option] = yaml.safe_load(value)
    if name not in METHODS:
        raise ValueError(f"Unknown method {name!r}. Choose one of: {', '.join(ordered_methods())}.")
    return make_method(name, kwargs)


def _run(arguments: argparse.Namespace) -> Run | None:
    given = {name: getattr(arguments, name) for name in RUN_OPTIONS if getattr(arguments, name) is not None}
    if arguments.rounds is not None:
        return Run(arguments.rounds, **given)
    if given:
        raise ValueError(f"--{next(iter(given)).replace('_', '-')} needs --rounds: it describes a run.")
    return None


def _options(text: str | None) -> dict[str, dict[str, Any]]:
    try:
        options = json.loads(text) if text is not None else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"--method-kwargs is not JSON: {error}.") from error
    if not isinstance(options, dict) or not all(isinstance(value, dict) for value in options.values()):
        raise ValueError(f"--method-kwargs must map methods to their options, e.g. {_EXAMPLE}.")
    return options


def _cuts(given: list[str] | None, default: int, model: CostModel | DeepCostModel) -> list[int]:
    if given == ["all"] and model.cuts:
        return list(model.cuts)
    try:
        cuts = [int(text) for text in dict.fromkeys(given)] if given and model.cuts else [default]
    except ValueError:
        raise ValueError(f'--cut must be a number of blocks or "all", got {" ".join(given or [])!r}.') from None
    if not model.cuts:
        raise ValueError("the model has one block only, which leaves nothing to cut.")
    for cut in cuts:
        if cut not in model.cuts:
            raise ValueError(f"--cut must be from 1 to {model.cuts[-1]} for this model, got {cut}.")
    return cuts
